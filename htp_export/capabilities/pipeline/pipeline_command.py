"""``htp-export pipeline``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from htp_export.command.as_python import Preparation, Written, text_of, wanted_program
from htp_export.command.model_options import ModelOptions, call_entry
from htp_export.command.model_programs import prepare_entry
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
    program = wanted_program()
    prepare = _with_pytorch if program is None else _Lines(program).of_step
    read = read_pipeline(file, prepare, allow_entry=allow_entry)
    if program is not None:
        program.arguments["steps"] = _written_steps(file, read.steps)
        if allow_entry:
            program.arguments["allow_entry"] = Written("True")
    with Steps(quiet=as_json).step("running the pipeline"):
        result = pipeline(read, model, output, folder=folder, resume=not fresh)
    report(result, as_json, output=result.output)
    if not result.ok:
        raise CheckFailed(result.summary)


@dataclass
class _Lines:
    """The lines for the PyTorch model of a ``verify`` step, for ``--as-python``."""

    program: Preparation

    def of_step(self, step: PipelineStep) -> PipelineStep:
        """Write the lines of a step; return the step with the names of its model and inputs."""
        if not _names_model(step):
            return step
        if self.program.lines:
            raise InputError("--as-python: only one step verify may name a model")
        options = dict(step.options)
        named = {name: options.pop(name) for name in _MODEL_OPTIONS if name in options}
        settings = named.pop("set", {})
        named["settings"] = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        named["attention"] = named.pop("attn_implementation", None)
        model = ModelOptions(**named)
        if model.entry is not None:
            prepare_entry(self.program, model)
        else:
            from htp_export.capabilities.huggingface.source_programs import prepare_source

            prepare_source(self.program, model)
        options |= self.program.arguments
        self.program.arguments.clear()
        self.program.left_out.clear()
        return replace(step, options=options, described=step.options)


def _written_steps(file: Path, steps: Sequence[PipelineStep]) -> Written:
    """The file of the steps; or the steps, if one of them has a PyTorch model."""
    if all(step.described is None for step in steps):
        return Written(text_of(file))
    listed = [{step.name: dict(step.options)} if step.options else step.name for step in steps]
    return Written(text_of(listed))


def _names_model(step: PipelineStep) -> bool:
    """Whether a step is a ``verify`` that names a factory or a model of transformers."""
    return step.name == "verify" and not {"entry", "source"}.isdisjoint(step.options)


def _with_pytorch(step: PipelineStep) -> PipelineStep:
    """Replace the names in a ``verify`` step by the PyTorch model and its arguments."""
    if not _names_model(step):
        return step
    options = dict(step.options)
    if "entry" in options:
        call = call_entry(str(options.pop("entry")), int(options.pop("seed", 0)))
        named: Mapping[str, Any] = {"model": call.model, "args": call.args, "kwargs": call.kwargs}
    else:
        named = _from_source(options)
    return replace(step, options={**options, **named}, described=step.options)


_SOURCE_OPTIONS = ("task", "random_weights", "seed", "dtype", "revision", "attn_implementation")
_MODEL_OPTIONS = ("entry", "source", "set", *_SOURCE_OPTIONS)


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
