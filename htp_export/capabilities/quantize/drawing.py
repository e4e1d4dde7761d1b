"""What became of each module of a model that was made smaller, drawn for a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from htp_export.capabilities.quantize.quantized import Quantized
from htp_export.drawing.module_table import render_modules

if TYPE_CHECKING:
    from rich.console import RenderableType

    from htp_export.capabilities.quantize.plan_exporting import PlanFile


def drawn(result: Quantized | PlanFile) -> RenderableType | None:
    """The result as a notebook shows it; None for a plan, which is text."""
    return render_modules(result) if isinstance(result, Quantized) else None
