"""Drawings of costs by module and of the module tree, for a terminal or a pipe, and as CSV."""

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
    """A table with a line for each module, followed by lines about the whole model.

    With ``fold``, consecutive equal siblings are drawn once. With ``sort``, a column, it is a list,
    the largest first. ``columns`` is a subset of ``COST_COLUMNS``, in this order.
    """
    has_uncounted = any(module.uncounted for module in modules)
    usual = [*_USUAL, "uncounted"] if has_uncounted else _USUAL
    shown = chosen(cost.columns, usual if columns is None else columns)
    if columns is None and cost.shared:
        shown = [*shown, _tied(cost)]
    rows = sorted_by(modules, cost.columns, sort)

    def key(module: ModuleCost) -> Hashable:
        cells = (column.cell(module) for column in shown if column.name not in _OF_THE_MODEL)
        return (module.class_name, module.calls, module.nodes, *cells)

    # The model's peak while equal modules run differs: other tensors are in memory, too.
    table = TreeTable(
        rows,
        shown,
        key if fold else None,
        partial(merged_row, most=_OF_THE_MODEL),
        flat=sort is not None,
    )
    fusing = [Text(_ASSUMED, style="dim")] if set(FUSED[2:]) & set(names_of(shown)) else []
    return with_lines(table, (cost.summary, *cost.lines), *fusing)


def _tied(cost: Cost) -> Column[ModuleCost]:
    """The column that marks modules that share a parameter, which their ancestors count once."""
    notes: dict[str, str] = {}
    for holders in cost.shared.values():
        first, *others = (path or "(root)" for path in holders)
        notes.setdefault(holders[0], f"with {', '.join(others)}")
        for path in holders[1:]:
            notes.setdefault(path, f"counted in {first}")
    title = "tied" if cost.from_pytorch else "shared"
    return Column(
        "tied", title, lambda module: notes.get(module.path), style="yellow", right=False, keep=7
    )


def modules_csv(
    table: Cost | ModuleTree, rows: Sequence[ModuleFacts], names: Sequence[str], sort: str | None
) -> str:
    """Columns of modules as CSV."""
    return csv_text([MODULE, *chosen(table.columns, names)], sorted_by(rows, table.columns, sort))


def nodes_csv(nodes: Sequence[NodeCost]) -> str:
    """Costs of nodes as CSV."""

    def owners(node: NodeCost) -> str:
        return " ".join(node.owners)

    def shapes(node: NodeCost) -> str:
        return " ".join(map(_shape_text, node.shapes))

    values = {"owners": owners, "shapes": shapes}
    columns = [Column(name, name, values.get(name)) for name in NodeCost.__dataclass_fields__]
    return csv_text(columns, nodes)


def _shape_text(shape: Sequence[int] | None) -> str:
    return "?" if shape is None else "x".join(map(str, shape))


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
    """A table with a line for each module: class, nodes, parameters, and known measurements.

    With ``fold``, consecutive equal siblings, ``layer.0`` to ``layer.11``, are drawn once, with the
    mean of their times and the largest of their errors. With ``sort``, a column, it is a list, the
    largest first.
    """
    names = usual_columns(tree) if columns is None else columns
    shown = [_FATE if column.name == "fate" else column for column in chosen(tree.columns, names)]
    rows = sorted_by(tree.rows, tree.columns, sort)
    one_of = partial(merged_row, means=("time_ms", "own_time_ms"), most=("error",))
    table = TreeTable(rows, shown, _alike if fold else None, one_of, flat=sort is not None)
    notes = list(tag_note(tree.tags))
    notes += [Text(note, style="yellow") for note in tree.notes]
    return Group(table, *notes) if notes else table


def usual_columns(tree: ModuleTree) -> list[str]:
    """The names of the columns that are drawn by default."""

    def is_known(column: Column[ModuleRow]) -> bool:
        return any(column.data(row) is not None for row in tree.rows)

    known = filter(is_known, chosen(tree.columns, _WHERE_KNOWN))
    return [*_ALWAYS, *names_of(known), "fate"]


def _alike(row: ModuleRow) -> Hashable:
    return likeness(
        row.class_name, row.calls, row.fate, row.nodes, row.parameters, row.flops, row.status
    )


def drawn(result: Cost | ModuleTree) -> RenderableType:
    """The result as a notebook shows it."""
    if isinstance(result, ModuleTree):
        return render(result)
    return render_cost(result, list(result.modules.values()))
