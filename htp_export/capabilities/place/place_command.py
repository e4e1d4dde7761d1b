"""``htp-export place``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from htp_export.command.options import JSON_HAS_ALL, FileArgument, Idle, ShareOption, TableOptions
from htp_export.command.outputs import Writes, show_next, show_written, written_files
from htp_export.command.run_options import InputOptions, ProviderOption, read_providers
from htp_export.command.terminal import Steps
from htp_export.files.targets import Kind
from htp_export.plans.plan_options import read_rules, rule_option, typed_pairs

EXAMPLE = "bert.onnx --rule encoder=gpu -o placed.onnx"
PLACE = ("Deploy", 2)
IDLE = (
    Idle(("slack",), lambda given: not given["budget"], "it is for --budget"),
    Idle(("depth", "select"), lambda given: given["as_json"], JSON_HAS_ALL),
    Idle(
        ("plan", "rule", "output", "budget", "slack", "share_weights", "in_place", "force"),
        lambda given: given["show"],
        "--show gives no devices, and writes nothing",
    ),
    Idle(("provider",), lambda given: not given["show"], "it is for --show"),
)


def place_command(
    file: FileArgument,
    table: TableOptions,
    runs_on: InputOptions,
    plan: Annotated[Path | None, typer.Argument(help="A plan, .yaml or .json.")] = None,
    rule: Annotated[list[str] | None, rule_option("DEVICE", "encoder=gpu")] = None,
    output: Annotated[
        Path | None, "The ONNX file to write.", Writes(Kind.MODEL, in_place=True)
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEVICE=SIZE",
            help="Memory of a device: gpu=4GiB. What does not fit goes to the CPU.",
        ),
    ] = None,
    slack: Annotated[
        float,
        typer.Option(
            min=0, max=0.99, help="Share of a device's work to give up for fewer crossings."
        ),
    ] = 0.1,
    share_weights: ShareOption = False,
    show: Annotated[
        bool, "Write nothing; show which execution provider of ONNX Runtime runs each module."
    ] = False,
    provider: ProviderOption = None,
) -> None:
    """Assign devices to modules, for ONNX Runtime 1.25 and later.

    A plan or --rule gives the device of selected modules: gpu, cpu, npu.
    """
    from htp_export.capabilities.place.placing import place
    from htp_export.model.tagged import load

    if show:
        _show(file, table, read_providers(provider), runs_on)
        return
    if output is None:
        raise typer.BadParameter("give the file to write with -o, or --show")
    rules = read_rules(plan, rule, "DEVICE") if plan or rule or not budget else {}
    with Steps(quiet=table.as_json or table.as_csv).step(f"placing {file.name}"):
        tagged = load(file)
        result = place(
            tagged,
            rules,
            output,
            budget=typed_pairs(budget or [], "--budget", "DEVICE=SIZE"),
            slack=slack,
            **runs_on.keywords,
            share_weights=share_weights,
        )
    table.report_modules(result, tagged, file=str(output))
    if not table.as_json and not table.as_csv:
        show_written(written_files(output))
        show_next("htp-export", "place", output, "--show", "--providers", "cuda,cpu")


def _show(file: Path, table: TableOptions, providers: list[str], runs_on: InputOptions) -> None:
    """Show where ONNX Runtime runs each module of a file."""
    from htp_export.capabilities.place.placing import placement
    from htp_export.model.tagged import load

    with Steps(quiet=table.as_json or table.as_csv).step(f"loading {file.name} into ONNX Runtime"):
        result = placement(file, providers=providers, **runs_on.keywords)
    table.report_modules(result, load(file))
