"""``htp-export carry`` and ``htp-export run``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from htp_export.cli.file_options import (
    FeedDimsOption,
    FeedOption,
    FileArgument,
    InPlaceOption,
    JsonOption,
    OutputOption,
    ShareOption,
)
from htp_export.cli.outputs import check_output, show_model
from htp_export.cli.quiet import quiet_runtime
from htp_export.cli.sizes import Sizes, read_sizes
from htp_export.cli.terminal import CheckFailed, Steps, print_json, show
from htp_export.errors import HtpExportError, InputError
from htp_export.provenance import adapters as tools

if TYPE_CHECKING:
    from htp_export.provenance.carrying import Carried

__all__ = ["carry_command", "run_command"]

WithMap = Annotated[
    bool, typer.Option("--embed-map", help="Write a map too, so that carry works when this file is gone: embed_map.")
]


def carry_command(
    before: Annotated[Path, typer.Argument(help="The tagged file that the tool was given.", show_default=False)],
    output: OutputOption,
    after: Annotated[
        Path | None,
        typer.Argument(help="What the tool made of it.", show_default=False),
    ] = None,
    inputs: FeedOption = None,
    dims: FeedDimsOption = None,
    share_weights: ShareOption = False,
    in_place: InPlaceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Put tags on what another tool made of a tagged file.

    With --inputs or --dims, both files are run once, and tensors are found by their values too.
    A single file is enough where its map was embedded: --embed-map of export and run.
    """
    from htp_export.provenance.carrying import carry

    check_output(output, [before, *([] if after is None else [after])], in_place=in_place)
    sizes = read_sizes(inputs, dims)
    with Steps(quiet=as_json).step("carrying tags"):
        inputs_of_both = _values(before, sizes) if sizes.given else None
        result = carry(before, after, output, inputs=inputs_of_both, share_weights=share_weights)
    _show(result, output, as_json)


def _values(file: Path, sizes: Sizes) -> Mapping[str, Any]:
    """What both files are run on."""
    from htp_export.model.tagged import load
    from htp_export.runtime.inputs import Inputs

    wanted = Inputs.of(load(file).model)
    feed = wanted.feed(sizes.inputs, sizes.dims) if sizes.inputs else wanted.random(sizes.dims, sizes.shapes)
    return feed.arrays


def run_command(
    tool: Annotated[str, typer.Argument(help="One of: " + ", ".join(tools.__all__) + ".", show_default=False)],
    file: FileArgument,
    output: OutputOption,
    options: Annotated[
        list[str] | None,
        typer.Option("--set", help="An option of the tool, name=value; the value as JSON or as text. May be repeated."),
    ] = None,
    with_map: WithMap = False,
    share_weights: ShareOption = False,
    in_place: InPlaceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run another tool on a tagged file, and keep its tags."""
    from htp_export.files.model_files import write_model
    from htp_export.provenance.adapters.adapting import share_unchanged
    from htp_export.provenance.carrying import embed_map

    if tool not in tools.__all__:
        raise InputError(f"there is no tool {tool!r}; there are {', '.join(tools.__all__)}")
    check_output(output, [file], in_place=in_place)
    settings = _settings(options or ())
    try:
        with Steps(quiet=as_json).step(f"running {tool}"), quiet_runtime():
            source = embed_map(file) if with_map else file
            result: Carried = getattr(tools, tool)(source, None if share_weights else output, **settings)
            if share_weights:
                share_unchanged(result.model, file)
                write_model(result.model, output, share_weights=True)
    except TypeError as error:
        raise InputError(f"{tool}: {error}") from error
    except InputError:
        raise
    except HtpExportError as error:
        raise CheckFailed(str(error)) from error
    _show(result, output, as_json)


def _settings(options: Sequence[str]) -> dict[str, Any]:
    settings = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"--set {option!r}: write name=value")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings


def _show(result: Carried, output: Path, as_json: bool) -> None:
    if as_json:
        print_json({"file": str(output), **result.to_dict()})
    else:
        show(str(result))
        show_model(output)
