"""``htp-export sensitivity``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from htp_export.command.options import (
    DepthOption,
    FileArgument,
    Idle,
    JsonOption,
    SelectOption,
    count_option,
)
from htp_export.command.run_options import DATA_HAS_VALUES, RunOptions
from htp_export.command.terminal import Steps, print_json, print_text, show, split_names
from htp_export.plans.plan_options import MetricOption, read_metric

EXAMPLE = "bert.onnx --precision int8,int4 --data inputs.npz --depth 3"
PLACE = ("Compress", 2)
_ESTIMATE = "--estimate quantizes nothing"
IDLE = (
    Idle(
        ("runs", "repeats", "all_but", "by_module", "metric", "results"),
        lambda given: given["estimate"],
        _ESTIMATE,
    ),
    Idle(("by_module",), lambda given: not given["as_json"], "it is for --json"),
    DATA_HAS_VALUES,
)


def sensitivity_command(
    file: FileArgument,
    runs_on: RunOptions,
    precision: Annotated[list[str] | None, "By comma: int8, int4, fp16, ... (auto)."] = None,
    select: SelectOption = None,
    depth: DepthOption = None,
    metric: MetricOption = None,
    results: Annotated[Path | None, "A file for finished runs, which are not repeated."] = None,
    estimate: Annotated[bool, "Quantize nothing: estimate from weights and inputs."] = False,
    all_but: Annotated[
        bool, typer.Option("--all-but/--alone", help="Measure all modules but one, too.")
    ] = True,
    by_module: Annotated[bool, "Compare all modules in each quantized model; for --json."] = False,
    runs: Annotated[int, count_option("Timed runs of each model.", 0)] = 0,
    repeats: Annotated[
        int, count_option("Measure each model so often, for medians and a spread (0).", 0)
    ] = 0,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, "Write CSV."] = False,
) -> None:
    """Measure which modules can be quantized.

    Modules are quantized one by one. The one that changes the outputs of the model most comes
    first.
    """
    from htp_export.capabilities.search.drawing import render_sensitivity, sensitivity_csv
    from htp_export.capabilities.search.sensitivities import sensitivity

    with Steps(quiet=as_json or as_csv).step(f"quantizing modules of {file.name}"):
        result = sensitivity(
            file,
            split_names(precision) or ("auto",),
            **runs_on.keywords,
            select=select or None,
            depth=depth,
            metric=read_metric(metric),
            all_but=all_but,
            estimate=estimate,
            by_module=by_module,
            runs=runs,
            repeats=repeats,
            results=results,
        )
    if as_json:
        print_json(result.to_dict())
    elif as_csv:
        print_text(sensitivity_csv(result))
    else:
        show(render_sensitivity(result))
