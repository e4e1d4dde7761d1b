"""``htp-export carry``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from htp_export.command.file_options import FeedDimsOption, FeedOption, JsonOption, OutputOption, ShareOption
from htp_export.command.outputs import report
from htp_export.command.sizes import read_sizes
from htp_export.command.terminal import Steps

EXAMPLE = "bert.onnx bert-elsewhere.onnx -o bert-tagged.onnx"
PLACE = ("Optimise", 3)


def carry_command(
    before: Annotated[Path, "The tagged file that the tool was given."],
    output: OutputOption,
    after: Annotated[Path | None, typer.Argument(help="What the tool made of it.")] = None,
    inputs: FeedOption = None,
    dims: FeedDimsOption = None,
    share_weights: ShareOption = False,
    as_json: JsonOption = False,
) -> None:
    """Put tags on what another tool made of a tagged file.

    With --inputs or --dims, both files are run once, and tensors are found by their values too.
    A single file is enough where its map was embedded: --embed-map of export and run.
    """
    from htp_export.capabilities.carry.carrying import carry

    sizes = read_sizes(inputs, dims)
    with Steps(quiet=as_json).step("carrying tags"):
        result = carry(before, after, output, inputs=sizes.arrays(before), share_weights=share_weights)
    report(result, as_json, output=output, file=str(output))
