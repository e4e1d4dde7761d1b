"""``htp-export adopt``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from htp_export.capabilities.carry import LEAST_KNOWN
from htp_export.command.data_options import DataOption, DataOptions, DimsOption
from htp_export.command.file_options import JsonOption, OutputOption, ShareOption
from htp_export.command.model_options import ModelOptions
from htp_export.command.outputs import report
from htp_export.command.sources import SourceCall
from htp_export.command.terminal import CheckFailed, Steps
from htp_export.errors import InputError

if TYPE_CHECKING:
    import onnx_ir as ir

    from htp_export.model.tagged import ModelSource

EXAMPLE = "llama/ genai/model.onnx -o tagged.onnx --task text-generation-with-past"
PLACE = ("Optimise", 5)


def adopt_command(
    model: ModelOptions,
    output: OutputOption,
    foreign: Annotated[Path | None, typer.Argument(help="The file that someone else exported from it.")] = None,
    data: DataOption = None,
    dims: DimsOption = None,
    require: Annotated[
        float,
        typer.Option(min=0, max=1, help="Fail, and write nothing, if a smaller share of the nodes has known owners."),
    ] = LEAST_KNOWN,
    share_weights: ShareOption = False,
    as_json: JsonOption = False,
) -> None:
    """Tag a file that someone else exported from a model.

    SOURCE is a tagged ONNX file, or a model as export takes it.
    Exit status 1 where fewer nodes have known owners than --require asks for; then nothing is written.
    """
    from htp_export.capabilities.carry.adopting import adopt
    from htp_export.files.model_files import write_model

    if model.entry is not None and foreign is None and model.source is not None:
        foreign = Path(model.source)  # with --entry, it is the only model that is named by position
        model = dataclasses.replace(model, source=None)
    if foreign is None:
        raise InputError("name two models: the original, and the file that someone else exported from it")
    named = Path(model.source or "")
    original = named if named.is_file() else None
    if original is not None:
        model.check_file()
    steps = Steps(quiet=as_json, count=2)
    with steps.step(f"loading {model.name}"):
        source, inputs = (
            _exported(model, foreign, data, dims)
            if original is None
            else (original, DataOptions(data, dims, model.shapes).arrays(original, "adopt", model.seed))
        )
    with steps.step("adopting"):
        result = adopt(source, foreign, data=inputs, seed=model.seed, require=0)
        enough = result.share_known >= require
        if enough:
            write_model(result.model, output, share_weights=share_weights)
    report(result, as_json, output=output if enough else None, file=str(output) if enough else None)
    if not enough:
        known = f"{result.share_known:.1%} of the nodes have known owners, less than --require {require}"
        raise CheckFailed(f"{known}: {output} was not written")


def _exported(
    model: ModelOptions, foreign: Path, data: list[str] | None, dims: list[str] | None
) -> tuple[ModelSource, Mapping[str, Any]]:
    """A fresh export of the model, and the inputs with which it was exported."""
    from htp_export.exporter.exporting import export
    from htp_export.model.tagged import model_of

    if data:
        raise InputError("--data is for a tagged file; of a model, give shapes with --shapes")
    if dims:
        raise InputError("--dims is for a tagged file; of a model, give shapes with --shapes")
    calls = model.calls_by_task(two_files=False)
    call = _most_alike(calls, model_of(foreign)) if calls else model.call()
    if call.example is None:
        program: Any = export(call.model, call.args, kwargs=call.kwargs or None, verbose=False)
        return program, _inputs_of(program.model, call)
    with call.example.exporting():
        program = export(call.model, verbose=False, **call.example.options)
    call.example.name_dimensions(program.model.graph)
    return program, call.named_inputs


def _most_alike(calls: Mapping[str, SourceCall], foreign: ir.Model) -> SourceCall:
    """The file of a task whose inputs have the most names in common with those of a file."""
    names = {value.name for value in foreign.graph.inputs}
    return max(calls.values(), key=lambda call: len(names & {*call.named_inputs}))


def _inputs_of(model: ir.Model, call: SourceCall) -> dict[str, Any]:
    """The example inputs by the names of the graph's inputs."""
    from htp_export.capabilities.carry.feeds import inputs_of_call

    names = [str(value.name) for value in model.graph.inputs]
    if set(names) <= set(call.inputs):
        return {name: call.inputs[name] for name in names}
    return inputs_of_call(names, call.args, call.kwargs)
