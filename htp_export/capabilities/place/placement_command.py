"""``htp-export placement``."""

from __future__ import annotations

from htp_export.command.data_options import DataOptions
from htp_export.command.file_options import (
    FileArgument,
    ProviderOption,
    TableOptions,
    read_providers,
)
from htp_export.command.idle_options import JSON_HAS_ALL, Idle
from htp_export.command.terminal import Steps

EXAMPLE = "placed.onnx --provider cuda --provider cpu"
PLACE = 134
IDLE = (Idle(("depth", "select"), lambda given: given["as_json"], JSON_HAS_ALL),)


def placement_command(
    file: FileArgument,
    table: TableOptions,
    runs_on: DataOptions,
    provider: ProviderOption = None,
) -> None:
    """Show which execution provider runs each module."""
    from htp_export.capabilities.place.observing import placement
    from htp_export.model.tagged import load

    with Steps(quiet=table.as_json or table.as_csv).step(f"loading {file.name} into ONNX Runtime"):
        result = placement(file, providers=read_providers(provider), **runs_on.keywords)
    table.report_modules(result, load(file))
