"""Results by module as tables: as text, and for pandas where that is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from htp_export.errors import InputError
from htp_export.results.columns import MODULE, Column, names_of, record
from htp_export.results.result import Result, Table


class ModuleTable(Result):
    """A result with numbers by module.

    Attributes:
        columns: All that is known of a module, in the order of JSON, CSV and data frames.
        details: Attributes of a row that JSON has beside its columns.
        measure: The column that `by_path` has where none is named.
    """

    columns: ClassVar[Sequence[Column[Any]]] = ()
    details: ClassVar[tuple[str, ...]] = ()
    measure: ClassVar[str] = ""

    @property
    def by_module(self) -> Mapping[str, Any]:
        """Module path → its row."""
        rows: Mapping[str, Any] = vars(self)["modules"]
        return rows

    def by_path(self, name: str | None = None) -> dict[str, float]:
        """Module path → one number, to lay over a drawing of the model; modules without it are left out.

        Args:
            name: Which: a column or another number of a row, as ``total_ms``, ``self_flops`` or ``share``; None for
                the first that the result is about.

        Raises:
            InputError: If the modules have no such number.
        """
        name = name or self.measure
        found = {path: getattr(row, name, None) for path, row in self.by_module.items()}
        numbers = {path: float(value) for path, value in found.items() if isinstance(value, int | float)}
        if found and not numbers:
            known = dict.fromkeys(each for row in self.by_module.values() for each in _numbers(row))
            raise InputError(f"modules of {type(self).__name__} have no number {name!r}; there are {', '.join(known)}")
        return numbers

    @property
    def drawn(self) -> Sequence[Column[Any]]:
        """The columns of the table as text, after the module's path."""
        return self.columns

    @property
    def listed(self) -> Sequence[Any]:
        """The modules that have a line in the table as text."""
        return list(self.by_module.values())

    def module_data(self, row: Any) -> dict[str, Any]:
        """What JSON has of a module."""
        return {**record(self.columns, row), **{name: getattr(row, name) for name in self.details}}

    def data(self) -> dict[str, Any]:
        """What `to_dict` has: the modules by their columns."""
        return {**super().data(), "modules": {path: self.module_data(row) for path, row in self.by_module.items()}}

    def to_pandas(self) -> Any:
        """The modules as a ``pandas.DataFrame``: a row for each, and each of `columns` in which one has a value.

        Raises:
            InputError: If pandas is not installed.
        """
        records = {path: record(self.columns, row) for path, row in self.by_module.items()}
        known = {name for row in records.values() for name, value in row.items() if value is not None}
        names = [name for name in names_of(self.columns) if name in known]
        return data_frame(list(records.values()), names, list(records), "module")

    def table(self) -> Table:
        """The modules that are listed, in the columns that are drawn."""
        return [MODULE, *self.drawn], self.listed


def _numbers(row: object) -> list[str]:
    """The names of the numbers of a row, properties too."""
    names = (name for name in dir(row) if not name.startswith("_"))
    return [name for name in names if isinstance(getattr(row, name), int | float)]


def data_frame(records: Sequence[Mapping[str, Any]], columns: Sequence[str], index: Sequence[Any], name: str) -> Any:
    """Rows as a ``pandas.DataFrame``; ``name`` says what the index is: ``"module"``.

    Raises:
        InputError: If pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise InputError("to_pandas needs pandas; install it with: pip install pandas") from error
    return pandas.DataFrame(records, index=pandas.Index(index, name=name), columns=list(columns))
