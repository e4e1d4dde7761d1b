"""``htp-export quantize``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from htp_export.command.options import JSON_HAS_ALL, FileArgument, Idle, ShareOption, TableOptions
from htp_export.command.outputs import (
    Writes,
    check_output,
    report,
    show_next,
    show_written,
    written_files,
    written_page,
)
from htp_export.command.run_options import DATA_HAS_VALUES, RunOptions, typed_data
from htp_export.command.terminal import Steps
from htp_export.files.targets import Kind
from htp_export.plans.plan_options import (
    MetricOption,
    PlanArgument,
    RuleOption,
    read_metric,
    read_rules,
)

EXAMPLE = "bert.onnx plan.yaml -o mixed.onnx --data inputs.npz"
PLACE = ("Compress", 1)
_OF_RUNS = (
    "data",
    "metric",
    "validation",
    "dims",
    "shapes",
    "seed",
    "check",
    "share_weights",
    "in_place",
)
IDLE = (
    Idle(
        _OF_RUNS,
        lambda given: given["dry_run"] or given["plan_for"],
        "--dry-run and --plan-for run nothing",
    ),
    Idle(
        ("output", "force"),
        lambda given: given["dry_run"] and not given["plan_for"],
        "--dry-run writes nothing",
    ),
    Idle(
        ("depth", "select", "sort", "as_csv", "fold"),
        lambda given: given["plan_for"],
        "--plan-for has no table",
    ),
    Idle(("weights",), lambda given: given["plan_for"], "--plan-for reads no weights"),
    Idle(("strict",), lambda given: given["plan_for"], "--plan-for quantizes nothing"),
    Idle(("depth", "select"), lambda given: given["as_json"], JSON_HAS_ALL),
    DATA_HAS_VALUES,
)


def quantize_command(
    file: FileArgument,
    table: TableOptions,
    runs_on: RunOptions,
    plan: PlanArgument = None,
    rule: RuleOption = None,
    output: Annotated[Path | None, "The ONNX file to write.", Writes(in_place=True)] = None,
    metric: MetricOption = None,
    validation: Annotated[
        list[str] | None, "Inputs for --metric, as --data; by default, --data."
    ] = None,
    dry_run: Annotated[bool, "Show the plan and the predicted bytes; run nothing."] = False,
    check: Annotated[
        bool, "Run both models on the data: the worst module, and the time of both."
    ] = False,
    plan_for: Annotated[
        str | None, "Write the plan for another tool to -o: ort, nncf, modelopt, genai, olive."
    ] = None,
    share_weights: ShareOption = False,
    weights: Annotated[
        str | None,
        "A checkpoint, as of bind: GPTQ, AWQ, bitsandbytes and GGUF stay packed, others are quantized.",
    ] = None,
    strict: Annotated[
        bool, "Refuse the plan if a node, or the bias of one, would stay as it is."
    ] = False,
) -> None:
    """Give modules other precisions: int8, int4, fp16.

    Without a plan, one that is usually faster than fp32 on this machine. Exactly the modules of the plan
    change. Without --data, ranges of activations are measured on random inputs.
    """
    from htp_export.capabilities.quantize.method import CHECKPOINT
    from htp_export.capabilities.quantize.precisions import PRECISIONS
    from htp_export.capabilities.quantize.quantizing import quantize
    from htp_export.model.tagged import load

    # Each branch is one combination of options that another module does not check.
    if output is not None:
        check_output(output, Kind.MODEL if plan_for is None else Kind.JSON)
    elif not dry_run and plan_for is None:
        raise typer.BadParameter("give the file to write with -o, or --dry-run")
    named = PRECISIONS if weights is None else (*PRECISIONS, CHECKPOINT)
    rules: dict[str, Any] | str = "auto"
    if plan is not None or rule or plan_for is not None:
        rules = read_rules(plan, rule, "PRECISION", named=named)
    if plan_for is not None:
        _write_plan(file, rules, output, plan_for, table.as_json)
        return
    written = None if dry_run else output
    with Steps(quiet=table.as_json or table.as_csv).step(f"quantizing {file.name}"):
        tagged = load(file)
        result = quantize(
            tagged,
            rules,
            written,
            **runs_on.keywords,
            metric=read_metric(metric),
            validation=typed_data(validation),
            dry_run=dry_run,
            check=check,
            share_weights=share_weights,
            weights=weights,
            strict=strict,
        )
    table.report_modules(result, tagged, **({} if written is None else {"file": str(written)}))
    if written is not None and not table.as_json and not table.as_csv:
        show_written(written_files(written))
        show_next("htp-export", "compare", file, written)


def _write_plan(
    file: Path, rules: dict[str, Any] | str, output: Path | None, tool: str, as_json: bool
) -> None:
    """Write a plan as a file for another tool."""
    from htp_export.capabilities.quantize.plan_exporting import export_plan

    with Steps(quiet=as_json).step(f"writing the plan of {file.name}"):
        result = export_plan(file, rules, output, to=tool)
    report(result, as_json)
    if output is not None and not as_json:
        show_written(written_page(output))
