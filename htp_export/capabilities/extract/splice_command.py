"""``htp-export splice``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from htp_export.command.options import (
    FileArgument,
    JsonOption,
    ModuleArgument,
    OutputOption,
    ShareOption,
)
from htp_export.command.outputs import report
from htp_export.command.terminal import Steps

EXAMPLE = "bert.onnx encoder.layer.0 layer0.onnx -o mixed.onnx"
PLACE = ("Cut", 2)


def splice_command(
    file: FileArgument,
    module: ModuleArgument,
    replacement: Annotated[Path, "The ONNX file to put in its place."],
    output: OutputOption,
    call: Annotated[
        int | None,
        typer.Option(min=0, help="The number of the call to replace; all by default."),
    ] = None,
    share_weights: ShareOption = False,
    as_json: JsonOption = False,
) -> None:
    """Replace one module of a model by another model.

    The opposite of extract: the inputs and outputs of the other model have to be those of the
    module.
    """
    from htp_export.capabilities.extract.extraction import splice

    with Steps(quiet=as_json).step(f"splicing {module}"):
        result = splice(file, module, replacement, output, call=call, share_weights=share_weights)
    report(result, as_json, output=output)
