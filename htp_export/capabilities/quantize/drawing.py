"""Notebook output of ``quantize``: the table of modules. Plans for other tools have text alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from htp_export.reporting.module_table import render_modules
from htp_export.reporting.tables import ModuleTable

if TYPE_CHECKING:
    from rich.console import RenderableType


def drawn(result: object) -> RenderableType | None:
    """The table of modules, if the result has one."""
    return render_modules(result) if isinstance(result, ModuleTable) else None
