"""``htp-export compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from htp_export.capabilities.verify.verify_command import (
    AllOption,
    ToleranceOption,
    parse_tolerances,
    report_runs,
)
from htp_export.command.options import JsonOption, SelectOption
from htp_export.command.run_options import DATA_HAS_VALUES, RunOptions
from htp_export.command.terminal import Steps

EXAMPLE = "bert.onnx int8.onnx --dims batch=1,sequence=16"
PLACE = ("Check and measure", 2)
IDLE = (DATA_HAS_VALUES,)


def compare_command(
    file: Annotated[Path, "The ONNX file that is right."],
    other: Annotated[Path, "The ONNX file to compare with it."],
    runs_on: RunOptions,
    select: SelectOption = None,
    tolerance: ToleranceOption = None,
    everything: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare two files of one model, module by module.

    Exit status 1 if a module differs.
    """
    from htp_export.capabilities.verify.file_comparing import compare

    tolerances = parse_tolerances(tolerance or ())
    with Steps(quiet=as_json).step("comparing"):
        result = compare(
            file, other, **runs_on.keywords, select=select or None, tolerances=tolerances
        )
    report_runs({"": result}, everything=everything, as_json=as_json)
