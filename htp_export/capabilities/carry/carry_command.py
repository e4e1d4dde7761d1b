"""``htp-export carry``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from htp_export.capabilities.carry import LEAST_KNOWN
from htp_export.command.failed_exports import failed_exports
from htp_export.command.model_options import LookOptions, SourceCall
from htp_export.command.options import JsonOption, OutputOption, ShareOption
from htp_export.command.outputs import report
from htp_export.command.run_options import InputOptions
from htp_export.command.terminal import CheckFailed, Steps
from htp_export.errors import InputError

if TYPE_CHECKING:
    import onnx_ir as ir

EXAMPLE = "bert.onnx bert-elsewhere.onnx -o bert-tagged.onnx"
PLACE = ("Optimise", 3)


@dataclasses.dataclass(frozen=True)
class BeforeOptions(LookOptions):
    """The original: a tagged file, or the model."""

    source: Annotated[
        str | None,
        typer.Argument(
            metavar="before",
            help="The tagged ONNX file; or a model: hub id, local folder, model type, --entry.",
        ),
    ] = None


def carry_command(
    model: BeforeOptions,
    output: OutputOption,
    runs_on: InputOptions,
    after: Annotated[
        Path | None,
        typer.Argument(
            help="The file without tags: a tool made it of BEFORE, or someone exported it."
        ),
    ] = None,
    require: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Fail, and write nothing, if a smaller share of the nodes has known owners.",
        ),
    ] = LEAST_KNOWN,
    share_weights: ShareOption = False,
    as_json: JsonOption = False,
) -> None:
    """Put tags on a file of another tool or exporter.

    Most tools drop the tags, which name the module of each node. Nodes that do the same work as
    those of BEFORE get their tags: they are found by name, structure, weights and values. If
    --embed-map of export or run wrote a map of the original into it, AFTER alone is enough.

    Exit status 1 if fewer nodes have known owners than --require asks for; then nothing is written.
    """
    from htp_export.capabilities.carry.carrying import carry
    from htp_export.files.model_files import write_model

    if model.entry is not None and after is None and model.source is not None:
        after = Path(model.source)  # with --entry, it is the only model that is named by position
        model = dataclasses.replace(model, source=None)
    steps = Steps(quiet=as_json)
    before: Any = Path(str(model.source))
    if model.is_file or before.is_file():
        model.check_file()
        inputs = runs_on.arrays(before, "carry", model.seed)
    elif after is None:
        raise InputError("name two models: the original, and the file to put tags on")
    elif runs_on.data or runs_on.dims:
        option = "--data" if runs_on.data else "--dims"
        raise InputError(f"{option} is for a tagged file; of a model, give shapes with --shapes")
    else:
        with steps.step(f"exporting {model.name}"), failed_exports(model):
            before, inputs = _exported(model, after)
    with steps.step("carrying tags"):
        result = carry(before, after, data=inputs, seed=model.seed, require=0)
        enough = result.share_known >= require
        if enough:
            write_model(result.model, output, share_weights=share_weights)
    report(result, as_json, output=output if enough else None, file=str(output) if enough else None)
    if not enough:
        known = f"{result.share_known:.1%} of the nodes have known owners, less than --require {require}"
        raise CheckFailed(f"{known}: {output} was not written")


def _exported(model: LookOptions, after: Path) -> tuple[Any, Mapping[str, Any]]:
    """Export the model; return its program, and the inputs of the export."""
    from htp_export.exporter.capture.model_state import unchanged
    from htp_export.exporter.exporting import export
    from htp_export.model.tagged import model_of
    from htp_export.runtime.carried_inputs import inputs_of_call

    foreign = model_of(after)  # a file that cannot be read is refused before anything is exported
    calls = model.calls_by_task(two_files=False)
    call = _most_alike(calls, foreign) if calls else model.call()
    if call.example is None:
        with unchanged(call.model, (call.args, call.kwargs), traced=True):
            program: Any = export(call.model, call.args, kwargs=call.kwargs or None, verbose=False)
        names = [str(value.name) for value in program.model.graph.inputs]
        by_name = set(names) <= set(call.inputs)
        inputs = {name: call.inputs[name] for name in names} if by_name else None
        return program, inputs_of_call(names, call.args, call.kwargs) if inputs is None else inputs
    with call.example.exporting():
        program = export(call.model, verbose=False, **call.example.options)
    call.example.name_dimensions(program.model.graph)
    return program, call.named_inputs


def _most_alike(calls: Mapping[str, SourceCall], foreign: ir.Model) -> SourceCall:
    """The call of a task that has the most input names in common with a file."""
    names = {value.name for value in foreign.graph.inputs}
    return max(calls.values(), key=lambda call: len(names & {*call.named_inputs}))
