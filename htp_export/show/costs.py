"""Costs by module, drawn for a terminal or a pipe, or written as CSV."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from htp_export.errors import InputError
from htp_export.show.command_words import in_commands
from htp_export.show.module_table import Column, ModuleTable, column_names, csv_text, pick, si

if TYPE_CHECKING:
    from rich.console import RenderableType

    from htp_export.costs.result import Cost, ModuleCost, NodeCost

__all__ = ["COST_COLUMNS", "FUSED", "cost_csv", "nodes_csv", "render_cost"]


def _field(name: str) -> Callable[[ModuleCost], Any]:
    return lambda module: getattr(module, name)


def _bytes(number: float) -> str:
    return si(number, "B")


def _saved_traffic(module: ModuleCost) -> int:
    return module.traffic_bytes - module.fused_traffic_bytes


def _uncounted(module: ModuleCost) -> str | None:
    return ", ".join(module.uncounted) or None


_COUNTS: tuple[Column[ModuleCost], ...] = (
    Column("class", "class", _field("simple_class"), style="cyan", right=False, keep=1),
    Column("nodes", "nodes", _field("nodes"), "{:,}".format, keep=3),
    Column("parameters", "parameters", _field("parameters"), "{:,}".format, keep=8),
    Column("weight_bytes", "weights", _field("weight_bytes"), _bytes, keep=4),
    Column("flops", "FLOPs", _field("flops"), si, keep=9),
    Column("other_flops", "other", _field("other_flops"), si, keep=6),
    Column("activation_bytes", "activations", _field("activation_bytes"), _bytes, keep=2),
    Column("peak_bytes", "peak", _field("peak_bytes"), _bytes, keep=7),
    Column("intensity", "ops/byte", _field("intensity"), "{:.2f}".format, keep=5),
    Column("uncounted", "not counted", _uncounted, style="yellow", right=False, keep=9),
)
_SELF: tuple[Column[ModuleCost], ...] = tuple(
    Column(f"self_{name}", f"self {title}", _field(f"self_{name}"), text)
    for name, title, text in (
        ("nodes", "nodes", "{:,}".format),
        ("parameters", "parameters", "{:,}".format),
        ("weight_bytes", "weights", _bytes),
        ("flops", "FLOPs", si),
        ("other_flops", "other", si),
        ("activation_bytes", "activations", _bytes),
        ("traffic_bytes", "traffic", _bytes),
    )
)
_FUSING: tuple[Column[ModuleCost], ...] = (
    Column("traffic_bytes", "traffic", _field("traffic_bytes"), _bytes, keep=7),
    Column("fused_traffic_bytes", "fused traffic", _field("fused_traffic_bytes"), _bytes, keep=8),
    Column("saved_traffic_bytes", "saved", _saved_traffic, _bytes, keep=9),
    Column("fused_peak_bytes", "model's peak, fused", _field("fused_peak_bytes"), _bytes, keep=9),
)
_ALL = (*_COUNTS, *_SELF, *_FUSING)
COST_COLUMNS = column_names(_ALL)
"""What can be shown of each module."""

_OF_THE_MODEL = ("peak_bytes", "fused_peak_bytes")
_ASSUMED = (
    "fused, an estimate: what only this module makes and reads stays on chip, where there is room for it; every node "
    "still reads what enters the module, and its weights, from memory"
)

FUSED = ("class", "nodes", *column_names(_FUSING))
"""The columns that say what fusing would save."""


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
    rows = _sorted(modules, sort)

    def alike(module: ModuleCost) -> Hashable:
        said = (column.cell(module) for column in shown if column.name not in _OF_THE_MODEL)
        return (module.class_name, module.calls, module.nodes, *said)

    table = ModuleTable(rows, shown, alike if fold else None, _merged, flat=sort is not None)
    fusing = [Text(_ASSUMED, style="dim")] if set(column_names(_FUSING)) & set(column_names(shown)) else []
    return Group(table, Text(), *(Text(in_commands(line)) for line in cost.summary), *fusing)


def _tied(cost: Cost) -> Column[ModuleCost]:
    """Marks the modules that hold a parameter together with others: it counts once in what is above them."""
    said: dict[str, str] = {}
    for holders in cost.shared.values():
        first, *others = (path or "(root)" for path in holders)
        said.setdefault(holders[0], f"with {', '.join(others)}")
        said.update((path, f"counted in {first}") for path in holders[1:] if path not in said)
    title = "tied" if cost.from_pytorch else "shared"
    return Column("tied", title, lambda module: said.get(module.path), style="yellow", right=False, keep=7)


def cost_csv(modules: Sequence[ModuleCost], columns: Sequence[str] | None = None, sort: str | None = None) -> str:
    """Costs as CSV, a line for each module; every column, unless some are named.

    Raises:
        InputError: If there is no such column.
    """
    return csv_text(_sorted(modules, sort), _columns(modules, COST_COLUMNS if columns is None else columns))


def nodes_csv(nodes: Sequence[NodeCost]) -> str:
    """Costs of nodes as CSV."""
    import csv
    import io

    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    from htp_export.costs.result import NodeCost

    names = [*NodeCost.__dataclass_fields__]
    writer.writerow(names)
    for node in nodes:
        shapes = " ".join("?" if shape is None else "x".join(map(str, shape)) for shape in node.shapes)
        texts = {"owners": " ".join(node.owners), "shapes": shapes}
        writer.writerow([texts.get(name, getattr(node, name)) for name in names])
    return stream.getvalue()


def _merged(modules: Sequence[ModuleCost]) -> ModuleCost:
    """One row for alike modules: the peak of the model while they run differs with what else is in memory."""
    return replace(
        modules[0],
        peak_bytes=max(module.peak_bytes for module in modules),
        fused_peak_bytes=max(module.fused_peak_bytes for module in modules),
    )


def _columns(modules: Sequence[ModuleCost], names: Sequence[str] | None) -> list[Column[ModuleCost]]:
    if names is None:
        uncounted = any(module.uncounted for module in modules)
        names = [name for name in column_names(_COUNTS) if name != "uncounted" or uncounted]
    _check(names)
    return pick(_ALL, names)


def _sorted(modules: Sequence[ModuleCost], sort: str | None) -> Sequence[ModuleCost]:
    if sort is None:
        return modules
    _check([sort])
    column = pick(_ALL, [sort])[0]
    if sort in ("class", "uncounted"):
        return sorted(modules, key=lambda module: str(column.value(module) or ""))
    return sorted(modules, key=lambda module: -float(column.value(module)))


def _check(names: Sequence[str]) -> None:
    for name in names:
        if name not in COST_COLUMNS:
            raise InputError(f"there is no column {name!r}; there are {', '.join(COST_COLUMNS)}")
