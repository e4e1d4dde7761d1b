"""``htp-export functions``."""

from __future__ import annotations

from typing import Annotated

import typer

from htp_export.command.file_options import FileArgument, JsonOption, OutputOption, ShareOption
from htp_export.command.outputs import report
from htp_export.command.terminal import Steps

EXAMPLE = 'bert.onnx "encoder.layer.*" -o nested.onnx'
PLACE = 110


def functions_command(
    file: FileArgument,
    select: Annotated[
        list[str],
        typer.Argument(
            help="The modules: encoder.layer.*, class:Linear, re:..., !excluded; ** for all.", metavar="SELECT..."
        ),
    ],
    output: OutputOption,
    share_weights: ShareOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make modules functions, which every viewer shows."""
    from htp_export.capabilities.functions.drawing import render
    from htp_export.capabilities.functions.nesting import functions

    with Steps(quiet=as_json).step(f"nesting {file}"):
        nested = functions(file, select, output, share_weights=share_weights)
    report(nested, as_json, lambda: render(nested), output)
