"""Results in notebooks: the tables of the command line, as HTML."""

from __future__ import annotations

import importlib
import io

__all__ = ["in_notebook"]

_WIDTH = 160  # characters
_STYLE = "max-height:480px;overflow:auto;white-space:pre;line-height:1.35;font-family:Menlo,Consolas,monospace"
_PAGE = f'<pre style="{_STYLE}">{{code}}</pre>'


def in_notebook(result: object) -> str | None:
    """A result as HTML: what ``drawn`` in ``drawing.py`` of its capability makes of it, colours included, or None.

    Examples:
        >>> from htp_export.capabilities.cost.module_tree import ModuleRow, ModuleTree
        >>> drawn = in_notebook(ModuleTree((ModuleRow("", "net.<b>", 1, "computed", nodes=1200),)))
        >>> "1,200" in drawn, "<b>" in drawn
        (True, False)
    """
    capability = ".".join(type(result).__module__.split(".")[:3])
    try:
        drawing = importlib.import_module(f"{capability}.drawing")
    except ModuleNotFoundError:
        return None
    if not hasattr(drawing, "drawn"):
        return None
    from rich.console import Console

    console = Console(width=_WIDTH, record=True, file=io.StringIO(), highlight=False, force_jupyter=False)
    console.print(drawing.drawn(result))
    text = console.export_html(code_format=_PAGE, inline_styles=True)
    return "\n".join(line.rstrip() for line in text.splitlines())
