"""``htp-export tap``."""

from __future__ import annotations

from typing import Annotated

import typer

from htp_export.command.options import FileArgument, Idle, JsonOption, OutputOption, ShareOption
from htp_export.command.outputs import report
from htp_export.command.terminal import Steps

EXAMPLE = 'bert.onnx "encoder.layer.*:out" -o layers.onnx'
PLACE = ("Cut", 4)
IDLE = (
    Idle(("concat",), lambda given: given["undo"], "--undo removes outputs"),
    Idle(
        ("name",), lambda given: given["undo"], "with --undo, PLACE... are the names of the outputs"
    ),
)


def tap_command(
    file: FileArgument,
    places: Annotated[
        list[str] | None,
        typer.Argument(
            help="Tensors: PATH:in, PATH:out[1], PATH#2:in[x]; PATH is a selector.",
            metavar="PLACE...",
        ),
    ] = None,
    *,
    output: OutputOption,
    name: Annotated[
        str | None, "Name of the output; without it, each place has one of its own name."
    ] = None,
    concat: Annotated[int | None, "Put the tensors of --name together along this axis."] = None,
    undo: Annotated[bool, "Remove such outputs, all without PLACE."] = False,
    share_weights: ShareOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make tensors of modules outputs of the file.

    Nothing else in the file changes.
    """
    from htp_export.capabilities.tap.tapping import tap, untap

    if undo:
        with Steps(quiet=as_json).step(f"removing taps of {file}"):
            result = untap(file, places or None, output, share_weights=share_weights)
    else:
        if not places:
            raise typer.BadParameter("give places, such as 'encoder.layer.*:out', or --undo")
        if concat is not None and name is None:
            raise typer.BadParameter("--concat needs the --name of the output")
        with Steps(quiet=as_json).step(f"tapping {file}"):
            result = tap(
                file,
                places if name is None else {name: places},
                output,
                concat=concat,
                share_weights=share_weights,
            )
    report(result, as_json, output=output)
