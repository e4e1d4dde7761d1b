"""``htp-export extract``."""

from __future__ import annotations

from typing import Annotated

import typer

from htp_export.command.options import FileArgument, JsonOption, ModuleArgument, NewOutputOption
from htp_export.command.outputs import report
from htp_export.command.terminal import Steps

EXAMPLE = "bert.onnx encoder.layer.0 -o layer0.onnx"
PLACE = ("Cut", 1)


def extract_command(
    file: FileArgument,
    module: ModuleArgument,
    output: NewOutputOption,
    call: Annotated[
        int, typer.Option(min=0, help="The number of the call, of a module that ran several times.")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Write one module of a model as a model of its own."""
    from htp_export.capabilities.extract.extraction import extract

    with Steps(quiet=as_json).step(f"extracting {module}"):
        result = extract(file, module, output, call=call)
    report(result, as_json, output=output)
