"""``htp-export functions``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from htp_export.command.options import FileArgument, Idle, JsonOption, OutputOption, ShareOption
from htp_export.command.outputs import report
from htp_export.command.terminal import Steps

if TYPE_CHECKING:
    from rich.console import RenderableType

    from htp_export.capabilities.functions.nesting import Nested

EXAMPLE = 'bert.onnx "encoder.layer.*" -o nested.onnx'
PLACE = ("Cut", 3)
IDLE = (Idle(("select",), lambda given: given["undo"], "--undo dissolves all functions"),)


def functions_command(
    file: FileArgument,
    select: Annotated[
        list[str] | None,
        typer.Argument(
            help="The modules: encoder.layer.*, class:Linear, re:..., !excluded; ** for all.",
            metavar="SELECT...",
        ),
    ] = None,
    *,
    output: OutputOption,
    undo: Annotated[
        bool, "Dissolve the functions of a file into a flat graph with its tags."
    ] = False,
    share_weights: ShareOption = False,
    as_json: JsonOption = False,
) -> None:
    """Turn modules into functions, which every viewer shows."""
    from htp_export.capabilities.functions.nesting import functions, inline

    if undo:
        with Steps(quiet=as_json).step(f"inlining {file}"):
            inlined = inline(file, output, share_weights=share_weights)
        report(inlined, as_json, output=output)
        return
    if not select:
        raise typer.BadParameter("give the modules, ** for all, or --undo")
    with Steps(quiet=as_json).step(f"nesting {file}"):
        nested = functions(file, select, output, share_weights=share_weights)
    report(nested, as_json, lambda: _drawn(nested), output)


def _drawn(nested: Nested) -> RenderableType:
    """A table with one line a function, and the numbers of modules that stay flat, by reason."""
    from rich.console import Group
    from rich.text import Text

    from htp_export.reporting.module_table import flat_table

    reasons = Counter(nested.skipped.values())
    notes = [
        Text(f"{count} left flat: {reason}", style="yellow")
        for reason, count in reasons.most_common()
    ]
    return Group(flat_table(*nested.table()), *notes)
