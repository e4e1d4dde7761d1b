"""``htp-export verify`` and ``htp-export compare``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard

import typer

from htp_export.cli.file_options import FeedDimsOption, FeedOption, FileArgument, JsonOption, SelectOption
from htp_export.cli.model_options import (
    AttentionOption,
    DtypeOption,
    EntryOption,
    InputsOption,
    ModelOptions,
    RandomWeightsOption,
    RevisionOption,
    SeedOption,
    SettingsOption,
    SourceArgument,
    TaskOption,
    TrustOption,
)
from htp_export.cli.sizes import parse_dims, read_sizes
from htp_export.cli.sources import Call, read_shapes
from htp_export.cli.terminal import CheckFailed, Steps, print_json, show
from htp_export.errors import InputError

if TYPE_CHECKING:
    from htp_export.model.tagged import TaggedModel

__all__ = ["compare_command", "verify_command"]

_ToleranceOption = Annotated[
    list[str] | None,
    typer.Option(metavar="SELECTOR=ABS,REL", help="Absolute and relative, for these modules. May be repeated."),
]
_AllOption = Annotated[bool, typer.Option("--all", help="Show every module, not only what differs.")]


def verify_command(
    file: FileArgument,
    source: SourceArgument = None,
    entry: EntryOption = None,
    task: TaskOption = None,
    random_weights: RandomWeightsOption = False,
    seed: SeedOption = 0,
    settings: SettingsOption = None,
    dtype: DtypeOption = None,
    inputs: InputsOption = None,
    dims: FeedDimsOption = None,
    attention: AttentionOption = None,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    isolated: Annotated[
        bool, typer.Option("--isolated", help="Run each module alone, on what PyTorch gives it.")
    ] = False,
    select: SelectOption = None,
    tolerance: _ToleranceOption = None,
    everything: _AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check a file against PyTorch, module by module.

    Exit status 1 where a module differs.
    """
    from htp_export.model.tagged import load
    from htp_export.run.verifying import verify

    options = ModelOptions(
        source, entry, task, random_weights, seed, settings, dtype, inputs, attention, revision, trust_remote_code
    )
    options.check()
    if entry is not None and dims:
        raise InputError("--dims is for a SOURCE; with --entry, the factory decides what sizes the inputs have")
    sizes, tolerances = parse_dims(dims or []), parse_tolerances(tolerance or ())
    steps = Steps(quiet=as_json, count=2)
    tagged = load(file)
    shapes = _shapes(tagged, sizes, read_shapes(inputs))
    with steps.step(f"loading {source or entry}"):
        call = options.call(shapes=shapes)
    assumed = _assumed(tagged, call, sizes)
    with steps.step("verifying"):
        result = verify(
            call.model,
            file,
            call.args,
            call.kwargs,
            isolated=isolated,
            select=select or None,
            tolerances=tolerances,
        )
    _report(replace(result, assumed=assumed), everything=everything, as_json=as_json)


def compare_command(
    file: Annotated[Path, typer.Argument(help="The ONNX file that is right.", show_default=False)],
    other: Annotated[Path, typer.Argument(help="The one that is compared with it.", show_default=False)],
    inputs: FeedOption = None,
    dims: FeedDimsOption = None,
    seed: Annotated[int, typer.Option(help="Of random inputs.")] = 0,
    select: SelectOption = None,
    tolerance: _ToleranceOption = None,
    everything: _AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare two files of one model, module by module.

    Exit status 1 where a module differs.
    """
    from htp_export.run.file_comparing import compare

    sizes, tolerances = read_sizes(inputs, dims), parse_tolerances(tolerance or ())
    with Steps(quiet=as_json).step("comparing"):
        result = compare(
            file,
            other,
            sizes.inputs or None,
            dims=sizes.dims,
            shapes=sizes.shapes,
            seed=seed,
            select=select or None,
            tolerances=tolerances,
        )
    _report(result, everything=everything, as_json=as_json)


def _report(result: Any, *, everything: bool, as_json: bool) -> None:
    from htp_export.show.comparison import render

    if as_json:
        print_json(result.to_dict())
    else:
        show(render(result, everything=everything))
    if not result.ok:
        raise CheckFailed(result.summary)


def parse_tolerances(settings: Sequence[str]) -> dict[str, tuple[float, float]]:
    """``SELECTOR=ABS,REL`` as typed.

    Raises:
        InputError: If one is not of that form.

    Examples:
        >>> parse_tolerances(["class:LayerNorm=1e-3,1e-2"])
        {'class:LayerNorm': (0.001, 0.01)}
    """
    found = {}
    for setting in settings:
        selector, equals, numbers = setting.rpartition("=")
        try:
            absolute, relative = map(float, numbers.split(","))
        except ValueError:
            equals = ""
        if not equals:
            raise InputError(f"--tolerance {setting}: write SELECTOR=ABSOLUTE,RELATIVE, as in 'class:Linear=1e-3,1e-3'")
        found[selector] = (absolute, relative)
    return found


def _shapes(tagged: TaggedModel, dims: Mapping[str, int], given: Mapping[str, Any]) -> dict[str, list[int | None]]:
    """Argument of the model → the shape that a file wants of it; None in place of a size that stays open.

    Args:
        tagged: The file.
        dims: What ``--dims`` says.
        given: What the file of ``--inputs`` says: argument → shape.

    Raises:
        InputError: If the file leaves no such size open, or sizes contradict each other.
    """
    from htp_export.run.pairing import input_arguments
    from htp_export.runtime.inputs import Inputs

    arguments = input_arguments(tagged)
    plain = {name: shape.get("shape") if isinstance(shape, Mapping) else shape for name, shape in given.items()}
    whole = {name: shape for name, argument in arguments.items() if _is_whole(shape := plain.get(argument))}
    bound = Inputs.of(tagged.model).bind(dims=dims, shapes=whole)
    if bound.conflicts:
        raise InputError(bound.conflicts[0])
    shapes = {arguments[name]: list(shape) for name, shape in bound.shapes.items() if shape is not None}
    return {argument: shape for argument, shape in shapes.items() if any(size is not None for size in shape)}


def _is_whole(shape: object) -> TypeGuard[list[int]]:
    return isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)


def _assumed(tagged: TaggedModel, call: Call, dims: Mapping[str, int]) -> tuple[str, ...]:
    """The sizes that were not given, and that the example inputs have.

    Raises:
        InputError: If these have other sizes than those that were given.
    """
    from htp_export.run.pairing import input_arguments
    from htp_export.runtime.inputs import Inputs

    given = {name: call.inputs.get(argument) for name, argument in input_arguments(tagged).items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in given.items() if tensor is not None}
    bound = Inputs.of(tagged.model).bind(dims=dims, shapes=shapes)
    if dims:
        bound.check()
    return tuple(f"size {name!r} is {size}" for name, size in bound.sizes.items() if name not in dims)
