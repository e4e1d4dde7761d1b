"""Results by module as tables, for text and pandas: the drawn modules, and their columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.hierarchy import ModuleInfo
from htp_export.reporting.columns import MODULE, Column, data_frame, names_of, record
from htp_export.reporting.result import Result, Table


class Drawn(Protocol):
    """A module that a table can draw."""

    @property
    def calls(self) -> int: ...
    @property
    def nodes(self) -> object: ...


def drawn_parents(modules: Mapping[str, Drawn]) -> dict[str, str | None]:
    """Drawn module → the drawn module above it, None at the top; in order.

    A container, which never ran itself, is not drawn: its name is a prefix of its children's.

    Examples:
        >>> from types import SimpleNamespace
        >>> modules = {path: SimpleNamespace(calls=path != "layer", nodes=9) for path in ("", "layer", "layer.0")}
        >>> drawn_parents(modules)
        {'': None, 'layer.0': ''}
    """
    holding = tags.all_above(modules)
    drawn: dict[str, None] = {}
    for path, module in modules.items():
        never_ran = bool(path) and not module.calls
        is_container = never_ran and module.nodes and path in holding
        if not is_container:
            drawn[path] = None
    return {path: tags.nearest_above(path, drawn) for path in drawn}


def drawn_levels(parents: Mapping[str, str | None]) -> dict[str, int]:
    """Drawn module → its level, from 0 at the top; ``parents`` is a result of `drawn_parents`.

    A file may list a module before its parent.

    Examples:
        >>> drawn_levels({"a.b": "a", "a": "", "": None})
        {'': 0, 'a': 1, 'a.b': 2}
    """
    levels: dict[str, int] = {}
    for path in parents:
        pending = list[str]()
        current: str | None = path if path not in levels else None
        while current is not None and current not in levels:
            pending.append(current)
            current = parents[current]
        level = -1 if current is None else levels[current]
        for descendant in reversed(pending):
            level += 1
            levels[descendant] = level
    return levels


class ModuleTable(Result):
    """A result with numbers by module.

    Attributes:
        columns: The columns of a module, in the order of JSON, CSV and data frames.
        details: Further attributes of a row, which only JSON contains.
        measure: The column that `by_path` returns by default.
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
        """Module path → one number, for an overlay; modules without it are omitted.

        Args:
            name: A column or another number of a row, such as ``total_ms``, ``self_flops`` or
                ``share``; None for the main number of the result.

        Raises:
            InputError: If the modules have no such number.
        """
        name = name or self.measure
        values = {path: getattr(row, name, None) for path, row in self.by_module.items()}
        numbers = {
            path: float(value) for path, value in values.items() if isinstance(value, int | float)
        }
        if values and not numbers:
            names: dict[str, None] = {}
            for row in self.by_module.values():
                names.update(dict.fromkeys(_numbers(row)))
            raise InputError(
                f"modules of {type(self).__name__} have no number {name!r}; there are {', '.join(names)}"
            )
        return numbers

    @property
    def drawn(self) -> Sequence[Column[Any]]:
        """The columns of the table as text, after the module's path."""
        return self.columns

    @property
    def listed(self) -> Sequence[Any]:
        """The rows of the table as text."""
        return list(self.by_module.values())

    def module_data(self, row: Any) -> dict[str, Any]:
        """The entry of a module in JSON."""
        return {**record(self.columns, row), **{name: getattr(row, name) for name in self.details}}

    def data(self) -> dict[str, Any]:
        """The entries of `to_dict`, with the modules by their columns."""
        return {
            **super().data(),
            "modules": {path: self.module_data(row) for path, row in self.by_module.items()},
        }

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with a row for each module, and the columns that have any value.

        Raises:
            InputError: If pandas is not installed.
        """
        records = {path: record(self.columns, row) for path, row in self.by_module.items()}
        used = set[str]()
        for row in records.values():
            used.update(name for name, value in row.items() if value is not None)
        names = [name for name in names_of(self.columns) if name in used]
        return data_frame(list(records.values()), names, list(records), "module")

    def table(self) -> Table:
        """The listed modules, in the drawn columns."""
        return [MODULE, *self.drawn], self.listed


def _numbers(row: object) -> list[str]:
    names = (name for name in dir(row) if not name.startswith("_"))
    return [name for name in names if isinstance(getattr(row, name), int | float)]


@dataclass(frozen=True, kw_only=True)
class CompressedModule(ModuleInfo):
    """One module, with its descendants, before and after a change; ``""`` is the whole model.

    Attributes:
        precision: The precision of its weights now, or of its computation: ``fp32``, ``int8``;
            ``mixed`` for several; None if unknown.
        bytes_before: Size of all weights and biases that its nodes used before.
        bytes_after: Size afterwards, with scales and zero points.
    """

    precision: str | None = None
    bytes_before: int = 0
    bytes_after: int = 0

    @property
    def sparsity(self) -> float | None:
        """Share of its weights that are zero or removed; None if it was not counted."""
        return None

    @property
    def ratio(self) -> float | None:
        """``bytes_after`` divided by ``bytes_before``; None for a module without weights."""
        if self.bytes_before:
            return self.bytes_after / self.bytes_before
        return None


PRECISION: Column[CompressedModule] = Column("precision", "precision", right=False, keep=4)
SPARSITY: Column[CompressedModule] = Column("sparsity", "sparsity", unit="%", keep=9)
BYTES_COLUMNS: tuple[Column[CompressedModule], ...] = (
    Column("bytes_before", "bytes before", unit="B", keep=7),
    Column("bytes_after", "bytes after", unit="B", keep=8),
    Column("ratio", "ratio", unit="%", keep=2),
)
"""The columns of sizes, in every table of these modules."""
