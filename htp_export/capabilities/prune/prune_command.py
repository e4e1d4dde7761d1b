"""``htp-export prune``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from htp_export.command.file_options import FileArgument, JsonOption, OutputOption, seed_option
from htp_export.command.idle_options import Idle
from htp_export.command.outputs import report
from htp_export.command.plan_options import read_rules, rule_option
from htp_export.command.terminal import Steps

EXAMPLE = 'bert.onnx --rule "encoder.**=0.5" --rule "encoder.layer.*.output=2:4" -o sparse.onnx'
PLACE = 144
IDLE = (Idle(("seed",), lambda given: given["method"] != "random", "it is for --method random"),)


def prune_command(
    file: FileArgument,
    plan: Annotated[Path | None, typer.Argument(help="A plan, .yaml or .json.")] = None,
    rule: Annotated[
        list[str] | None,
        rule_option("VALUE", "encoder.**=0.5, or 2:4, channels:0.25, heads:0.5, rank:25%, drop"),
    ] = None,
    *,
    output: OutputOption,
    method: Annotated[Literal["l1", "random"], "l1: the smallest values go; random."] = "l1",
    scope: Annotated[Literal["local", "global"], "local: the share of each weight; global: of all together."] = "local",
    seed: Annotated[int, seed_option("For --method random.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Remove the least important weights of modules."""
    from htp_export.capabilities.prune.pruning import prune

    rules = read_rules(plan, rule)
    with Steps(quiet=as_json).step(f"pruning {file.name}"):
        result = prune(
            file,
            rules,
            output,
            method=method,
            scope=scope,
            seed=seed,
        )
    report(result, as_json, output=output)
