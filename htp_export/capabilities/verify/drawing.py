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

_MOST_ROWS = 20  # a screen of 24 lines, without the header and the summary


def render(comparison: Comparison, *, everything: bool = False) -> RenderableType:
    """Draw the modules that are wrong or could not be compared, and the summary.

    Similar modules share a row, with the numbers of the module that differs most.
    """
    shown = list(comparison.modules.values())
    if not everything:
        shown = [module for module in shown if module.status in (DIFFERS, INHERITS, NOT_COMPARED)]
        shown.sort(
            key=lambda module: (module.path not in comparison.wrong, module.status == NOT_COMPARED)
        )
    groups = gathered(
        shown, attrgetter("path"), lambda module: _row_key(module, comparison.first_wrong)
    )
    hidden = 0
    if not everything:
        hidden = sum(len(group) for _, group in groups[_MOST_ROWS:])
        groups = groups[:_MOST_ROWS]
    parts: list[RenderableType] = []
    if groups:
        rows = [replace(_worst(group), path=name) for name, group in groups]
        parts.append(flat_table([MODULE, *comparison.drawn], rows))
    if hidden:
        parts.append(Text(f"and {hidden} more modules; --all shows every one", style="dim"))
    parts.append(Text(comparison.summary, style="green" if comparison.ok else "bold red"))
    parts += [Text(in_commands(line)) for line in comparison.lines]
    return Group(*parts)


def _row_key(module: ModuleResult, first_wrong: str | None) -> object:
    """Equal for modules whose rows differ in numbers only; the first wrong module has a row of its own."""
    first = module.path if module.path == first_wrong else None
    return (module.class_name, module.status, module.reason, module.problem, first)


def _worst(group: list[ModuleResult]) -> ModuleResult:
    """The module that differs most; NaN is the largest difference."""

    def size(module: ModuleResult) -> float:
        difference = module.max_abs or 0.0
        return math.inf if math.isnan(difference) else difference

    return max(group, key=size)


def drawn(result: Comparison) -> RenderableType:
    """The result as a notebook shows it."""
    return render(result)
