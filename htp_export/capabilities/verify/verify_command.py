"""``htp-export verify``."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard

import typer

from htp_export.command.as_python import Preparation, wanted_program
from htp_export.command.model_options import ModelOptions, SourceCall
from htp_export.command.model_programs import prepare_entry
from htp_export.command.options import FileArgument, JsonOption, SelectOption
from htp_export.command.run_options import DimsOption, parse_dims, read_shapes
from htp_export.command.streams import is_quiet
from htp_export.command.terminal import CheckFailed, Steps, print_json, show
from htp_export.errors import InputError
from htp_export.plans.plan_options import typed_pairs

if TYPE_CHECKING:
    from htp_export.capabilities.verify.results import Comparison, Verification
    from htp_export.model.tagged import TaggedModel


ToleranceOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SELECTOR=ABS,REL",
        help="Absolute and relative, for these modules. May be repeated.",
    ),
]
AllOption = Annotated[bool, typer.Option("--all", help="Show every module, also those that agree.")]


def report_runs(results: Mapping[str, Comparison], *, everything: bool, as_json: bool) -> None:
    """Show the results of several runs of a file by their names, or of one run without a name.

    Raises:
        CheckFailed: If a module differs in a run.
    """
    from htp_export.capabilities.verify.drawing import render

    several = len(results) > 1
    # The summary is on stdout, for a reader; the error does not repeat it.
    is_summary_shown = not as_json and not is_quiet()
    failures = []
    for run, result in results.items():
        if not result.ok:
            reason = _score(result) if is_summary_shown else result.summary
            failures.append(f"{run}: {reason}" if several else reason)
    if as_json:
        runs = {run: result.to_dict() for run, result in results.items()}
        print_json({"ok": not failures, "runs": runs} if several else runs[""])
    else:
        for run, result in results.items():
            if several:
                show(f"{run}:")
            show(render(result, everything=everything))
    if failures:
        raise CheckFailed("\n".join(failures))


def _score(result: Comparison) -> str:
    """Return how many modules agree, for a message after the drawing of a result."""
    return f"{result.score} compared modules agree"


def verified_runs(call: SourceCall, file: Path, **options: Any) -> dict[str, Verification]:
    """Verify every run of a call, such as prefill and decode: run → result; ``options`` are passed to `verify`."""
    from htp_export.capabilities.verify.verifying import verify

    with call.adapted():
        return {
            run: verify(call.model, file, call.args, kwargs, **options)
            for run, kwargs in call.runs.items()
        }


def parse_tolerances(settings: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Parse options ``SELECTOR=ABS,REL``; an `InputError` for other forms."""
    tolerances, form = {}, "SELECTOR=ABSOLUTE,RELATIVE"
    for selector, numbers in typed_pairs(settings, "--tolerance", form).items():
        try:
            absolute, relative = map(float, numbers.split(","))
        except ValueError as error:
            raise InputError(
                f"--tolerance {selector}={numbers}: write {form}, as in 'class:Linear=1e-3,1e-3'"
            ) from error
        tolerances[selector] = (absolute, relative)
    return tolerances


EXAMPLE = "bert.onnx bert --random-weights"
PLACE = ("Check and measure", 1)


def verify_command(
    file: FileArgument,
    options: ModelOptions,
    dims: DimsOption = None,
    isolated: Annotated[bool, "Run each module alone, on its inputs in PyTorch."] = False,
    outputs_from: Annotated[
        Path | None,
        "Tensors by name that another engine computed (.npz), in place of a run of ONNX Runtime.",
    ] = None,
    select: SelectOption = None,
    tolerance: ToleranceOption = None,
    everything: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check a file against PyTorch, module by module.

    Exit status 1 if a module differs.
    """
    from htp_export.model.tagged import load

    options.check()
    if options.entry is not None and dims:
        raise InputError(
            "--dims is for a SOURCE; with --entry, the factory decides what sizes the inputs have"
        )
    sizes, tolerances = parse_dims(dims or []), parse_tolerances(tolerance or ())
    steps = Steps(quiet=as_json, count=2)
    tagged = load(file)
    program = wanted_program()
    if program is not None and outputs_from is not None:
        raise InputError(
            "--as-python: the inputs are those in the file of --outputs-from; docs/verify.md has the Python"
        )
    with steps.step(f"loading {options.name}"):
        if program is not None:
            call = _prepared(program, tagged, options, sizes)
        else:
            call = _call(tagged, options, sizes)
    assumed: tuple[str, ...] = ()
    if program is None and outputs_from is not None:
        call = _call_of_dump(tagged, call, outputs_from)
    if program is None and call.example is None:
        assumed = _assumed(tagged, call, sizes)
    with steps.step("verifying"):
        results = verified_runs(
            call,
            file,
            isolated=isolated,
            outputs_from=outputs_from,
            select=select or None,
            tolerances=tolerances,
        )
    results = {run: replace(result, assumed=assumed) for run, result in results.items()}
    report_runs(results, everything=everything, as_json=as_json)


def _call(tagged: TaggedModel, options: ModelOptions, sizes: Mapping[str, int]) -> SourceCall:
    """The model, and the inputs of its task or of the shapes of the file."""
    call = _call_by_task(tagged, options, sizes)
    if call is not None:
        return call
    return options.call(shapes=_shapes(tagged, sizes, read_shapes(options.shapes)))


def _prepared(
    program: Preparation, tagged: TaggedModel, options: ModelOptions, sizes: Mapping[str, int]
) -> SourceCall:
    """Write the lines that create the model and its inputs; without a factory, the call has neither."""
    if options.entry is not None:
        return prepare_entry(program, options)
    if _is_of_task(tagged, options, sizes):
        raise InputError(
            "--as-python: a file of a task is verified in one call for each of its runs; docs/huggingface.md has them"
        )
    from htp_export.capabilities.huggingface.source_programs import prepare_source

    prepare_source(program, options, shapes=_shapes(tagged, sizes, read_shapes(options.shapes)))
    return SourceCall(None)  # type: ignore[arg-type] # it is not called


def _is_of_task(tagged: TaggedModel, options: ModelOptions, sizes: Mapping[str, int]) -> bool:
    """Whether the file has the inputs of a task: a cache, or names and axes of ``--task``."""
    from htp_export.capabilities.huggingface.tasks import split_task

    with_task = options.task is not None and not sizes
    is_cached = _cache_names(_input_names(tagged)) is not None
    return is_cached or with_task or split_task(options.task)[1]


def _input_names(tagged: TaggedModel) -> set[str]:
    return {str(value.name) for value in tagged.model.graph.inputs if not value.is_initializer()}


def _call_by_task(
    tagged: TaggedModel, options: ModelOptions, sizes: Mapping[str, int]
) -> SourceCall | None:
    """The call of the task that has the same inputs as the file; None without a task."""
    if not _is_of_task(tagged, options, sizes):
        return None
    names = _input_names(tagged)
    cache_names = _cache_names(names)
    is_cached = cache_names is not None
    cache_names = cache_names or "optimum"
    listed: dict[str, str] = {}  # file of the task → its inputs, for the error
    # The file may be one of the task's default files, or of the other division into files.
    for two_files in (None, False, True) if is_cached else (None,):
        calls = options.calls_by_task(two_files=two_files, cache_names=cache_names, sizes=sizes)
        for name, call in calls.items():
            if call.example is None:
                continue
            input_names = call.example.input_names
            if set(input_names) == names:
                return call
            listed[name] = f"{name} takes {', '.join(input_names)}"
    if listed and is_cached:
        raise InputError(
            f"the file has the inputs of none of the task's files: {'; '.join(listed.values())}"
        )
    return None


def _cache_names(inputs: Collection[str]) -> str | None:
    """The style of names of a file with a cache or encoder states among its inputs; None for other files."""
    # Optimum's names end with .key and .value.
    if any(name.endswith((".keys", ".values")) for name in inputs):
        return "transformers"
    if any(name.startswith("past_key_values.") for name in inputs):
        return "optimum"
    return "optimum" if "encoder_hidden_states" in inputs else None


def _call_of_dump(tagged: TaggedModel, call: SourceCall, dump: Path) -> SourceCall:
    """The call with the inputs of a dump; other inputs come from the most similar run, prefill or decode."""
    import torch

    from htp_export.capabilities.verify.checking import input_arguments
    from htp_export.files.npz_file import NpzArrays
    from htp_export.format.leaves import named_tensors_in

    arrays = NpzArrays(dump)
    inputs = {
        argument: arrays[name]
        for name, argument in input_arguments(tagged).items()
        if name in arrays
    }
    if not inputs:
        raise InputError(
            f"{dump}: has none of the file's inputs; write the inputs of the run into the dump, too"
        )

    def other_shapes(kwargs: dict[str, Any]) -> int:
        """The number of inputs of a run whose shape differs from the dump."""
        shapes = {name: tuple(leaf.shape) for name, leaf in named_tensors_in(kwargs)}
        return sum(array.shape != shapes.get(name) for name, array in inputs.items())

    kwargs = copy.deepcopy(min(call.runs.values(), key=other_shapes))
    for name, leaf in named_tensors_in(kwargs):
        if name in inputs:
            leaf.data = torch.from_numpy(inputs[name]).to(leaf.dtype)
    return replace(call, kwargs=kwargs, example=call.example and replace(call.example, runs={}))


def _shapes(
    tagged: TaggedModel, dims: Mapping[str, int], from_file: Mapping[str, Any]
) -> dict[str, list[int | None]]:
    """Argument of the model → shape of the file's input; None for a size that is open.

    ``dims`` is the value of ``--dims``; ``from_file``: argument → shape, as in the file of
    ``--shapes``.
    """
    from htp_export.capabilities.verify.checking import input_arguments
    from htp_export.runtime.inputs import Inputs

    arguments = input_arguments(tagged)
    whole: dict[str, list[int]] = {}
    for name, argument in arguments.items():
        shape = from_file.get(argument)
        if isinstance(shape, Mapping):
            shape = shape.get("shape")
        if _is_whole(shape):
            whole[name] = shape
    bound = Inputs.of(tagged.model).bind(dims=dims, shapes=whole)
    if bound.conflicts:
        raise InputError(bound.conflicts[0])
    shapes: dict[str, list[int | None]] = {}
    for name, bound_shape in bound.shapes.items():
        if bound_shape is not None and any(size is not None for size in bound_shape):
            shapes[arguments[name]] = list(bound_shape)
    return shapes


def _is_whole(shape: object) -> TypeGuard[list[int]]:
    """Whether a shape is a list of positive numbers, without open sizes."""
    return isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)


def _assumed(tagged: TaggedModel, call: SourceCall, dims: Mapping[str, int]) -> tuple[str, ...]:
    """Describe the open sizes that example inputs decide, without ``--dims``; refuse contradictions to ``dims``."""
    from htp_export.capabilities.verify.checking import input_arguments
    from htp_export.runtime.inputs import Inputs

    shapes = {}
    for name, argument in input_arguments(tagged).items():
        tensor = call.inputs.get(argument)
        if tensor is not None:
            shapes[name] = tuple(tensor.shape)
    bound = Inputs.of(tagged.model).bind(dims=dims, shapes=shapes)
    if dims:
        bound.check()
    return tuple(
        f"size {name!r} is {size}" for name, size in bound.sizes.items() if name not in dims
    )
