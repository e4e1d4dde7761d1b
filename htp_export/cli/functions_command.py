"""``htp-export functions`` and ``htp-export inline``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from htp_export.cli.terminal import print_json, show
from htp_export.nested.flatten import inline
from htp_export.show.nesting import render
from htp_export.surgery.nesting import functions

__all__ = ["functions_command", "inline_command"]

_File = Annotated[Path, typer.Argument(help="The ONNX file.", show_default=False)]
_Output = Annotated[Path, typer.Option("--output", "-o", help="The file to write.", show_default=False)]
_Json = Annotated[bool, typer.Option("--json", help="Write JSON.")]


def functions_command(
    file: _File,
    select: Annotated[
        list[str],
        typer.Argument(
            help="The modules: encoder.layer.*, class:Linear, re:..., !excluded; ** for all.", metavar="SELECT..."
        ),
    ],
    output: _Output,
    as_json: _Json = False,
) -> None:
    """Make modules functions of the model, so that every viewer shows the hierarchy."""
    nested = functions(file, select, output)
    if as_json:
        print_json(nested.to_dict())
    else:
        show(render(nested))


def inline_command(file: _File, output: _Output, as_json: _Json = False) -> None:
    """Dissolve the functions of a model: the flat graph, every node with its tags."""
    inlined = inline(file, output)
    if as_json:
        print_json(inlined.to_dict())
    else:
        show(str(inlined))
