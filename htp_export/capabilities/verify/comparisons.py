"""Tolerances and report of ``verify`` and ``compare``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from htp_export.command.outputs import report
from htp_export.command.terminal import CheckFailed, print_json, show
from htp_export.errors import InputError

if TYPE_CHECKING:
    from htp_export.capabilities.verify.results import Comparison, Verification
    from htp_export.command.model_options import SourceCall

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
    from htp_export.capabilities.verify.drawing import render

    report(result, as_json, lambda: render(result, everything=everything))
    if not result.ok:
        raise CheckFailed(result.summary)


def verified_runs(call: SourceCall, file: Path, **options: Any) -> dict[str, Verification]:
    """Run → what `verify` says of a file: in prefill and in decoding, or in its one run; ``options`` are its own."""
    from htp_export.capabilities.verify.verifying import verify

    with call.adapted():
        return {run: verify(call.model, file, call.args, kwargs, **options) for run, kwargs in call.runs.items()}


def report_runs(results: Mapping[str, Comparison], *, everything: bool, as_json: bool) -> None:
    """Show the results of several runs of a file.

    Raises:
        CheckFailed: If a module differs in one of them.
    """
    from htp_export.capabilities.verify.drawing import render

    failures = [f"{run}: {result.summary}" for run, result in results.items() if not result.ok]
    if as_json:
        runs = {run: result.to_dict() for run, result in results.items()}
        print_json({"ok": not failures, "runs": runs})
    for run, result in results.items() if not as_json else ():
        show(f"{run}:")
        show(render(result, everything=everything))
    if failures:
        raise CheckFailed("\n".join(failures))


def parse_tolerances(settings: Sequence[str]) -> dict[str, tuple[float, float]]:
    """``SELECTOR=ABS,REL`` as typed.

    Raises:
        InputError: If one is not of that form.

    Examples:
        >>> parse_tolerances(["class:LayerNorm=1e-3,1e-2"])
        {'class:LayerNorm': (0.001, 0.01)}
    """
    tolerances = {}
    for setting in settings:
        selector, equals, numbers = setting.rpartition("=")
        try:
            absolute, relative = map(float, numbers.split(","))
        except ValueError:
            equals = ""
        if not equals:
            raise InputError(f"--tolerance {setting}: write SELECTOR=ABSOLUTE,RELATIVE, as in 'class:Linear=1e-3,1e-3'")
        tolerances[selector] = (absolute, relative)
    return tolerances
