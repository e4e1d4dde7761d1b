"""Costs by module, drawn for a terminal or a pipe, or written as CSV."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from htp_export.capabilities.cost.columns import COST_COLUMNS, FUSED
from htp_export.capabilities.cost.module_tree import ModuleTree
from htp_export.capabilities.cost.tree_drawing import render
from htp_export.drawing.command_words import in_commands
from htp_export.drawing.module_table import TreeTable
from htp_export.results.columns import MODULE, Column, chosen, csv_text, names_of, sorted_by

if TYPE_CHECKING:
    from rich.console import RenderableType

    from htp_export.capabilities.cost.result import Cost, ModuleCost, NodeCost

__all__ = ["cost_csv", "drawn", "nodes_csv", "render_cost"]


_OF_THE_MODEL = ("peak_bytes", "fused_peak_bytes")
_ASSUMED = (
    "fused, an estimate: what only this module makes and reads stays on chip, where there is room for it; every node "
    "still reads what enters the module, and its weights, from memory"
)

_USUAL = (
    "class_name", "nodes", "parameters", "weight_bytes", "flops", "other_flops", "activation_bytes", "peak_bytes",
    "intensity",
)  # fmt: skip


def render_cost(
    cost: Cost,
    modules: Sequence[ModuleCost],
    *,
    fold: bool = True,
    columns: Sequence[str] | None = None,
    sort: str | None = None,
) -> RenderableType:
    """A table with a line for each module, then what is known of the whole, in words.

    Args:
        cost: The result.
        modules: The modules of it to draw.
        fold: Draw siblings that are alike and follow each other once.
        columns: Which of ``COST_COLUMNS``, in this order.
        sort: A column: a list in place of the tree, the largest first.

    Raises:
        InputError: If there is no such column.
    """
    from rich.console import Group
    from rich.text import Text

    shown = _columns(modules, columns)
    if columns is None and cost.shared:
        shown = [*shown, _tied(cost)]
    rows = sorted_by(modules, cost.columns, sort)

    def alike(module: ModuleCost) -> Hashable:
        cells = (column.cell(module) for column in shown if column.name not in _OF_THE_MODEL)
        return (module.class_name, module.calls, module.nodes, *cells)

    table = TreeTable(rows, shown, alike if fold else None, _merged, flat=sort is not None)
    fusing = [Text(_ASSUMED, style="dim")] if set(FUSED[2:]) & set(names_of(shown)) else []
    lines = (cost.summary, *cost.lines)
    return Group(table, Text(), *(Text(in_commands(line)) for line in lines), *fusing)


def _tied(cost: Cost) -> Column[ModuleCost]:
    """Marks the modules that hold a parameter together with others: it counts once in what is above them."""
    notes: dict[str, str] = {}
    for holders in cost.shared.values():
        first, *others = (path or "(root)" for path in holders)
        notes.setdefault(holders[0], f"with {', '.join(others)}")
        notes.update((path, f"counted in {first}") for path in holders[1:] if path not in notes)
    title = "tied" if cost.from_pytorch else "shared"
    return Column("tied", title, lambda module: notes.get(module.path), style="yellow", right=False, keep=7)


def cost_csv(modules: Sequence[ModuleCost], columns: Sequence[str] | None = None, sort: str | None = None) -> str:
    """Costs as CSV, a line for each module; every column, unless some are named.

    Raises:
        InputError: If there is no such column.
    """
    names = names_of(COST_COLUMNS) if columns is None else columns
    return csv_text([MODULE, *_columns(modules, names)], sorted_by(modules, COST_COLUMNS, sort))


def nodes_csv(nodes: Sequence[NodeCost]) -> str:
    """Costs of nodes as CSV."""
    from htp_export.capabilities.cost.result import NodeCost

    def shapes(node: NodeCost) -> str:
        return " ".join("?" if shape is None else "x".join(map(str, shape)) for shape in node.shapes)

    values = {"owners": lambda node: " ".join(node.owners), "shapes": shapes}
    return csv_text([Column(name, name, values.get(name)) for name in NodeCost.__dataclass_fields__], nodes)


def _merged(modules: Sequence[ModuleCost]) -> ModuleCost:
    """One row for alike modules: the peak of the model while they run differs with what else is in memory."""
    return replace(
        modules[0],
        peak_bytes=max(module.peak_bytes for module in modules),
        fused_peak_bytes=max(module.fused_peak_bytes for module in modules),
    )


def _columns(modules: Sequence[ModuleCost], names: Sequence[str] | None) -> list[Column[ModuleCost]]:
    if names is None:
        names = [*_USUAL, *(["uncounted"] if any(module.uncounted for module in modules) else [])]
    return chosen(COST_COLUMNS, names)


def drawn(result: Cost | ModuleTree) -> RenderableType:
    """The result as a notebook shows it."""
    if isinstance(result, ModuleTree):
        return render(result)
    return render_cost(result, list(result.modules.values()))
