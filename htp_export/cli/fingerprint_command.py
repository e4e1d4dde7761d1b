"""``htp-export fingerprint``."""

from __future__ import annotations

from htp_export.cli.file_options import FileArgument, JsonOption
from htp_export.cli.outputs import report
from htp_export.cli.terminal import Steps

EXAMPLE = "bert.onnx"
PLACE = 180


def fingerprint_command(file: FileArgument, as_json: JsonOption = False) -> None:
    """Show what kind of network it is, and why.

    The blocks that it repeats, too.
    """
    from htp_export.fingerprints.families import fingerprint
    from htp_export.show.findings import render_fingerprint

    with Steps(quiet=as_json).step(f"looking into {file}"):
        result = fingerprint(file)
    report(result, as_json, lambda: render_fingerprint(result))
