"""``htp-export run``."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from htp_export.capabilities.carry import adapters as tools
from htp_export.command.file_options import FileArgument, JsonOption, OutputOption, ShareOption
from htp_export.command.outputs import report
from htp_export.command.quiet import quiet_runtime
from htp_export.command.terminal import CheckFailed, Steps
from htp_export.errors import HtpExportError, InputError
from htp_export.process.argument_types import check_type, parameter_type

if TYPE_CHECKING:
    from htp_export.capabilities.carry.carrying import Carried

EXAMPLE = "onnxruntime bert.onnx -o ort.onnx --set level=extended"
PLACE = 150


def run_command(
    tool: Annotated[str, typer.Argument(help="One of: " + ", ".join(tools.__all__) + ".", show_default=False)],
    file: FileArgument,
    output: OutputOption,
    options: Annotated[
        list[str] | None,
        typer.Option("--set", help="An option of the tool, name=value; the value as JSON or as text. May be repeated."),
    ] = None,
    with_map: Annotated[
        bool,
        typer.Option("--embed-map", help="Write a map too: then carry brings tags back when this file is gone."),
    ] = False,
    share_weights: ShareOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run another tool on a tagged file, and keep its tags."""
    from htp_export.capabilities.carry.adapting import share_unchanged
    from htp_export.capabilities.carry.carrying import embed_map
    from htp_export.files.model_files import write_model

    if tool not in tools.__all__:
        raise InputError(f"there is no tool {tool!r}; there are {', '.join(tools.__all__)}")
    settings = _settings(options or ())
    _check_settings(tool, settings)
    try:
        with Steps(quiet=as_json).step(f"running {tool}"), quiet_runtime():
            source = embed_map(file) if with_map else file
            result: Carried = getattr(tools, tool)(source, None if share_weights else output, **settings)
            if share_weights:
                share_unchanged(result.model, file)
                write_model(result.model, output, share_weights=True)
    except InputError:
        raise
    except HtpExportError as error:
        raise CheckFailed(str(error)) from error
    report(result, as_json, output=output, file=str(output))


def _check_settings(tool: str, settings: Mapping[str, Any]) -> None:
    """Refuse options that an adapter does not have, and values of other types; a tool checks its own options itself."""
    run = getattr(tools, tool)
    try:
        inspect.signature(run).bind(None, **settings)
    except TypeError as error:
        raise InputError(f"{tool}: {error}") from error
    for name, value in settings.items():
        try:
            check_type(name, value, parameter_type(run, name))
        except InputError as error:
            raise InputError(f"{tool}: {error}") from error


def _settings(options: Sequence[str]) -> dict[str, Any]:
    settings = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"--set {option!r}: write name=value")
        if name in settings:
            raise InputError(f"--set {option}: {name} is set twice")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings
