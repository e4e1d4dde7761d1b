"""``htp-export export``."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from htp_export.cli.deploy_options import DeployOptions
from htp_export.cli.file_options import JsonOption
from htp_export.cli.model_options import ModelOptions
from htp_export.cli.outputs import check_folder, check_output, show_next, show_written, written_files
from htp_export.cli.sources import Call
from htp_export.cli.terminal import CheckFailed, Steps, print_json, show, warning_line
from htp_export.errors import HtpExportError, InputError, UntaggedExportWarning

if TYPE_CHECKING:
    from torch import nn

    from htp_export.costs.module_tree import ModuleTree
    from htp_export.model.tagged import TaggedModel

__all__ = ["export_command"]

EXAMPLE = "bert --random-weights -o bert.onnx --verify"
PLACE = 10
_ATTENTION_SINCE = 23


@dataclass(frozen=True)
class _Options:
    """How to export."""

    dynamo: bool
    opset: int | None
    dynamic: tuple[str, ...]
    external_data: bool
    functions: tuple[str, ...] = ()
    decompose_attention: bool = False
    keep_attention: bool = False

    def attention(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """How the attention of the model runs, for a ``with`` block."""
        if not self.decompose_attention:
            return contextlib.nullcontext()
        from htp_export.attention import decomposed_attention

        return decomposed_attention(model, keep_kernel=self.keep_attention)

    def for_torch(self, call: Call) -> dict[str, Any]:
        """The keyword arguments of ``torch.onnx.export``."""
        options: dict[str, Any] = {"dynamo": self.dynamo, "verbose": False, "external_data": self.external_data}
        if self.opset is not None:
            options["opset_version"] = self.opset
        if self.functions:
            options["export_modules_as_functions"] = self.functions
        if call.example is not None:
            return options | {name: value for name, value in call.example.options.items() if name != "kwargs"}
        if not self.dynamo and len(call.inputs) == len(call.kwargs) and call.kwargs:
            options["input_names"] = list(call.inputs)
        if self.dynamic:
            if call.args:
                raise InputError("--dynamic needs inputs that forward names; return them from --entry as a dict")
            from htp_export.huggingface import dynamic_shapes

            shapes = dynamic_shapes(call.inputs, self.dynamic)
            if self.dynamo:
                options["dynamic_shapes"] = {name: shapes.get(name) for name in call.kwargs}
            else:
                options["dynamic_axes"] = {name: axes for name, axes in shapes.items() if axes}
        return options


def export_command(
    output: Annotated[Path, typer.Option("-o", "--output", help="The ONNX file to write.", show_default=False)],
    model: ModelOptions,
    deploy: DeployOptions,
    dynamo: Annotated[bool, typer.Option("--dynamo/--torchscript", help="Which of torch's exporters.")] = True,
    opset: Annotated[int | None, typer.Option(min=1, help="ONNX opset; torch's own choice without it.")] = None,
    dynamic: Annotated[
        list[str] | None, typer.Option(help="Axes that may vary, by comma: batch, sequence, height, width.")
    ] = None,
    functions: Annotated[
        list[str] | None,
        typer.Option(help="Modules that become ONNX functions: class:BertLayer, encoder.layer.*; ** for all."),
    ] = None,
    two_files: Annotated[
        bool, typer.Option("--two-files", help="A decoder without, and a decoder with a cache among its inputs.")
    ] = False,
    cache_names: Annotated[
        str, typer.Option(help="Names of a cache's tensors: optimum's or transformers'.")
    ] = "optimum",
    decompose_attention: Annotated[
        bool, typer.Option("--decompose-attention", help="Attention as modules: q_proj, scores, softmax, context, ...")
    ] = False,
    keep_attention: Annotated[
        bool,
        typer.Option("--keep-attention", help="One Attention node for each scaled_dot_product_attention; opset 23."),
    ] = False,
    external_data: Annotated[bool, typer.Option(help="Weights in a file of their own, <output>.data.")] = True,
    stream_weights: Annotated[
        bool,
        typer.Option("--stream-weights", help="Copy weights from safetensors files without holding them in memory."),
    ] = False,
    with_map: Annotated[
        bool,
        typer.Option("--embed-map", help="Write a map too: then carry brings tags back when this file is gone."),
    ] = False,
    allow_untagged: Annotated[
        bool,
        typer.Option("--allow-untagged", help="Write torch's own file, with a warning, where tagging fails."),
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Check every module against PyTorch.")] = False,
    as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show nothing but errors.")] = False,
) -> None:
    """Export a model to ONNX with module tags, and show its tree."""
    model.check()
    _check_outputs(output, model)
    deploy.check(output, model)
    opset = _opset_with_attention(opset, dynamo) if keep_attention else opset
    if opset is not None:
        from htp_export.exporter.capture.opsets import check_opset

        check_opset(opset, dynamo=dynamo)
    if stream_weights and not dynamo:
        raise InputError("--stream-weights: the TorchScript exporter holds all weights in memory; leave --torchscript")
    axes = tuple(axis.strip() for text in dynamic or () for axis in text.split(",") if axis.strip())
    steps = Steps(quiet, count=2 + verify + (deploy.transformers_js is not None))
    with steps.step(f"loading {model.name}"):
        calls = _calls(model, dynamo, axes, two_files, cache_names, stream_weights)
    deploy.check_files(calls)
    options = _Options(dynamo, opset, axes, external_data, tuple(functions or ()), decompose_attention, keep_attention)
    check = _Check(model, deploy, steps, verify, as_json, quiet, strict=not allow_untagged, with_map=with_map)
    failures, records, targets = [], dict[str, dict[str, Any]](), _targets(calls, output)
    for name, target in targets.items():
        record, failure = _export_and_check(calls[name], target, options, check)
        records[name] = record
        failures += [failure] if failure else []
    if deploy.transformers_js is not None:
        with steps.step("writing the folder for transformers.js"):
            folder = deploy.write_folder(targets, model, next(iter(calls.values())))
        next(iter(records.values()))["files"] |= folder
        if not (quiet or as_json):
            show_written(folder)
    if as_json and not quiet:
        print_json(next(iter(records.values())) if len(records) == 1 else {"models": records})
    if failures:
        raise CheckFailed("\n".join(failures))


def _opset_with_attention(opset: int | None, dynamo: bool) -> int:
    """The opset for ``Attention`` nodes."""
    if not dynamo:
        raise InputError("--keep-attention: TorchScript has no operator for attention; leave --torchscript away")
    if opset is not None and opset < _ATTENTION_SINCE:
        raise InputError(f"--opset {opset}: --keep-attention needs {_ATTENTION_SINCE}, the first with Attention")
    return opset or _ATTENTION_SINCE


@dataclass(frozen=True)
class _Check:
    """How each file is exported, shown and checked."""

    model: ModelOptions
    deploy: DeployOptions
    steps: Steps
    verify: bool
    as_json: bool
    quiet: bool
    strict: bool
    with_map: bool


def _check_outputs(output: Path, model: ModelOptions) -> None:
    """Refuse an output that cannot be written: a file, or, for a task, a folder."""
    if output.is_dir() and model.has_task:
        check_folder(output, output)
    else:
        check_output(output)


def _calls(
    model: ModelOptions,
    dynamo: bool,
    axes: tuple[str, ...],
    two_files: bool,
    cache_names: str,
    stream_weights: bool,
) -> dict[str, Call]:
    """Name of each file → the call that it is exported from.

    With ``--dynamic`` and with TorchScript, a task chooses the class alone.
    """
    from htp_export.huggingface.tasks import split_task

    _, has_cache = split_task(model.task)
    if has_cache and not dynamo:
        raise InputError(f"--task {model.task}: TorchScript takes no cache; leave --torchscript away")
    if has_cache and axes:
        raise InputError(f"--task {model.task} says which axes vary; leave --dynamic away")
    calls = {}
    if dynamo and not axes:
        calls = model.calls_by_task(two_files=two_files, cache_names=cache_names, stream_weights=stream_weights)
    # With one example, exporters take the batch for a constant.
    return calls or {"model": model.call(batch=2 if "batch" in axes else 1, stream_weights=stream_weights)}


def _targets(calls: Mapping[str, Call], output: Path) -> dict[str, Path]:
    """Name → the file to write: the output, or files in a folder."""
    if output.is_dir():
        return {name: output / f"{name}.onnx" for name in calls}
    if len(calls) == 1:
        return dict.fromkeys(calls, output)
    if output.suffix == ".onnx":
        files = ", ".join(f"{name}.onnx" for name in calls)
        raise InputError(f"-o {output}: {len(calls)} files are written, {files}; name a folder")
    output.mkdir()
    return {name: output / f"{name}.onnx" for name in calls}


def _export_and_check(call: Call, output: Path, options: _Options, check: _Check) -> tuple[dict[str, Any], str]:
    """Write one file, show it, and check it: what JSON says of it, and what is wrong with it, or ``""``."""
    from htp_export.files.external_writers import readable
    from htp_export.model.inlining import read_flat
    from htp_export.model.tagged import load

    with readable(output) as file:
        with check.steps.step("exporting"):
            untagged = _export(call, file, options, check)
            if untagged is not None:
                warning_line(untagged)
            tagged = load(file)
            tree = _tree(call, read_flat(tagged))
        exporter = "dynamo" if options.dynamo else "TorchScript"
        facts = _facts(tagged, exporter, check.model.seed if check.model.random else None)
        if call.example is not None:
            facts["task"] = call.example.task
        if untagged is not None:
            facts["untagged"] = untagged
        return _report(call, file, output, tree, facts, check)


def _facts(tagged: TaggedModel, exporter: str, seed: int | None) -> dict[str, Any]:
    """What was exported, and how: inputs, opset, exporter, and the seed of what is random."""
    from htp_export.runtime.inputs import Inputs

    inputs = {each.name: str(each) for each in Inputs.of(tagged.model)}
    facts: dict[str, Any] = {
        "inputs": inputs,
        "opset": tagged.model.opset_imports.get(""),
        "exporter": exporter,
        "seed": seed,
    }
    if tagged.model.functions:
        facts["functions"] = [f"{domain}::{name}" for domain, name, _ in tagged.model.functions]
    return facts


def _export(call: Call, output: Path, options: _Options, check: _Check) -> str | None:
    """Write the file, and what lies beside it; why it has no tags, where it has none."""
    from htp_export.exporter.exporting import export, tagging
    from htp_export.files.external_writers import written_whole

    arguments = options.for_torch(call)
    with written_whole(output) as target, _said_untagged() as said:
        try:
            program: Any
            with tagging(strict=check.strict), options.attention(call.model):
                if call.example is None:
                    program = export(call.model, call.args, target, kwargs=call.kwargs or None, **arguments)
                else:
                    with call.example.exporting():
                        program = export(call.model, kwargs=call.kwargs, **arguments)
                    call.example.name_dimensions(program.model.graph)
                    program.save(target, external_data=options.external_data)
            if call.checkpoint is not None:
                call.checkpoint.check()
            _check_written(target, options.opset)
            if check.with_map and not said:
                from htp_export.provenance.carrying import embed_map

                embed_map(target, target)
            check.deploy.write_beside(check.model, call, target, program)
        except (HtpExportError, CheckFailed):
            raise
        except Exception as error:  # torch's exporters raise what the model, the tracer or a translation raises
            raise CheckFailed(_export_failed(error)) from error
        return said[0] if said else None


@contextlib.contextmanager
def _said_untagged() -> Iterator[list[str]]:
    """Why models are exported without tags, message by message; other warnings are shown as they would be."""
    found: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", UntaggedExportWarning)
        shown = warnings.showwarning

        def show_or_keep(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, UntaggedExportWarning):
                found.append(str(message))
            else:
                shown(message, category, *where, **more)

        warnings.showwarning = show_or_keep
        yield found


def _check_written(file: Path, opset: int | None) -> None:
    """Compare the opset of the file with the one that was asked for."""
    if opset is None:
        return
    from htp_export.exporter.capture.opsets import other_opset
    from htp_export.files.model_files import read_model

    other = other_opset(opset, read_model(file).opset_imports.get(""))
    if other is not None:
        raise CheckFailed(f"{other}; leave --opset away, or try --torchscript")


def _export_failed(error: Exception) -> str:
    """Torch's error in a few lines: its own first, then its cause, then what htp_export noted."""
    cause = error
    while cause.__cause__ is not None and isinstance(cause.__cause__, Exception):
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    message = " ".join(lines[:2])
    notes = [*getattr(error, "__notes__", ()), *(getattr(cause, "__notes__", ()) if cause is not error else ())]
    return "\n".join((f"the export failed: {type(cause).__name__}: {message}", *(f"  {note}" for note in notes)))


def _tree(call: Call, tagged: TaggedModel) -> ModuleTree:
    """The module tree of the file, with the FLOPs of one run on the example inputs."""
    from htp_export.costs.costing import cost
    from htp_export.costs.module_tree import tree_rows

    names = {str(value.name) for value in tagged.model.graph.inputs}
    given = {name: value for name, value in call.named_inputs.items() if name in names}
    try:
        return tree_rows(tagged, cost=cost(tagged, given))
    except InputError as error:  # sizes that the inputs do not tell by name
        return replace(tree_rows(tagged), notes=(f"no FLOPs: {error}",))


def _report(
    call: Call, file: Path, output: Path, tree: ModuleTree, facts: dict[str, Any], check: _Check
) -> tuple[dict[str, Any], str]:
    """Say what was written, and check it: what JSON says of it, and what is wrong with it, or ``""``."""
    shown = not (check.quiet or check.as_json)
    files = {**written_files(output), **check.deploy.beside(output)}
    if shown:
        from htp_export.show.tree import render

        show(render(tree))
        show_written(files)
        show(_facts_text(facts))
    record = {"file": str(output), "files": files, **facts, **tree.to_dict()}
    if check.verify:
        from htp_export.cli.comparisons import verified_runs

        with check.steps.step("verifying"):
            try:
                results = verified_runs(call, file)
            except InputError as error:  # the file is written; what fails is the check
                return record, str(error)
        by_run = {run: result.to_dict() for run, result in results.items()}
        record["verify"] = by_run[""] if list(by_run) == [""] else by_run
        wrong = [
            "\n".join((f"{run}: {result.summary}" if run else result.summary, *result.misplaced))
            for run, result in results.items()
            if not result.ok
        ]
        if wrong:
            return record, "\n".join(wrong)
        for run, result in results.items() if shown else ():
            when = f" in {run}" if run else ""
            show(f"every module agrees with PyTorch{when}: {result.score}{result.worst_in_brackets}")
    if shown:
        show_next("htp-export", "view", output)
    return record, ""


def _facts_text(facts: dict[str, Any]) -> str:
    """What was exported, and how, in a line."""
    inputs = ", ".join(f"{name} {said}" for name, said in facts["inputs"].items()) or "none"
    seed = "" if facts["seed"] is None else f"; seed {facts['seed']}"
    made = f"; functions: {', '.join(facts['functions'])}" if "functions" in facts else ""
    task = f"; task {facts['task']}" if "task" in facts else ""
    return f"inputs: {inputs}; opset {facts['opset']}; {facts['exporter']} exporter{task}{seed}{made}"
