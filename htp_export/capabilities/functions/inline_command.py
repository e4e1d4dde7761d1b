"""``htp-export inline``."""

from __future__ import annotations

from htp_export.command.file_options import FileArgument, JsonOption, OutputOption, ShareOption
from htp_export.command.outputs import report
from htp_export.command.terminal import Steps

EXAMPLE = "nested.onnx -o flat.onnx"
PLACE = 120


def inline_command(
    file: FileArgument,
    output: OutputOption,
    share_weights: ShareOption = False,
    as_json: JsonOption = False,
) -> None:
    """Dissolve functions into a flat graph with its tags."""
    from htp_export.capabilities.functions.inlining import inline

    with Steps(quiet=as_json).step(f"inlining {file}"):
        inlined = inline(file, output, share_weights=share_weights)
    report(inlined, as_json, output=output)
