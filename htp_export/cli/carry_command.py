"""``htp-export carry`` and ``htp-export run``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from htp_export import tools
from htp_export.cli.sizes import Sizes, read_sizes
from htp_export.cli.terminal import CheckFailed, Steps, print_json
from htp_export.errors import HtpExportError, InputError
from htp_export.provenance.carrying import Carried, carry, embed_map
from htp_export.tagged import load

__all__ = ["carry_command", "run_command"]

Output = Annotated[Path, typer.Option("--output", "-o", help="The file to write.", show_default=False)]
WithMap = Annotated[
    bool, typer.Option("--embed-map", help="Write a map too, so that carry works when this file is gone: embed_map.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON.")]


def carry_command(
    before: Annotated[Path, typer.Argument(help="The tagged file that the tool was given.", show_default=False)],
    output: Output,
    after: Annotated[
        Path | None,
        typer.Argument(help="What the tool made of it.", show_default=False),
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(
            help="Run both files once, and find tensors by their values too: on the values in an .npz file, or on "
            'random ones of the shapes in a JSON file: {"input_ids": [2, 16]}.'
        ),
    ] = None,
    dims: Annotated[
        list[str] | None,
        typer.Option(help="The same on random inputs, with these for open sizes, by comma: batch=2,sequence=16."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Put module tags on what another tool made of a tagged file.

    Without the file before, give what the tool made of it alone; it must have had a map: --embed-map of export and run.
    """
    sizes = read_sizes(inputs, dims)
    with Steps().step("carrying tags"):
        result = carry(before, after, output, inputs=_values(before, sizes) if sizes.given else None)
    _show(result, output, as_json)


def _values(file: Path, sizes: Sizes) -> Mapping[str, Any]:
    """What both files are run on."""
    from htp_export.run.feeds import inputs_of, random_feed

    sizes.check_dims()
    return sizes.inputs or random_feed(inputs_of(load(file).model), sizes.dims, sizes.shapes).arrays


def run_command(
    tool: Annotated[str, typer.Argument(help="One of: " + ", ".join(tools.__all__) + ".", show_default=False)],
    file: Annotated[Path, typer.Argument(help="The tagged file.", show_default=False)],
    output: Output,
    options: Annotated[
        list[str] | None,
        typer.Option("--set", help="An option of the tool, name=value; the value as JSON or as text. May be repeated."),
    ] = None,
    with_map: WithMap = False,
    as_json: AsJson = False,
) -> None:
    """Run another tool on a tagged file, and keep its tags."""
    if tool not in tools.__all__:
        raise InputError(f"there is no tool {tool!r}; there are {', '.join(tools.__all__)}")
    settings = _settings(options or ())
    try:
        with Steps().step(tool):
            source = embed_map(file) if with_map else file
            result: Carried = getattr(tools, tool)(source, output, **settings)
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
        typer.echo(result)
