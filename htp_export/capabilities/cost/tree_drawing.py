"""The module tree, drawn for a terminal or a pipe, or written as CSV."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from htp_export.drawing.folding import likeness
from htp_export.drawing.module_table import TreeTable
from htp_export.results.columns import MODULE, Column, chosen, csv_text, sorted_by

if TYPE_CHECKING:
    from rich.console import RenderableType

    from htp_export.capabilities.cost.module_tree import ModuleRow, ModuleTree

__all__ = ["render", "tree_csv"]


_ALWAYS = ("class_name", "nodes", "parameters")
_WHERE_KNOWN = ("flops", "time_ms", "error")
_FATE: Column[ModuleRow] = Column("fate", "fate", lambda row: row.fate.remark, style="yellow", right=False, keep=5)


def render(
    tree: ModuleTree, *, fold: bool = True, columns: Sequence[str] | None = None, sort: str | None = None
) -> RenderableType:
    """A table with a line for each module: class, nodes, parameters, FLOPs, time and error where they are known.

    Args:
        tree: What to draw.
        fold: Draw siblings that are alike and follow each other, ``layer.0`` to ``layer.11``, once: their times as the
            mean, their errors as the largest.
        columns: Which of ``TREE_COLUMNS``, in this order.
        sort: A column: a list in place of the tree, the largest first.

    Raises:
        InputError: If there is no such column.

    Examples:
        >>> from rich.console import Console
        >>> from htp_export.capabilities.cost.module_tree import ModuleRow, ModuleTree
        >>> net = ModuleRow("", "net.Net", 1, "computed", nodes=2, self_nodes=0, parameters=8)
        >>> fc = ModuleRow("fc", "nn.Linear", 1, "computed", nodes=2, self_nodes=2, parameters=8)
        >>> Console(width=60).print(render(ModuleTree((net, fc))))  # doctest: +NORMALIZE_WHITESPACE
        module   class    nodes   parameters   fate
        (root)   Net          2            8
        └── fc   Linear       2            8
    """
    shown = [_FATE if column.name == "fate" else column for column in _columns(tree, columns)]
    rows = sorted_by(tree.rows, tree.columns, sort)
    from rich.console import Group
    from rich.text import Text

    from htp_export.drawing.tag_note import tag_note

    table = TreeTable(rows, shown, _alike if fold else None, _merged, flat=sort is not None)
    notes = [*tag_note(tree.tags), *(Text(note, style="yellow") for note in tree.notes)]
    return Group(table, *notes) if notes else table


def tree_csv(tree: ModuleTree, columns: Sequence[str] | None = None, sort: str | None = None) -> str:
    """The same as CSV, a line for each module.

    Raises:
        InputError: If there is no such column.
    """
    return csv_text([MODULE, *_columns(tree, columns)], sorted_by(tree.rows, tree.columns, sort))


def _columns(tree: ModuleTree, names: Sequence[str] | None) -> list[Column[ModuleRow]]:
    if names is None:
        known = [
            c.name for c in chosen(tree.columns, _WHERE_KNOWN) if any(c.data(row) is not None for row in tree.rows)
        ]
        names = [*_ALWAYS, *known, "fate"]
    return chosen(tree.columns, names)


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
