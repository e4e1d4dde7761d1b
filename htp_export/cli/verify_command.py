"""``htp-export verify`` and ``htp-export compare``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from htp_export.cli.sizes import read_sizes
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
    tolerances = parse_tolerances(tolerance or ())
    steps = Steps(quiet=as_json, count=2)
    tagged = load(file)
    with steps.step(f"loading {source or entry}"):
        call = options.call(shapes=_fixed_shapes(tagged))
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
    _report(result, everything=everything, as_json=as_json)


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
    sizes.check_dims()
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


def _fixed_shapes(tagged: TaggedModel) -> dict[str, list[int]]:
    """The shapes of inputs that a file was exported for, and for no other."""
    found = {}
    for value in tagged.model.graph.inputs:
        if value.shape is not None and all(isinstance(dim, int) for dim in value.shape):
            found[str(value.name)] = [int(dim) for dim in value.shape.numpy()]
    return found
