"""Results of ``verify`` and ``compare``, drawn for a terminal or a pipe."""

from __future__ import annotations

import math
from dataclasses import replace
from operator import attrgetter

from rich.console import Group, RenderableType
from rich.text import Text

from htp_export.capabilities.verify.results import (
    DIFFERS,
    INHERITS,
    NOT_COMPARED,
    Comparison,
    ModuleResult,
)
from htp_export.reporting.columns import MODULE
from htp_export.reporting.command_words import in_commands
from htp_export.reporting.folding import gathered
from htp_export.reporting.module_table import flat_table

_MOST_ROWS = 20  # a screen, with what stands around it


def render(comparison: Comparison, *, everything: bool = False) -> RenderableType:
    """The modules that are wrong or could not be compared, alike ones once, and the summary.

    Of alike modules, the numbers are those of the one that differs most.
    """
    modules = list(comparison.modules.values())
    shown = modules
    if not everything:
        shown = [module for module in modules if module.status in (DIFFERS, INHERITS, NOT_COMPARED)]
        shown.sort(
            key=lambda module: (module.path not in comparison.wrong, module.status == NOT_COMPARED)
        )
    groups = gathered(
        shown, attrgetter("path"), lambda module: _alike(module, comparison.first_wrong)
    )
    more = 0 if everything else sum(len(group) for _, group in groups[_MOST_ROWS:])
    groups = groups if everything else groups[:_MOST_ROWS]
    cut = [Text(f"and {more} more modules; --all shows every one", style="dim")] if more else []
    summary = Text(comparison.summary, style="green" if comparison.ok else "bold red")
    lines = [Text(in_commands(line)) for line in comparison.lines]
    rows = [replace(_worst(group), path=name) for name, group in groups]
    return Group(
        *([flat_table([MODULE, *comparison.drawn], rows)] if rows else []), *cut, summary, *lines
    )


def _alike(module: ModuleResult, first_wrong: str | None) -> object:
    """Equal for modules whose lines differ in numbers only; the first wrong module has its own line."""
    first = module.path if module.path == first_wrong else None
    return (module.class_name, module.status, module.reason, module.problem, first)


def _worst(group: list[ModuleResult]) -> ModuleResult:
    """The module that differs most; NaN is the largest difference."""
    return max(
        group,
        key=lambda module: math.inf if module.max_abs != module.max_abs else module.max_abs or 0.0,
    )


def drawn(result: Comparison) -> RenderableType:
    """The result as a notebook shows it."""
    return render(result)
