"""``htp-export pipeline``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from htp_export.command.options import Idle, JsonOption
from htp_export.command.outputs import Writes, report
from htp_export.command.terminal import CheckFailed, Steps, print_json, show
from htp_export.errors import InputError
from htp_export.files.targets import Kind

if TYPE_CHECKING:
    from htp_export.capabilities.pipeline.pipeline_steps import PipelineStep
    from htp_export.format.model_metadata import ProvenanceNote

EXAMPLE = "steps.yaml -m bert.onnx -o small.onnx"
PLACE = ("Optimise", 4)
IDLE = (
    Idle(
        ("fresh", "folder"),
        lambda given: (
            given["file"].suffix.lower() == ".onnx"
            and given["model"] is None
            and given["output"] is None
        ),
        "the steps of the file are shown, not run",
    ),
)


def pipeline_command(
    file: Annotated[Path, "Steps in YAML or JSON; or an ONNX file that a pipeline wrote."],
    model: Annotated[
        Path | None, typer.Option("--model", "-m", help="The ONNX file to begin with.")
    ] = None,
    output: Annotated[Path | None, "The ONNX file to write.", Writes(Kind.MODEL)] = None,
    folder: Annotated[
        Path | None, "Folder for the files of the steps; OUTPUT.steps without it.", Writes()
    ] = None,
    fresh: Annotated[bool, "Run all steps, also those that an earlier run completed."] = False,
    allow_entry: Annotated[bool, "Run the code that the steps of an ONNX file name."] = False,
    as_json: JsonOption = False,
) -> None:
    """Run passes, tools and checks in sequence, from a file.

    The metadata of the result records the steps.

    A second run continues after the last completed step. For an ONNX file that a pipeline wrote,
    its steps are shown, or run again with --model and --output.

    Exit status 1 if a check or a step fails, or if a repeated pipeline produces another model.
    """
    from htp_export.capabilities.pipeline.running import pipeline, read_pipeline

    if file.suffix.lower() == ".onnx" and model is None and output is None:
        _show_provenance(file, as_json)
        return
    read = read_pipeline(file, _with_pytorch, allow_entry=allow_entry)
    with Steps(quiet=as_json).step("running the pipeline"):
        result = pipeline(read, model, output, folder=folder, resume=not fresh)
    report(result, as_json, output=result.output)
    if not result.ok:
        raise CheckFailed(result.summary)


def _with_pytorch(step: PipelineStep) -> PipelineStep:
    """Replace the names in a ``verify`` step by the PyTorch model and its arguments."""
    if step.name != "verify" or not {"entry", "source"} & set(step.options):
        return step
    from htp_export.command.model_options import call_entry

    options = dict(step.options)
    if "entry" in options:
        call = call_entry(str(options.pop("entry")), int(options.pop("seed", 0)))
        named: Mapping[str, Any] = {"model": call.model, "args": call.args, "kwargs": call.kwargs}
    else:
        named = _from_source(options)
    return replace(step, options={**options, **named}, described=step.options)


_SOURCE_OPTIONS = ("task", "random_weights", "seed", "dtype", "revision", "attn_implementation")


def _from_source(options: dict[str, Any]) -> dict[str, Any]:
    """Load the model of a hub id, folder or model type, and create example inputs; pop its options."""
    from htp_export.capabilities.huggingface.inputs import example_inputs
    from htp_export.capabilities.huggingface.models import load_model

    source, overrides = str(options.pop("source")), options.pop("set", None)
    settings = {name: options.pop(name) for name in _SOURCE_OPTIONS if name in options}
    if overrides is not None and not isinstance(overrides, Mapping):
        raise InputError(f"step verify: set is a mapping from names to values, not {overrides!r}")
    model = load_model(source, overrides=overrides, **settings)
    return {"model": model, "kwargs": example_inputs(model)}


def _show_provenance(file: Path, as_json: bool) -> None:
    """Show the steps that produced a file, and whether it was changed since."""
    from htp_export.capabilities.pipeline.running import provenance_of
    from htp_export.files.model_files import read_model
    from htp_export.model.hashes import content_hash

    model = read_model(file)
    notes = provenance_of(file, model)
    unchanged = content_hash(model) == notes[-1].output
    if as_json:
        print_json(
            {
                "file": str(file),
                "unchanged": unchanged,
                "provenance": [note.to_dict() for note in notes],
            }
        )
        return
    show("\n".join(_lines(notes)))
    if not unchanged:
        show("the model was changed since")


def _lines(notes: tuple[ProvenanceNote, ...]) -> list[str]:
    """A line for each step: ``optimize(level='exact')``."""
    lines = []
    for note in notes:
        options = ", ".join(f"{name}={value!r}" for name, value in note.options.items())
        lines.append(f"{note.step}({options})")
    return lines
