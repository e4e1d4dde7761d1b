"""Where the modules of a model run, drawn for a terminal or a pipe, or written as CSV."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from htp_export.capabilities.place.placed import Placed, PlacedModule, Placement
from htp_export.drawing.command_words import in_commands
from htp_export.drawing.module_table import TreeTable
from htp_export.results.columns import MODULE, csv_text, sorted_by

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["drawn", "placement_csv", "render_placement"]


def render_placement(
    result: Placed | Placement, modules: Sequence[PlacedModule], *, fold: bool = True, sort: str | None = None
) -> RenderableType:
    """A tree with the device of each module, then the tensors that cross and what else is known, in words.

    Args:
        result: The result.
        modules: The modules of it to draw. Of those below a module that is on one device, only this one is drawn.
        fold: Draw siblings that are alike and follow each other once.
        sort: A column: a list in place of the tree, the largest first.

    Raises:
        InputError: If there is no such column.
    """
    from rich.console import Group
    from rich.text import Text

    listed = {module.path for module in result.listed}
    rows = sorted_by([module for module in modules if module.path in listed], result.columns, sort)

    def alike(module: PlacedModule) -> Hashable:
        return tuple(column.cell(module) for column in result.columns)

    table = TreeTable(rows, result.columns, alike if fold else None, flat=sort is not None)
    lines = [result.summary, *result.lines]
    return Group(table, Text(), *(Text(in_commands(line)) for line in lines))


def placement_csv(result: Placed | Placement, modules: Sequence[PlacedModule], sort: str | None = None) -> str:
    """The modules as CSV, a line for each.

    Raises:
        InputError: If there is no such column.
    """
    return csv_text([MODULE, *result.columns], sorted_by(modules, result.columns, sort))


def drawn(result: Placed | Placement) -> RenderableType:
    """The result as a notebook shows it."""
    return render_placement(result, list(result.modules.values()))
