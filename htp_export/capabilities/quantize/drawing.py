"""What became of each module of a model that was made smaller, drawn for a terminal or a pipe, or written as CSV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from htp_export.capabilities.quantize.quantized import QUANTIZED_COLUMNS, Quantized, QuantizedModule
from htp_export.drawing.module_table import TreeTable, equal_cells, with_lines
from htp_export.results.columns import MODULE, Column, csv_text, sorted_by

if TYPE_CHECKING:
    from rich.console import RenderableType

    from htp_export.capabilities.quantize.plan_exporting import PlanFile

__all__ = ["compression_csv", "drawn", "render_quantized"]


def render_quantized(
    result: Quantized, modules: Sequence[QuantizedModule], *, fold: bool = True, sort: str | None = None
) -> RenderableType:
    """A tree with the precision and the bytes of some modules, then what is known of the whole, in words.

    With ``sort``, a column, it is a list, the largest first (`InputError` if there is none).
    """
    shown: Sequence[Column[QuantizedModule]] = result.drawn

    alike = equal_cells(shown) if fold else None
    table = TreeTable(sorted_by(modules, result.columns, sort), shown, alike, flat=sort is not None)
    return with_lines(table, (result.summary, *result.left_lines, *result.lines))


def compression_csv(modules: Sequence[QuantizedModule], sort: str | None = None) -> str:
    """The modules as CSV, a line for each; `InputError` if there is no such column."""
    return csv_text([MODULE, *QUANTIZED_COLUMNS], sorted_by(modules, QUANTIZED_COLUMNS, sort))


def drawn(result: Quantized | PlanFile) -> RenderableType | None:
    """The result as a notebook shows it; None for a plan, which is text."""
    return render_quantized(result, list(result.modules.values())) if isinstance(result, Quantized) else None
