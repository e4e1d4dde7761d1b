"""``htp-export carry``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from htp_export.command.data_options import DataOptions
from htp_export.command.file_options import JsonOption, OutputOption, ShareOption
from htp_export.command.outputs import report
from htp_export.command.terminal import Steps

EXAMPLE = "bert.onnx bert-elsewhere.onnx -o bert-tagged.onnx"
PLACE = ("Optimise", 3)


def carry_command(
    before: Annotated[Path, "The tagged file that the tool was given."],
    output: OutputOption,
    runs_on: DataOptions,
    after: Annotated[Path | None, typer.Argument(help="What the tool made of it.")] = None,
    share_weights: ShareOption = False,
    as_json: JsonOption = False,
) -> None:
    """Put tags on what another tool made of a tagged file.

    With --data, --dims or --shapes, both files are run once, and tensors are found by their values too.
    A single file is enough where its map was embedded: --embed-map of export and run.
    """
    from htp_export.capabilities.carry.carrying import carry

    with Steps(quiet=as_json).step("carrying tags"):
        result = carry(before, after, output, data=runs_on.arrays(before, "carry"), share_weights=share_weights)
    report(result, as_json, output=output, file=str(output))
