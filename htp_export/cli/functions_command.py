"""``htp-export functions`` and ``htp-export inline``."""

from __future__ import annotations

from typing import Annotated

import typer

from htp_export.cli.file_options import FileArgument, InPlaceOption, JsonOption, OutputOption, ShareOption
from htp_export.cli.outputs import check_output, show_model
from htp_export.cli.terminal import Steps, print_json, show

__all__ = ["functions_command", "inline_command"]


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
    in_place: InPlaceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make modules functions, which every viewer shows."""
    from htp_export.show.nesting import render
    from htp_export.surgery.nesting import functions

    check_output(output, [file], in_place=in_place)
    with Steps(quiet=as_json).step(f"nesting {file}"):
        nested = functions(file, select, output, share_weights=share_weights)
    if as_json:
        print_json(nested.to_dict())
    else:
        show(render(nested))
        show_model(output)


def inline_command(
    file: FileArgument,
    output: OutputOption,
    share_weights: ShareOption = False,
    in_place: InPlaceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Dissolve functions into a flat graph with its tags."""
    from htp_export.model.inlining import inline

    check_output(output, [file], in_place=in_place)
    with Steps(quiet=as_json).step(f"inlining {file}"):
        inlined = inline(file, output, share_weights=share_weights)
    if as_json:
        print_json(inlined.to_dict())
    else:
        show(str(inlined))
        show_model(output)
