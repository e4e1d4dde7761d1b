"""``htp-export steer``."""

from __future__ import annotations

from typing import Annotated

import typer

from htp_export.command.options import FileArgument, JsonOption, OutputOption, ShareOption
from htp_export.command.outputs import report
from htp_export.command.terminal import Steps

EXAMPLE = "bert.onnx encoder.layer.6:out -o steered.onnx"
PLACE = ("Cut", 5)


def steer_command(
    file: FileArgument,
    places: Annotated[
        list[str],
        typer.Argument(help="Tensors: PATH:in, PATH:out; PATH is a selector.", metavar="PLACE..."),
    ],
    output: OutputOption,
    name: Annotated[
        str | None, "One input of this name for all places; without it, one for each."
    ] = None,
    share_weights: ShareOption = False,
    as_json: JsonOption = False,
) -> None:
    """Add vectors, as optional inputs, to tensors of modules.

    A run without a vector adds zero.
    """
    from htp_export.capabilities.tap.steering import steer

    with Steps(quiet=as_json).step(f"steering {file}"):
        result = steer(
            file, places if name is None else {name: places}, output, share_weights=share_weights
        )
    report(result, as_json, output=output)
