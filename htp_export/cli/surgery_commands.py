"""``htp-export extract`` and ``htp-export splice``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from htp_export.cli.terminal import Steps, print_json, show

__all__ = ["extract_command", "splice_command"]

_Model = Annotated[Path, typer.Argument(help="The ONNX file.", show_default=False)]
_Module = Annotated[str, typer.Argument(help="Path of the module: encoder.layer.0", show_default=False)]
_Output = Annotated[Path, typer.Option("-o", "--output", help="The ONNX file to write.", show_default=False)]
_Json = Annotated[bool, typer.Option("--json", help="Write the result as JSON.")]


def extract_command(
    file: _Model,
    module: _Module,
    output: _Output,
    call: Annotated[int, typer.Option(min=0, help="Which call of a module that ran several times.")] = 0,
    as_json: _Json = False,
) -> None:
    """Write one module of a model as a model of its own."""
    from htp_export.surgery.extraction import extract

    with Steps().step(f"extracting {module}"):
        result = extract(file, module, output, call=call)
    if as_json:
        print_json(result.to_dict())
    else:
        show(str(result))


def splice_command(
    file: _Model,
    module: _Module,
    replacement: Annotated[Path, typer.Argument(help="The ONNX file to put in its place.", show_default=False)],
    output: _Output,
    call: Annotated[
        int | None, typer.Option(min=0, help="Which call of a module that ran several times; all without it.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Write a model with one of its modules replaced by another model."""
    from htp_export.surgery.splicing import splice

    with Steps().step(f"splicing {module}"):
        result = splice(file, module, replacement, output, call=call)
    if as_json:
        print_json(result.to_dict())
    else:
        show(str(result))
