"""``htp-export fingerprint``."""

from __future__ import annotations

from htp_export.command.options import FileArgument, JsonOption
from htp_export.command.outputs import report
from htp_export.command.terminal import Steps

EXAMPLE = "bert.onnx"
PLACE = ("Look", 7)


def fingerprint_command(file: FileArgument, as_json: JsonOption = False) -> None:
    """Show the kind of network, evidence for it, and its blocks."""
    from htp_export.capabilities.fingerprint.families import fingerprint

    with Steps(quiet=as_json).step(f"looking into {file}"):
        result = fingerprint(file)
    report(result, as_json)
