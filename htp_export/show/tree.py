"""The module tree, drawn for a terminal or a pipe, or written as CSV."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from htp_export.errors import InputError
from htp_export.show.folding import likeness
from htp_export.show.module_table import Column, ModuleTable, column_names, csv_text, pick, si

if TYPE_CHECKING:
    from rich.console import RenderableType

    from htp_export.costs.module_tree import ModuleRow, ModuleTree

__all__ = ["COLUMNS", "render", "tree_csv"]


def _field(name: str) -> Callable[[ModuleRow], Any]:
    return lambda row: getattr(row, name)


def _not_computed(row: ModuleRow) -> str:
    return "" if row.fate == "computed" else row.fate


def _error(value: float) -> str:
    return f"{value:.1e}" if value else "0"


_ALL: tuple[Column[ModuleRow], ...] = (
    Column("class", "class", _field("simple_class"), style="cyan", right=False, keep=1),
    Column("calls", "calls", _field("calls")),
    Column("nodes", "nodes", _field("nodes"), "{:,}".format, keep=4),
    Column("own_nodes", "own nodes", _field("own_nodes"), "{:,}".format),
    Column("parameters", "parameters", _field("parameters"), "{:,}".format, keep=6),
    Column("flops", "FLOPs", _field("flops"), si, keep=7),
    Column("time", "ms", _field("time_ms"), "{:.3f}".format, keep=8),
    Column("own_time", "own ms", _field("own_time_ms"), "{:.3f}".format, keep=2),
    Column("error", "error", _field("error"), _error, keep=8),
    Column("status", "status", _field("status"), style="red", right=False, keep=3),
    Column("fate", "fate", _not_computed, style="yellow", right=False, keep=5),
)
COLUMNS = column_names(_ALL)
"""What can be shown of each module."""

_ALWAYS = ("class", "nodes", "parameters")
_WHERE_KNOWN = ("flops", "time", "error")


def render(
    tree: ModuleTree, *, fold: bool = True, columns: Sequence[str] | None = None, sort: str | None = None
) -> RenderableType:
    """A table with a line for each module: class, nodes, parameters, FLOPs, time and error where they are known.

    Args:
        tree: What to draw.
        fold: Draw siblings that are alike and follow each other, ``layer.0`` to ``layer.11``, once: their times as the
            mean, their errors as the largest.
        columns: Which of ``COLUMNS``, in this order.
        sort: A column: a list in place of the tree, the largest first.

    Raises:
        InputError: If there is no such column.

    Examples:
        >>> from rich.console import Console
        >>> from htp_export.costs.module_tree import ModuleRow, ModuleTree
        >>> net = ModuleRow("", "net.Net", 1, "computed", nodes=2, self_nodes=0, parameters=8)
        >>> fc = ModuleRow("fc", "nn.Linear", 1, "computed", nodes=2, self_nodes=2, parameters=8)
        >>> Console(width=60).print(render(ModuleTree((net, fc))))  # doctest: +NORMALIZE_WHITESPACE
        module   class    nodes   parameters   fate
        (root)   Net          2            8
        └── fc   Linear       2            8
    """
    shown = _columns(tree, columns)
    rows = tree.rows if sort is None else _sorted(tree.rows, sort)
    from rich.console import Group
    from rich.text import Text

    from htp_export.show.tag_note import tag_note

    table = ModuleTable(rows, shown, _alike if fold else None, _merged, flat=sort is not None)
    notes = [*tag_note(tree.tags), *(Text(note, style="yellow") for note in tree.notes)]
    return Group(table, *notes) if notes else table


def tree_csv(tree: ModuleTree, columns: Sequence[str] | None = None, sort: str | None = None) -> str:
    """The same as CSV, a line for each module.

    Raises:
        InputError: If there is no such column.
    """
    rows = tree.rows if sort is None else _sorted(tree.rows, sort)
    return csv_text(rows, _columns(tree, columns))


def _columns(tree: ModuleTree, names: Sequence[str] | None) -> list[Column[ModuleRow]]:
    if names is None:
        known = [c.name for c in pick(_ALL, _WHERE_KNOWN) if any(c.value(row) is not None for row in tree.rows)]
        names = [*_ALWAYS, *known, "fate"]
    _check(names)
    return pick(_ALL, names)


def _sorted(rows: Sequence[ModuleRow], name: str) -> list[ModuleRow]:
    _check([name])
    column = pick(_ALL, [name])[0]

    def order(row: ModuleRow) -> tuple[bool, float]:
        value = column.value(row)
        number = -value if isinstance(value, int | float) else 0.0
        return (value is None, -math.inf if math.isnan(number) else number)

    if all(isinstance(column.value(row), str) for row in rows):
        return sorted(rows, key=column.value)
    return sorted(rows, key=order)


def _check(names: Sequence[str]) -> None:
    for name in names:
        if name not in COLUMNS:
            raise InputError(f"there is no column {name!r}; there are {', '.join(COLUMNS)}")


def _alike(row: ModuleRow) -> Hashable:
    return likeness(row.class_name, row.calls, row.fate, row.nodes, row.parameters, row.flops, row.status)


def _merged(rows: Sequence[ModuleRow]) -> ModuleRow:
    """One row for alike modules: what was measured differs between them."""
    errors = [row.error for row in rows if row.error is not None]
    return replace(
        rows[0],
        time_ms=_mean([row.time_ms for row in rows if row.time_ms is not None]),
        own_time_ms=_mean([row.own_time_ms for row in rows if row.own_time_ms is not None]),
        error=next((error for error in errors if math.isnan(error)), max(errors, default=None)),
    )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
