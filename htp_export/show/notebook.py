"""Results in notebooks: the tables of the command line, as HTML."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["in_notebook"]

_WIDTH = 160  # characters
_STYLE = "max-height:480px;overflow:auto;white-space:pre;line-height:1.35;font-family:Menlo,Consolas,monospace"
_PAGE = f'<pre style="{_STYLE}">{{code}}</pre>'


def in_notebook(result: object) -> str | None:
    """A result as HTML: what its command prints, colours included; None where no command prints it.

    Examples:
        >>> from htp_export.costs.module_tree import ModuleRow, ModuleTree
        >>> drawn = in_notebook(ModuleTree((ModuleRow("", "net.<b>", 1, "computed", nodes=1200),)))
        >>> "1,200" in drawn, "<b>" in drawn
        (True, False)
    """
    table = _table(result)
    if table is None:
        return None
    from rich.console import Console

    console = Console(width=_WIDTH, record=True, file=io.StringIO(), highlight=False, force_jupyter=False)
    console.print(table)
    text = console.export_html(code_format=_PAGE, inline_styles=True)
    return "\n".join(line.rstrip() for line in text.splitlines())


def _table(result: object) -> RenderableType | None:
    from htp_export.compress.quantization.quantized import Quantized
    from htp_export.costs.module_tree import ModuleTree
    from htp_export.costs.result import Cost
    from htp_export.deploy.placed import Placed, Placement
    from htp_export.run.latency_results import Profile
    from htp_export.run.results import Comparison

    match result:
        case Profile():
            from htp_export.show.latency import render_profile

            return render_profile(result)
        case Cost():
            from htp_export.show.costs import render_cost

            return render_cost(result, list(result.modules.values()))
        case Quantized():
            from htp_export.show.compression import render_quantized

            return render_quantized(result, list(result.modules.values()))
        case Placed() | Placement():
            from htp_export.show.placements import render_placement

            return render_placement(result, list(result.modules.values()))
        case ModuleTree():
            from htp_export.show.tree import render

            return render(result)
        case Comparison():
            from htp_export.show.comparison import render as render_comparison

            return render_comparison(result)
    return None
