"""``htp-export prune``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from htp_export.command.options import (
    JSON_HAS_ALL,
    FileArgument,
    Idle,
    OutputOption,
    TableOptions,
    seed_option,
)
from htp_export.command.outputs import show_model
from htp_export.command.run_options import DataOption, typed_data
from htp_export.command.terminal import Steps
from htp_export.plans.plan_options import read_rules, rule_option

EXAMPLE = 'bert.onnx --rule "encoder.**=0.5" --rule "encoder.layer.*.output=2:4" -o sparse.onnx'
PLACE = ("Compress", 4)
IDLE = (
    Idle(("seed",), lambda given: given["method"] != "random", "it is for --method random"),
    Idle(("depth", "select"), lambda given: given["as_json"], JSON_HAS_ALL),
)


_VALUES = "encoder.**=0.5, or 2:4, channels:0.25, heads:0.5, rank:25%, drop, activations:0.5"


def prune_command(
    file: FileArgument,
    table: TableOptions,
    plan: Annotated[Path | None, typer.Argument(help="A plan, .yaml or .json.")] = None,
    rule: Annotated[list[str] | None, rule_option("VALUE", _VALUES)] = None,
    *,
    output: OutputOption,
    method: Annotated[Literal["l1", "random"], "l1: the smallest values go; random."] = "l1",
    scope: Annotated[
        Literal["local", "global"],
        "local: the share of each weight or output; global: of all together.",
    ] = "local",
    seed: Annotated[int, seed_option("For --method random.")] = 0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse the plan if a weight cannot be cut.")
    ] = False,
    data: DataOption = None,
) -> None:
    """Remove weights, channels, heads or activations of modules."""
    from htp_export.capabilities.prune.pruning import prune
    from htp_export.model.tagged import load

    rules = read_rules(plan, rule)
    with Steps(quiet=table.as_json or table.as_csv).step(f"pruning {file.name}"):
        tagged = load(file)
        result = prune(
            tagged,
            rules,
            output,
            method=method,
            scope=scope,
            seed=seed,
            strict=strict,
            data=typed_data(data),
        )
    table.report_modules(result, tagged)
    if not table.as_json and not table.as_csv:
        show_model(output)
