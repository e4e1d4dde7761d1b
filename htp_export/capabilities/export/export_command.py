"""``htp-export export``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from htp_export.capabilities.export.deploy_options import DeployOptions
from htp_export.capabilities.export.file_exports import FileExports
from htp_export.capabilities.export.graph_options import GraphOptions
from htp_export.command.model_options import ModelOptions, SourceCall
from htp_export.command.options import Idle, JsonOption
from htp_export.command.outputs import Writes, check_output
from htp_export.command.terminal import Steps
from htp_export.errors import InputError
from htp_export.files.targets import Kind, check_folder, check_parent, new_folder

EXAMPLE = "bert --random-weights -o bert.onnx --verify"
PLACE = ("Export", 1)
IDLE = (
    Idle(("js_dtypes",), lambda given: given["transformers_js"] is None, "it is for --transformers-js"),
    Idle(("as_json",), lambda given: given["quiet"], "--quiet shows nothing"),
)


def export_command(
    output: Annotated[Path, "The ONNX file to write.", Writes()],
    model: ModelOptions,
    deploy: DeployOptions,
    graph: GraphOptions,
    two_files: Annotated[
        bool | None,
        typer.Option("--two-files/--one-file", help="A decoder for prefill and one with a cache, or one for both."),
    ] = None,
    cache_names: Annotated[
        str | None, typer.Option(help="Names of a cache's tensors: optimum or transformers.", show_default="optimum")
    ] = None,
    verify: Annotated[bool, "Check every module against PyTorch."] = False,
    as_json: JsonOption = False,
    quiet: Annotated[bool, "Show nothing but errors."] = False,
) -> None:
    """Export a model to ONNX with module tags, and show its tree."""
    model.check()
    _check_outputs(output, model, deploy)
    deploy.check(output, model)
    graph.check()
    steps = Steps(quiet, count=2 + verify + (deploy.transformers_js is not None))
    with steps.step(f"loading {model.name}"):
        calls = _calls(model, graph, deploy, two_files, cache_names)
    deploy.check_files(calls)
    exports = FileExports(model, deploy, graph, steps, verify, as_json, quiet, len(calls))
    with _targets(calls, output, deploy) as targets:
        for target in targets.values():
            check_output(target, Kind.MODEL)
        for name, target in targets.items():
            exports.write(name, calls[name], target)
    if deploy.transformers_js is not None:
        with steps.step("writing the folder for transformers.js"):
            folder = deploy.write_folder(targets, model, list(calls.values()))
        exports.add_files(folder)
    exports.finish()


def _check_outputs(output: Path, model: ModelOptions, deploy: DeployOptions) -> None:
    """Refuse an output that cannot be written: a file, or, for a task, a folder."""
    if output.is_dir() and model.has_task:
        check_parent(output / "model.onnx")
    elif deploy.makes_folder and not output.parent.exists():
        check_folder(output.parent, "the files of an export", lambda _: True)
    elif not output.suffix and not output.exists() and model.has_task:  # a folder is made, if there are several files
        check_parent(output)
    else:
        check_output(output, Kind.MODEL)


def _calls(
    model: ModelOptions, graph: GraphOptions, deploy: DeployOptions, two_files: bool | None, cache_names: str | None
) -> dict[str, SourceCall]:
    """Name of each file → the call that it is exported from.

    With ``--dynamic`` and with TorchScript, a task chooses the class alone.
    """
    from htp_export.capabilities.huggingface.tasks import split_task

    if split_task(model.task)[1] and not graph.dynamo:
        raise InputError(f"--task {model.task}: TorchScript takes no cache; leave --torchscript away")
    if split_task(model.task)[1] and graph.axes:
        raise InputError(f"--task {model.task} says which axes vary; leave --dynamic away")
    calls, streamed = {}, graph.stream_weights
    if graph.dynamo and not graph.axes:
        calls = model.calls_by_task(
            # transformers.js takes no decoder of two files, which is what encoder-decoders have if nothing is asked for
            two_files=False if two_files is None and deploy.transformers_js is not None else two_files,
            cache_names=cache_names or "optimum",
            stream_weights=streamed,
            for_genai=deploy.genai,
        )
    has_cache = any(split_task(call.example.task)[1] for call in calls.values() if call.example is not None)
    for option, value in (("--two-files/--one-file", two_files), ("--cache-names", cache_names)):
        if value is not None and not has_cache:
            raise InputError(f"{option} is for a task with a key-value cache (-with-past), and without --dynamic")
    # With one example, exporters take the batch for a constant.
    return calls or {"model": model.call(batch=2 if "batch" in graph.axes else 1, stream_weights=streamed)}


@contextlib.contextmanager
def _targets(calls: Mapping[str, SourceCall], output: Path, deploy: DeployOptions) -> Iterator[dict[str, Path]]:
    """Provide name → the file to write: the output, or files in a folder. A new folder is removed on failure."""
    is_folder = output.is_dir() or len(calls) > 1
    if is_folder and not output.is_dir() and output.suffix == ".onnx":
        files = ", ".join(f"{name}.onnx" for name in calls)
        raise InputError(f"-o {output}: {len(calls)} files are written, {files}; name a folder")
    folder = output if is_folder else output.parent
    with new_folder(folder) if is_folder or deploy.makes_folder else contextlib.nullcontext():
        yield {name: output / f"{name}.onnx" for name in calls} if is_folder else dict.fromkeys(calls, output)
