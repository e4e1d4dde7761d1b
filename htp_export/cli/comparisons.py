"""What ``verify`` and ``compare`` have in common: tolerances as they are typed, and the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from htp_export.cli.outputs import report
from htp_export.cli.terminal import CheckFailed
from htp_export.errors import InputError

if TYPE_CHECKING:
    from htp_export.run.results import Comparison

__all__ = ["AllOption", "ToleranceOption", "parse_tolerances", "report_comparison"]

ToleranceOption = Annotated[
    list[str] | None,
    typer.Option(metavar="SELECTOR=ABS,REL", help="Absolute and relative, for these modules. May be repeated."),
]
AllOption = Annotated[bool, typer.Option("--all", help="Show every module, not only what differs.")]


def report_comparison(result: Comparison, *, everything: bool, as_json: bool) -> None:
    """Show a result.

    Raises:
        CheckFailed: If a module differs.
    """
    from htp_export.show.comparison import render

    report(result, as_json, lambda: render(result, everything=everything))
    if not result.ok:
        raise CheckFailed(result.summary)


def parse_tolerances(settings: Sequence[str]) -> dict[str, tuple[float, float]]:
    """``SELECTOR=ABS,REL`` as typed.

    Raises:
        InputError: If one is not of that form.

    Examples:
        >>> parse_tolerances(["class:LayerNorm=1e-3,1e-2"])
        {'class:LayerNorm': (0.001, 0.01)}
    """
    found = {}
    for setting in settings:
        selector, equals, numbers = setting.rpartition("=")
        try:
            absolute, relative = map(float, numbers.split(","))
        except ValueError:
            equals = ""
        if not equals:
            raise InputError(f"--tolerance {setting}: write SELECTOR=ABSOLUTE,RELATIVE, as in 'class:Linear=1e-3,1e-3'")
        found[selector] = (absolute, relative)
    return found
