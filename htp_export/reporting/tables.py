"""Results by module as tables, for text and for pandas: which modules are drawn, and what became of each one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.hierarchy import ModuleInfo
from htp_export.reporting.columns import MODULE, Column, names_of, record
from htp_export.reporting.result import Result, Table


class Drawn(Protocol):
    """What is known of a module that may be drawn."""

    @property
    def calls(self) -> int: ...
    @property
    def nodes(self) -> object: ...


def drawn_parents(modules: Mapping[str, Drawn]) -> dict[str, str | None]:
    """The modules that are drawn, in order, each with the one that it is drawn below; None at the top.

    A container, which holds what runs and never ran itself, is left out: its name stands before
    those of its children.

    Examples:
        >>> from types import SimpleNamespace
        >>> modules = {path: SimpleNamespace(calls=path != "layer", nodes=9) for path in ("", "layer", "layer.0")}
        >>> drawn_parents(modules)
        {'': None, 'layer.0': ''}
    """
    holding = tags.all_above(modules)
    drawn = {
        path: module
        for path, module in modules.items()
        if not path or module.calls or not module.nodes or path not in holding
    }
    return {path: tags.nearest_above(path, drawn) for path in drawn}


def drawn_levels(parents: Mapping[str, str | None]) -> dict[str, int]:
    """The level of each module that is drawn, from 0 at the top; ``parents`` are those of `drawn_parents`.

    A file may list a module before the one that it is drawn below.

    Examples:
        >>> drawn_levels({"a.b": "a", "a": "", "": None})
        {'': 0, 'a': 1, 'a.b': 2}
    """
    levels: dict[str, int] = {}
    for path in parents:
        unknown, current = list[str](), path if path not in levels else None
        while current is not None and current not in levels:
            unknown.append(current)
            current = parents[current]
        above = -1 if current is None else levels[current]
        levels.update((each, above + 1 + place) for place, each in enumerate(reversed(unknown)))
    return levels


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
            name: Which: a column or another number of a row, as ``total_ms``, ``self_flops`` or
                ``share``; None for the first that the result is about.

        Raises:
            InputError: If the modules have no such number.
        """
        name = name or self.measure
        found = {path: getattr(row, name, None) for path, row in self.by_module.items()}
        numbers = {
            path: float(value) for path, value in found.items() if isinstance(value, int | float)
        }
        if found and not numbers:
            known = dict.fromkeys(each for row in self.by_module.values() for each in _numbers(row))
            raise InputError(
                f"modules of {type(self).__name__} have no number {name!r}; there are {', '.join(known)}"
            )
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
        return {
            **super().data(),
            "modules": {path: self.module_data(row) for path, row in self.by_module.items()},
        }

    def to_pandas(self) -> Any:
        """The modules as a ``pandas.DataFrame``: a row for each, and each of `columns` in which one has a value.

        Raises:
            InputError: If pandas is not installed.
        """
        records = {path: record(self.columns, row) for path, row in self.by_module.items()}
        known = {
            name for row in records.values() for name, value in row.items() if value is not None
        }
        names = [name for name in names_of(self.columns) if name in known]
        return data_frame(list(records.values()), names, list(records), "module")

    def table(self) -> Table:
        """The modules that are listed, in the columns that are drawn."""
        return [MODULE, *self.drawn], self.listed


def _numbers(row: object) -> list[str]:
    names = (name for name in dir(row) if not name.startswith("_"))
    return [name for name in names if isinstance(getattr(row, name), int | float)]


def data_frame(
    records: Sequence[Mapping[str, Any]], columns: Sequence[str], index: Sequence[Any], name: str
) -> Any:
    """Rows as a ``pandas.DataFrame``; ``name`` says what the index is: ``"module"``.

    Raises:
        InputError: If pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise InputError("to_pandas needs pandas; install it with: pip install pandas") from error
    return pandas.DataFrame(records, index=pandas.Index(index, name=name), columns=list(columns))


@dataclass(frozen=True, kw_only=True)
class CompressedModule(ModuleInfo):
    """What became of one module, with all modules below it; ``""`` is the whole model.

    Attributes:
        precision: The precision of its weights now, or the one in which it computes: ``fp32``,
            ``int8``; ``mixed`` for several. None where that is not known.
        bytes_before: Size of all weights that its nodes read, biases too, before.
        bytes_after: The same afterwards, with scales and zero points.
    """

    precision: str | None = None
    bytes_before: int = 0
    bytes_after: int = 0

    @property
    def sparsity(self) -> float | None:
        """Share of its weights that are zero or gone; None where that was not counted."""
        return None

    @property
    def ratio(self) -> float | None:
        """The bytes after by the bytes before; None for a module without weights."""
        return self.bytes_after / self.bytes_before if self.bytes_before else None


PRECISION: Column[CompressedModule] = Column("precision", "precision", right=False, keep=4)
SPARSITY: Column[CompressedModule] = Column("sparsity", "sparsity", unit="%", keep=9)
BYTES_COLUMNS: tuple[Column[CompressedModule], ...] = (
    Column("bytes_before", "bytes before", unit="B", keep=7),
    Column("bytes_after", "bytes after", unit="B", keep=8),
    Column("ratio", "ratio", unit="%", keep=2),
)
"""The bytes, in every table of these modules."""
