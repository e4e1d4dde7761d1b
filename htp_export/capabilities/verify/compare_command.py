"""``htp-export compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from htp_export.capabilities.verify.comparisons import AllOption, ToleranceOption, parse_tolerances, report_comparison
from htp_export.command.file_options import FeedDimsOption, FeedOption, JsonOption, SelectOption, seed_option
from htp_export.command.idle_options import Idle
from htp_export.command.sizes import read_sizes
from htp_export.command.terminal import Steps

EXAMPLE = "bert.onnx int8.onnx --dims batch=1,sequence=16"
PLACE = ("Check and measure", 2)
IDLE = (Idle(("seed",), lambda given: str(given["inputs"]).endswith(".npz"), "the inputs are those of --inputs"),)


def compare_command(
    file: Annotated[Path, "The ONNX file that is right."],
    other: Annotated[Path, "The one that is compared with it."],
    inputs: FeedOption = None,
    dims: FeedDimsOption = None,
    seed: Annotated[int, seed_option("Of random inputs.")] = 0,
    select: SelectOption = None,
    tolerance: ToleranceOption = None,
    everything: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare two files of one model, module by module.

    Exit status 1 where a module differs.
    """
    from htp_export.capabilities.verify.file_comparing import compare

    sizes, tolerances = read_sizes(inputs, dims), parse_tolerances(tolerance or ())
    with Steps(quiet=as_json).step("comparing"):
        result = compare(
            file,
            other,
            sizes.inputs or None,
            dims=sizes.dims,
            shapes=sizes.shapes,
            seed=seed,
            select=select or None,
            tolerances=tolerances,
        )
    report_comparison(result, everything=everything, as_json=as_json)
