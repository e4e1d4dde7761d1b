"""``htp-export forensics``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import typer

from htp_export.command.options import (
    JSON_HAS_ALL,
    DepthOption,
    FileArgument,
    Idle,
    JsonOption,
    SelectOption,
)
from htp_export.command.outputs import report
from htp_export.command.terminal import Steps

if TYPE_CHECKING:
    from htp_export.capabilities.optimize.registry import Level

EXAMPLE = "bert.onnx --depth 2"
PLACE = ("Look", 6)
IDLE = (
    Idle(("depth", "every"), lambda given: given["as_json"], JSON_HAS_ALL),
    Idle(("depth",), lambda given: given["every"], "--list writes a line for each finding"),
)


def forensics_command(
    file: FileArgument,
    select: SelectOption = None,
    depth: DepthOption = None,
    every: Annotated[bool, typer.Option("--list", help="A line for each finding.")] = False,
    level: Annotated[
        str, "Effect of passes on results: exact, tolerant or fused; exact takes the least time."
    ] = "fused",
    as_json: JsonOption = False,
) -> None:
    """Show the possible simplifications of each module.

    Each finding names the pass of optimize that applies it.
    """
    from htp_export.capabilities.forensics.drawing import render_findings, render_forensics
    from htp_export.capabilities.forensics.investigation import forensics

    with Steps(quiet=as_json).step(f"looking into {file}"):
        result = forensics(file, select=select or None, level=cast("Level", level))
    report(
        result,
        as_json,
        lambda: render_findings(result) if every else render_forensics(result, depth=depth),
    )
