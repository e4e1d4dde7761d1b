"""Costs by module and the module tree, drawn for a terminal or a pipe, or written as CSV."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial

from rich.console import Group, RenderableType
from rich.text import Text

from htp_export.costs.columns import FUSED
from htp_export.costs.result import Cost, ModuleCost, ModuleRow, ModuleTree, NodeCost
from htp_export.model.module_facts import ModuleFacts
from htp_export.reporting.columns import MODULE, Column, chosen, csv_text, names_of, sorted_by
from htp_export.reporting.command_words import tag_note
from htp_export.reporting.folding import likeness
from htp_export.reporting.module_table import TreeTable, merged_row, with_lines

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

    With ``fold``, alike siblings that follow each other are drawn once. A column to ``sort`` by
    gives a list, the largest first. ``columns`` are some of ``COST_COLUMNS``, in this order.
    """
    usual = [*_USUAL, *(["uncounted"] if any(module.uncounted for module in modules) else [])]
    shown = chosen(cost.columns, usual if columns is None else columns)
    if columns is None and cost.shared:
        shown = [*shown, _tied(cost)]
    rows = sorted_by(modules, cost.columns, sort)

    def alike(module: ModuleCost) -> Hashable:
        cells = (column.cell(module) for column in shown if column.name not in _OF_THE_MODEL)
        return (module.class_name, module.calls, module.nodes, *cells)

    # The peak of the model while alike modules run differs with what else is in memory.
    table = TreeTable(
        rows,
        shown,
        alike if fold else None,
        partial(merged_row, most=_OF_THE_MODEL),
        flat=sort is not None,
    )
    fusing = [Text(_ASSUMED, style="dim")] if set(FUSED[2:]) & set(names_of(shown)) else []
    return with_lines(table, (cost.summary, *cost.lines), *fusing)


def _tied(cost: Cost) -> Column[ModuleCost]:
    """Marks the modules that hold a parameter together with others: it counts once in what is above them."""
    notes: dict[str, str] = {}
    for holders in cost.shared.values():
        first, *others = (path or "(root)" for path in holders)
        notes.setdefault(holders[0], f"with {', '.join(others)}")
        notes.update((path, f"counted in {first}") for path in holders[1:] if path not in notes)
    title = "tied" if cost.from_pytorch else "shared"
    return Column(
        "tied", title, lambda module: notes.get(module.path), style="yellow", right=False, keep=7
    )


def modules_csv(
    table: Cost | ModuleTree, rows: Sequence[ModuleFacts], names: Sequence[str], sort: str | None
) -> str:
    """Some columns as CSV, a line for each module."""
    return csv_text([MODULE, *chosen(table.columns, names)], sorted_by(rows, table.columns, sort))


def nodes_csv(nodes: Sequence[NodeCost]) -> str:
    """Costs of nodes as CSV."""

    def shapes(node: NodeCost) -> str:
        return " ".join(
            "?" if shape is None else "x".join(map(str, shape)) for shape in node.shapes
        )

    values = {"owners": lambda node: " ".join(node.owners), "shapes": shapes}
    return csv_text(
        [Column(name, name, values.get(name)) for name in NodeCost.__dataclass_fields__], nodes
    )


_ALWAYS = ("class_name", "nodes", "parameters")
_WHERE_KNOWN = ("flops", "time_ms", "error")
_FATE: Column[ModuleRow] = Column(
    "fate", "fate", lambda row: row.fate.remark, style="yellow", right=False, keep=5
)


def render(
    tree: ModuleTree,
    *,
    fold: bool = True,
    columns: Sequence[str] | None = None,
    sort: str | None = None,
) -> RenderableType:
    """A table with a line for each module: class, nodes, parameters, FLOPs, time and error where they are known.

    With ``fold``, alike siblings that follow each other, ``layer.0`` to ``layer.11``, are drawn
    once: their times as the mean, their errors as the largest. A column to ``sort`` by gives a
    list, the largest first.
    """
    names = usual_columns(tree) if columns is None else columns
    shown = [_FATE if column.name == "fate" else column for column in chosen(tree.columns, names)]
    rows = sorted_by(tree.rows, tree.columns, sort)
    one_of = partial(merged_row, means=("time_ms", "own_time_ms"), most=("error",))
    table = TreeTable(rows, shown, _alike if fold else None, one_of, flat=sort is not None)
    notes = [*tag_note(tree.tags), *(Text(note, style="yellow") for note in tree.notes)]
    return Group(table, *notes) if notes else table


def usual_columns(tree: ModuleTree) -> list[str]:
    """The names of the columns that are drawn unless others are named."""
    columns = chosen(tree.columns, _WHERE_KNOWN)
    return [
        *_ALWAYS,
        *(c.name for c in columns if any(c.data(row) is not None for row in tree.rows)),
        "fate",
    ]


def _alike(row: ModuleRow) -> Hashable:
    return likeness(
        row.class_name, row.calls, row.fate, row.nodes, row.parameters, row.flops, row.status
    )


def drawn(result: Cost | ModuleTree) -> RenderableType:
    """The result as a notebook shows it."""
    if isinstance(result, ModuleTree):
        return render(result)
    return render_cost(result, list(result.modules.values()))
