"""Where the modules of a model run, drawn for a terminal or a pipe, or written as CSV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from htp_export.capabilities.place.placed import Placed, PlacedModule, Placement
from htp_export.drawing.module_table import TreeTable, equal_cells, with_lines
from htp_export.results.columns import MODULE, csv_text, sorted_by

if TYPE_CHECKING:
    from rich.console import RenderableType

    from htp_export.command.file_options import TableOptions
    from htp_export.model.tagged import TaggedModel

__all__ = ["drawn", "report"]


def _render(
    result: Placed | Placement, modules: Sequence[PlacedModule], *, fold: bool = True, sort: str | None = None
) -> RenderableType:
    """A tree with the device of each module, then the tensors that cross and what else is known, in words.

    Of the modules below one that is on one device, only this one is drawn; ``sort`` makes a list of the tree.

    Raises:
        InputError: If there is no such column.
    """
    listed = {module.path for module in result.listed}
    rows = sorted_by([module for module in modules if module.path in listed], result.columns, sort)

    alike = equal_cells(result.columns) if fold else None
    table = TreeTable(rows, result.columns, alike, flat=sort is not None)
    return with_lines(table, (result.summary, *result.lines))


def drawn(result: Placed | Placement) -> RenderableType:
    """The result as a notebook shows it."""
    return _render(result, list(result.modules.values()))


def report(result: Placed | Placement, tagged: TaggedModel, table: TableOptions, **more: str) -> None:
    """Print a result as the options of a command say; JSON has ``more`` in front."""
    from htp_export.capabilities.cost.module_tree import visible

    shown = [result.modules[path] for path in visible(tagged, table.depth, table.select or None)]
    table.report(
        {**more, **result.to_dict()},
        lambda: csv_text([MODULE, *result.columns], sorted_by(shown, result.columns, table.sort)),
        lambda: _render(result, shown, fold=table.fold, sort=table.sort),
    )
