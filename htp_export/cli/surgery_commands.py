"""``htp-export extract`` and ``htp-export splice``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from htp_export.cli.file_options import FileArgument, InPlaceOption, JsonOption, OutputOption, ShareOption
from htp_export.cli.outputs import check_output, show_model
from htp_export.cli.terminal import Steps, print_json, show

__all__ = ["extract_command", "splice_command"]

_Module = Annotated[str, typer.Argument(help="Path of the module: encoder.layer.0", show_default=False)]


def extract_command(
    file: FileArgument,
    module: _Module,
    output: OutputOption,
    call: Annotated[int, typer.Option(min=0, help="Which call of a module that ran several times.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Write one module of a model as a model of its own."""
    from htp_export.surgery.extraction import extract

    check_output(output, [file])
    with Steps(quiet=as_json).step(f"extracting {module}"):
        result = extract(file, module, output, call=call)
    if as_json:
        print_json(result.to_dict())
    else:
        show(str(result))
        show_model(output)


def splice_command(
    file: FileArgument,
    module: _Module,
    replacement: Annotated[Path, typer.Argument(help="The ONNX file to put in its place.", show_default=False)],
    output: OutputOption,
    call: Annotated[
        int | None, typer.Option(min=0, help="Which call of a module that ran several times; all without it.")
    ] = None,
    share_weights: ShareOption = False,
    in_place: InPlaceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Replace one module of a model by another model."""
    from htp_export.surgery.splicing import splice

    check_output(output, [file, replacement], in_place=in_place)
    with Steps(quiet=as_json).step(f"splicing {module}"):
        result = splice(file, module, replacement, output, call=call, share_weights=share_weights)
    if as_json:
        print_json(result.to_dict())
    else:
        show(str(result))
        show_model(output)
