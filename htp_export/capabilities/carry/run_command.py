"""``htp-export run``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from htp_export.capabilities.carry import adapters as tools
from htp_export.command.model_options import parse_overrides
from htp_export.command.options import (
    FileArgument,
    JsonOption,
    MapOption,
    OutputOption,
    ShareOption,
)
from htp_export.command.outputs import report
from htp_export.command.streams import quiet_runtime
from htp_export.command.terminal import CheckFailed, Steps
from htp_export.errors import HtpExportError, InputError, unknown_name
from htp_export.process.argument_types import check_type, parameter_type

if TYPE_CHECKING:
    from htp_export.capabilities.carry.carrying import Carried

_SET_BY_COMMAND = ("model", "output", "share_weights")
"""Parameters of adapters that are no options of the tool."""

EXAMPLE = "onnxruntime bert.onnx -o ort.onnx --set level=extended"
PLACE = ("Optimise", 2)


def run_command(
    tool: Annotated[str, "One of: " + ", ".join(tools.__all__) + "."],
    file: FileArgument,
    output: OutputOption,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="An option of the tool, name=value; the value as JSON or as text. May be repeated.",
        ),
    ] = None,
    with_map: MapOption = False,
    share_weights: ShareOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run another tool on a tagged file, and keep its tags.

    The tags name the module of each node. Most tools drop them.
    """
    from htp_export.alignment.origin_map import embed_map
    from htp_export.capabilities.carry.adapting import share_unchanged
    from htp_export.files.model_files import write_model

    if tool not in tools.__all__:
        raise InputError(f"there is no tool {tool!r}; there are {', '.join(tools.__all__)}")
    settings = parse_overrides(options or ())
    _check_settings(tool, settings)
    try:
        with Steps(quiet=as_json).step(f"running {tool}"), quiet_runtime():
            source = embed_map(file) if with_map else file
            result: Carried = getattr(tools, tool)(
                source, None if share_weights else output, **settings
            )
            if share_weights:
                share_unchanged(result.model, file)
                write_model(result.model, output, share_weights=True)
    except InputError:
        raise
    except HtpExportError as error:
        raise CheckFailed(str(error)) from error
    report(result, as_json, output=output, file=str(output))


def _check_settings(tool: str, settings: Mapping[str, Any]) -> None:
    """Refuse unknown options of an adapter, and values of wrong types; a tool checks its own."""
    run = getattr(tools, tool)
    parameters = inspect.signature(run).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    known = [name for name in parameters if name not in _SET_BY_COMMAND]
    for name in settings:
        if name in _SET_BY_COMMAND or not (takes_all or name in known):
            raise InputError(f"--set {name}: {tool} has no option {unknown_name(name, known)}")
    try:
        for name, value in settings.items():
            check_type(name, value, parameter_type(run, name))
    except (TypeError, InputError) as error:
        raise InputError(f"{tool}: {error}") from error
