"""``htp-export export``: write, show and check each file of a model."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from htp_export.capabilities.export.export_options import DeployOptions, GraphOptions
from htp_export.capabilities.export.export_program import ExportProgram
from htp_export.command.as_python import CallSeen, wanted_program
from htp_export.command.failed_exports import failed_exports
from htp_export.command.model_options import ModelOptions, SourceCall
from htp_export.command.options import Idle, JsonOption
from htp_export.command.outputs import Writes, check_output, show_next, show_written, written_files
from htp_export.command.terminal import CheckFailed, Steps, print_json, show, warning_line
from htp_export.errors import InputError, UntaggedExportWarning
from htp_export.extras import required
from htp_export.files.folders import check_folder, new_folder
from htp_export.files.targets import Kind, check_parent

if TYPE_CHECKING:
    from htp_export.costs.result import ModuleTree
    from htp_export.model.tagged import TaggedModel


EXAMPLE = "bert --random-weights -o bert.onnx --verify"
PLACE = ("Export", 1)
IDLE = (
    Idle(
        ("js_dtypes",),
        lambda given: given["transformers_js"] is None,
        "it is for --transformers-js",
    ),
)


def export_command(
    output: Annotated[Path, "The ONNX file to write.", Writes()],
    model: ModelOptions,
    deploy: DeployOptions,
    graph: GraphOptions,
    two_files: Annotated[
        bool | None,
        typer.Option(
            "--two-files/--one-file",
            help="A decoder for prefill and one with a cache, or one for both.",
        ),
    ] = None,
    cache_names: Annotated[
        str | None,
        typer.Option(
            help="Names of a cache's tensors: optimum or transformers.", show_default="optimum"
        ),
    ] = None,
    verify: Annotated[bool, "Check every module against PyTorch."] = False,
    as_json: JsonOption = False,
) -> None:
    """Export a model to ONNX with module tags, and show its tree."""
    model.check()
    _check_outputs(output, model, deploy)
    deploy.check(output, model)
    graph.check()
    if verify:
        required("onnxruntime", "--verify")
    program = wanted_program()
    if program is not None:
        described = ExportProgram(
            program, output, model, deploy, graph, verify, two_files, cache_names
        )
        raise CallSeen(described.text())
    steps = Steps(count=2 + verify + (deploy.transformers_js is not None))
    with steps.step(f"loading {model.name}"):
        calls = _calls(model, graph, deploy, two_files, cache_names)
    deploy.check_files(calls)
    deploy.check_folder(model)
    exports = FileExports(model, deploy, graph, steps, verify, as_json, len(calls))
    with _targets(calls, output, deploy) as targets:
        for name, target in targets.items():
            check_output(target, Kind.MODEL)
            deploy.check_beside(target, model, calls[name])
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
    elif not output.suffix and not output.exists() and model.has_task:
        # If the task has several files, they are written into a new folder of this name.
        check_parent(output)
    else:
        check_output(output, Kind.MODEL)


def _calls(
    model: ModelOptions,
    graph: GraphOptions,
    deploy: DeployOptions,
    two_files: bool | None,
    cache_names: str | None,
) -> dict[str, SourceCall]:
    """Name of each file → the call that it is exported from.

    With ``--dynamic`` or TorchScript, a task selects the model class and nothing else.
    """
    from htp_export.capabilities.huggingface.tasks import split_task

    with_cache = split_task(model.task)[1]
    if with_cache and not graph.dynamo:
        raise InputError(
            f"--task {model.task}: TorchScript takes no cache; leave --torchscript away"
        )
    if with_cache and graph.axes:
        raise InputError(f"--task {model.task} decides which axes vary; leave --dynamic away")
    by_task = {}
    if graph.dynamo and not graph.axes:
        # Encoder-decoders have two files for the decoder by default; transformers.js loads one.
        one_file = two_files is None and deploy.transformers_js is not None
        by_task = model.calls_by_task(
            two_files=False if one_file else two_files,
            cache_names=cache_names or "optimum",
            stream_weights=graph.stream_weights,
            for_genai=deploy.genai,
        )
    _check_cache_options(by_task, two_files, cache_names)
    if by_task:
        return by_task
    # With a batch of one, exporters make its size a constant.
    batch = 2 if "batch" in graph.axes else 1
    return {"model": model.call(batch=batch, stream_weights=graph.stream_weights)}


def _check_cache_options(
    calls: Mapping[str, SourceCall], two_files: bool | None, cache_names: str | None
) -> None:
    """Refuse options for a key-value cache if no file has one."""
    from htp_export.capabilities.huggingface.tasks import split_task

    examples = [call.example for call in calls.values() if call.example is not None]
    if any(split_task(example.task)[1] for example in examples):
        return
    for option, value in (("--two-files/--one-file", two_files), ("--cache-names", cache_names)):
        if value is not None:
            raise InputError(
                f"{option} is for a task with a key-value cache (-with-past), and without --dynamic"
            )


@contextlib.contextmanager
def _targets(
    calls: Mapping[str, SourceCall], output: Path, deploy: DeployOptions
) -> Iterator[dict[str, Path]]:
    """Provide name → file to write: the output, or files in a folder. A new folder is removed on failure."""
    is_folder = output.is_dir() or len(calls) > 1
    if is_folder and not output.is_dir() and output.suffix == ".onnx":
        files = ", ".join(f"{name}.onnx" for name in calls)
        raise InputError(f"-o {output}: {len(calls)} files are written, {files}; name a folder")
    if is_folder:
        with new_folder(output):
            yield {name: output / f"{name}.onnx" for name in calls}
    else:
        with new_folder(output.parent) if deploy.makes_folder else contextlib.nullcontext():
            yield dict.fromkeys(calls, output)


@dataclass
class FileExports:
    """Exports, shows and, with ``verify``, checks each file of one command; collects records for ``--json``."""

    model: ModelOptions
    deploy: DeployOptions
    graph: GraphOptions
    steps: Steps
    verify: bool
    as_json: bool
    count: int  # of files
    _idle: set[str] = field(default_factory=lambda: {"--decompose-attention", "--keep-attention"})
    _records: dict[str, dict[str, Any]] = field(default_factory=dict)
    _notes: list[str] = field(default_factory=list)
    _failures: list[str] = field(default_factory=list)

    def write(self, name: str, call: SourceCall, output: Path) -> None:
        """Write one file, show it, and check it.

        Raises:
            CheckFailed: If the export fails.
        """
        from htp_export.editing.flattening import read_flat
        from htp_export.files.external_writers import readable
        from htp_export.model.tagged import load

        self._notes.clear()
        with readable(output) as file:
            with self.steps.step("exporting"):
                untagged, beside = self._export(call, file)
                if untagged is not None:
                    warning_line(untagged)
                tagged = load(file)
                tree = _tree(call, read_flat(tagged))
            facts = self._facts(tagged, call)
            if untagged is not None:
                facts["untagged"] = untagged
            if self._notes:
                facts["notes"] = list(self._notes)
            files = written_files(output)
            for path in map(output.with_name, beside):
                files[str(path)] = path.stat().st_size
            self._records[name] = {"file": str(output), "files": files, **facts, **tree.to_dict()}
            if self._shown:
                from htp_export.costs.drawing import render

                show(render(tree))
                show_written(files)
                show(_facts_text(facts))
                for note in self._notes:
                    show(note)
            agrees = not self.verify or self._verified(name, call, file)
        if self._shown and agrees:
            show_next("htp-export", "view", output)

    def add_files(self, files: Mapping[str, int]) -> None:
        """Record and show further written files: path → size."""
        next(iter(self._records.values()))["files"] |= files
        if self._shown:
            show_written(files)

    def finish(self) -> None:
        """Print the JSON of all files; raise `CheckFailed` if a file differs from PyTorch."""
        if self.as_json:
            records = self._records
            print_json(next(iter(records.values())) if len(records) == 1 else {"models": records})
        if self._failures:
            raise CheckFailed("\n".join(self._failures))

    @property
    def _shown(self) -> bool:
        return not self.as_json

    def _export(self, call: SourceCall, output: Path) -> tuple[str | None, list[str]]:
        """Write the file, and the files for other runtimes beside it.

        Returns:
            The reason why it has no tags, None if it has; and the names of the other files.
        """
        from htp_export.files.external_writers import written_whole

        if self.deploy.makes_folder:
            replaces = self.deploy.replaces_beside(output)
        else:
            replaces = _never
        with written_whole(output, replaces=replaces) as target, _untagged_reasons() as reasons:
            with failed_exports(self.model):
                program = self._program(call, target)
                if call.checkpoint is not None:
                    call.checkpoint.check()
                _check_written(target, self.graph.wanted_opset)
                if not reasons:
                    self._finish_tagged(target)
                    self._pack(call, target)
                    self._refer(target)
                beside = self.deploy.write_beside(self.model, call, target, program, output)
            return reasons[0] if reasons else None, beside

    def _finish_tagged(self, target: Path) -> None:
        """Refuse options for attention that had no effect in any file; embed the map if requested."""
        self._idle &= self.graph.idle_attention(target)
        if self._idle and len(self._records) == self.count - 1:
            raise InputError(
                f"{min(self._idle)}: no attention was exported to which it applies; leave it out"
            )
        if self.graph.with_map:
            from htp_export.alignment.origin_map import embed_map

            embed_map(target, target)

    def _refer(self, target: Path) -> None:
        """Replace the weights of a file by references to a checkpoint."""
        if self.graph.weights is None:
            return
        from htp_export.discovery import provider
        from htp_export.files.own_data import own_files

        folder = target.parent / "referring"
        folder.mkdir()
        write = provider("weights_of_checkpoint").write
        self._notes += write(target, self.graph.weights, folder / target.name)
        for data in own_files(target):
            data.unlink()
        for file in folder.iterdir():
            file.replace(target.with_name(file.name))
        folder.rmdir()

    def _pack(self, call: SourceCall, target: Path) -> None:
        """Replace dequantized weights by the packed weights of a quantized checkpoint."""
        if call.packed is None:
            return
        from htp_export.capabilities.quantize.quantizing import quantize

        if self.model.dtype not in (None, "float32", "fp32"):
            raise InputError(
                f"--dtype {self.model.dtype}: packed weights are multiplied in float32; leave it out"
            )
        external = f"{target.name}.data" if self.graph.external_data else None
        quantize(target, output=target, weights=call.packed, external_data=external)

    def _program(self, call: SourceCall, target: Path) -> Any:
        """Export the model into the file; return the exporter's program."""
        from htp_export.exporter.exporting import export, tagging

        arguments = self.graph.for_torch(call)
        with tagging(strict=not self.graph.allow_untagged), self.graph.attention(call.model):
            if call.example is None:
                return export(
                    call.model, call.args, target, kwargs=call.kwargs or None, **arguments
                )
            with call.example.exporting():
                program: Any = export(call.model, kwargs=call.kwargs, **arguments)
            call.example.name_dimensions(program.model.graph)
            program.save(target, external_data=self.graph.external_data)
        return program

    def _facts(self, tagged: TaggedModel, call: SourceCall) -> dict[str, Any]:
        """Facts about the export: inputs, opset, exporter, and the seed of random weights and inputs."""
        from htp_export.runtime.inputs import Inputs

        facts: dict[str, Any] = {
            "inputs": {declared.name: str(declared) for declared in Inputs.of(tagged.model)},
            "opset": tagged.model.opset_imports.get(""),
            "exporter": "dynamo" if self.graph.dynamo else "TorchScript",
            "seed": self.model.seed if self.model.random else None,
        }
        if tagged.model.functions:
            facts["functions"] = [f"{domain}::{name}" for domain, name, _ in tagged.model.functions]
        if call.example is not None:
            facts["task"] = call.example.task
        return facts

    def _verified(self, name: str, call: SourceCall, file: Path) -> bool:
        """Compare a file with PyTorch, and record the result; return whether all modules agree."""
        from htp_export.capabilities.verify.verify_command import verified_runs

        with self.steps.step("verifying"):
            try:
                results = verified_runs(call, file)
            except InputError as error:  # The file is written: only its check failed.
                self._failures.append(str(error))
                return False
        by_run = {run: result.to_dict() for run, result in results.items()}
        self._records[name]["verify"] = by_run[""] if list(by_run) == [""] else by_run
        failures = []
        for run, result in results.items():
            if not result.ok:
                summary = f"{run}: {result.summary}" if run else result.summary
                failures.append("\n".join((summary, *result.misplaced)))
        self._failures += failures
        if failures:
            return False
        if self._shown:
            for run, result in results.items():
                when = f" in {run}" if run else ""
                score = f"{result.score}{result.worst_in_brackets}"
                show(f"every module agrees with PyTorch{when}: {score}")
        return True


def _never(_: Path) -> bool:
    """Replace no file beside the output."""
    return False


@contextlib.contextmanager
def _untagged_reasons() -> Iterator[list[str]]:
    """Collect the warnings about exports without tags, which contain the reason; other warnings are shown."""
    reasons: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", UntaggedExportWarning)
        shown = warnings.showwarning

        def show_or_keep(
            message: Warning | str, category: type[Warning], *where: Any, **more: Any
        ) -> None:
            if issubclass(category, UntaggedExportWarning):
                reasons.append(str(message))
            else:
                shown(message, category, *where, **more)

        warnings.showwarning = show_or_keep
        yield reasons


def _check_written(file: Path, opset: int | None) -> None:
    """Compare the opset of the file with the requested one."""
    if opset is None:
        return
    from htp_export.exporter.export_arguments import other_opset
    from htp_export.files.model_files import read_model

    other = other_opset(opset, read_model(file).opset_imports.get(""))
    if other is not None:
        raise CheckFailed(f"{other}; leave --opset away, or try --torchscript")


def _tree(call: SourceCall, tagged: TaggedModel) -> ModuleTree:
    """The module tree of the file, with the FLOPs of one run on the example inputs."""
    from htp_export.costs.costing import cost
    from htp_export.costs.result import tree_rows

    names = {str(value.name) for value in tagged.model.graph.inputs}
    inputs = {name: value for name, value in call.named_inputs.items() if name in names}
    try:
        return tree_rows(tagged, cost=cost(tagged, inputs))
    except InputError as error:  # The example inputs do not determine all sizes.
        return replace(tree_rows(tagged), notes=(f"no FLOPs: {error}",))


_MOST_NAMED = 6  # functions in a line; --json has all


def _facts_text(facts: dict[str, Any]) -> str:
    """Facts about an export, in one line."""
    inputs = ", ".join(_runs_of_inputs(facts["inputs"])) or "none"
    text = f"inputs: {inputs}; opset {facts['opset']}; {facts['exporter']} exporter"
    if "task" in facts:
        text += f"; task {facts['task']}"
    if facts["seed"] is not None:
        text += f"; seed {facts['seed']}"
    if "functions" in facts:
        names = facts["functions"]
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        text += f"; functions: {', '.join(names[:_MOST_NAMED])}{more}"
    return text


def _runs_of_inputs(inputs: Mapping[str, str]) -> list[str]:
    """Return inputs with their shapes; those whose names differ in numbers only, and of one shape, as one run.

    Examples:
        >>> shape = "float [1, 4, past, 8]"
        >>> _runs_of_inputs({"ids": "int64 [1, 1]", **{f"past.{n}.key": shape for n in range(12)}})
        ['ids int64 [1, 1]', 'past.0.key … past.11.key (12) float [1, 4, past, 8]']
    """
    runs: dict[tuple[str, str], list[str]] = {}
    for name, shape in inputs.items():
        pattern = re.sub(r"\d+", "0", name)
        runs.setdefault((pattern, shape), []).append(name)
    texts = []
    for (_, shape), names in runs.items():
        text = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"
        texts.append(f"{text} {shape}")
    return texts
