"""``htp-export place``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from htp_export.command.file_options import (
    FeedDimsOption,
    FeedOption,
    FileArgument,
    ProviderOption,
    ShareOption,
    TableOptions,
    read_providers,
)
from htp_export.command.idle_options import JSON_HAS_ALL, Idle
from htp_export.command.outputs import Kind, Writes, show_next, show_written, written_files
from htp_export.command.sizes import Sizes, read_sizes
from htp_export.command.terminal import Steps

EXAMPLE = "bert.onnx .=cpu encoder=gpu -o placed.onnx"
PLACE = ("Deploy", 2)
IDLE = (
    Idle(("slack",), lambda given: not given["budget"], "it is for --budget"),
    Idle(("depth", "select"), lambda given: given["as_json"], JSON_HAS_ALL),
    Idle(
        ("plan", "output", "budget", "slack", "share_weights", "in_place", "force"),
        lambda given: given["show"],
        "--show gives no devices, and writes nothing",
    ),
    Idle(("provider",), lambda given: not given["show"], "it is for --show"),
)

_PLANS = (".yaml", ".yml", ".json")


def place_command(
    file: FileArgument,
    table: TableOptions,
    plan: Annotated[
        list[str] | None, typer.Argument(help="Rules, SELECTOR=DEVICE: encoder=gpu; or plans, .yaml or .json.")
    ] = None,
    output: Annotated[Path | None, "The ONNX file to write.", Writes(Kind.MODEL, in_place=True)] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(metavar="DEVICE=SIZE", help="Memory of a device: gpu=4GiB. What does not fit goes to the CPU."),
    ] = None,
    slack: Annotated[
        float, typer.Option(min=0, max=0.99, help="Share of a device's work to give up for fewer crossings.")
    ] = 0.1,
    inputs: FeedOption = None,
    dims: FeedDimsOption = None,
    share_weights: ShareOption = False,
    show: Annotated[bool, "Write nothing; show which execution provider of ONNX Runtime runs each module."] = False,
    provider: ProviderOption = None,
) -> None:
    """Give modules devices, for ONNX Runtime 1.25 and later."""
    from htp_export.capabilities.place.drawing import report
    from htp_export.capabilities.place.placing import place
    from htp_export.model.tagged import load
    from htp_export.plans.rules import rules_of

    if show:
        _show(file, table, read_providers(provider), read_sizes(inputs, dims))
        return
    if output is None:
        raise typer.BadParameter("give the file to write with -o, or --show")
    rules = _read(plan or [])
    sizes = read_sizes(inputs, dims)
    with Steps(quiet=table.as_json or table.as_csv).step(f"placing {file.name}"):
        tagged = load(file)
        result = place(
            tagged,
            rules,
            output,
            budget=rules_of(budget or []),
            slack=slack,
            inputs=sizes.inputs or None,
            dims=sizes.dims,
            shapes=sizes.shapes,
            share_weights=share_weights,
        )
    report(result, tagged, table, file=str(output))
    if not table.as_json and not table.as_csv:
        show_written(written_files(output))
        show_next("htp-export", "place", output, "--show", "--providers", "cuda,cpu")


def _show(file: Path, table: TableOptions, providers: list[str], sizes: Sizes) -> None:
    """Show where ONNX Runtime runs each module of a file."""
    from htp_export.capabilities.place.drawing import report
    from htp_export.capabilities.place.observing import placement
    from htp_export.model.tagged import load

    with Steps(quiet=table.as_json or table.as_csv).step(f"loading {file.name} into ONNX Runtime"):
        result = placement(file, providers, inputs=sizes.inputs or None, dims=sizes.dims, shapes=sizes.shapes)
    report(result, load(file), table)


def _read(words: list[str]) -> dict[str, Any]:
    """The rules of words and files, in order."""
    from htp_export.plans.rules import read_plan, rules_of

    rules: dict[str, Any] = {}
    for word in words:
        is_file = "=" not in word and Path(word).suffix.lower() in _PLANS
        for selector, device in (read_plan(word) if is_file else rules_of([word])).items():
            rules.pop(selector, None)  # it holds at its new place
            rules[selector] = device
    return rules
