"""``htp-export quantize``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from htp_export.command.data_options import DATA_HAS_VALUES, DataOptions, typed_data
from htp_export.command.file_options import FileArgument, ShareOption, TableOptions, seed_option
from htp_export.command.idle_options import JSON_HAS_ALL, Idle
from htp_export.command.outputs import Kind, Writes, show_next, show_written, written_files
from htp_export.command.plan_options import MetricOption, PlanArgument, RuleOption, read_metric, read_rules
from htp_export.command.terminal import Steps

EXAMPLE = "bert.onnx plan.yaml -o mixed.onnx --data inputs.npz"
PLACE = 142
IDLE = (
    Idle(
        ("output", "data", "metric", "validation", "dims", "shapes", "seed", "share_weights", "in_place", "force"),
        lambda given: given["dry_run"],
        "--dry-run runs and writes nothing",
    ),
    Idle(("depth", "select"), lambda given: given["as_json"], JSON_HAS_ALL),
    DATA_HAS_VALUES,
)


def quantize_command(
    file: FileArgument,
    table: TableOptions,
    runs_on: DataOptions,
    plan: PlanArgument = None,
    rule: RuleOption = None,
    output: Annotated[Path | None, "The ONNX file to write.", Writes(Kind.MODEL, in_place=True)] = None,
    metric: MetricOption = None,
    validation: Annotated[list[str] | None, "Inputs for --metric, as --data. Those of --data without."] = None,
    seed: Annotated[int, seed_option("Of random inputs.")] = 0,
    dry_run: Annotated[bool, "Show the plan and the predicted bytes; run nothing."] = False,
    share_weights: ShareOption = False,
) -> None:
    """Give modules other precisions: int8, int4, fp16.

    Exactly the modules of the plan change. Without --data, ranges of activations are those of random inputs.
    """
    from htp_export.capabilities.quantize.precisions import PRECISIONS
    from htp_export.capabilities.quantize.quantizing import quantize
    from htp_export.model.tagged import load

    if output is None and not dry_run:
        raise typer.BadParameter("give the file to write with -o, or --dry-run")
    rules = read_rules(plan, rule, "PRECISION", named=PRECISIONS)
    with Steps(quiet=table.as_json or table.as_csv).step(f"quantizing {file.name}"):
        tagged = load(file)
        result = quantize(
            tagged,
            rules,
            None if dry_run else output,
            **runs_on.keywords,
            metric=read_metric(metric),
            validation=typed_data(validation),
            seed=seed,
            dry_run=dry_run,
            share_weights=share_weights,
        )
    table.report_modules(result, tagged, **({} if dry_run or output is None else {"file": str(output)}))
    if output is not None and not dry_run and not table.as_json and not table.as_csv:
        show_written(written_files(output))
        show_next("htp-export", "compare", file, output)
