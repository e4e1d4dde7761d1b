"""``htp-export info``."""

from __future__ import annotations

from htp_export.command.options import FileArgument, JsonOption
from htp_export.command.outputs import report
from htp_export.command.terminal import Steps

EXAMPLE = "bert.onnx"
PLACE = ("Look", 1)


def info_command(file: FileArgument, as_json: JsonOption = False) -> None:
    """Describe a file, and suggest commands for it.

    The description has inputs and outputs, versions, sizes, tags, and the family of its
    architecture; weights are not loaded.
    """
    from htp_export.capabilities.info.describing import info

    with Steps(quiet=as_json).step(f"looking into {file}"):
        result = info(file)
    report(result, as_json)
