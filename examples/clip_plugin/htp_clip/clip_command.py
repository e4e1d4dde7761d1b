"""``htp-export clip``."""

from __future__ import annotations

from typing import Annotated

from htp_export.command.options import FileArgument, JsonOption, OutputOption
from htp_export.command.outputs import report
from htp_export.command.terminal import Steps

EXAMPLE = 'net.onnx "encoder.**" -o clipped.onnx'
PLACE = ("Cut", 9)


def clip_command(
    file: FileArgument,
    select: Annotated[str, "The modules."],
    output: OutputOption,
    low: Annotated[float, "The smallest value."] = -1.0,
    high: Annotated[float, "The largest value."] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Limit the outputs of modules to a range."""
    from htp_clip.clipping import clip

    with Steps(quiet=as_json).step(f"limiting outputs in {file}"):
        result = clip(file, select, output, low=low, high=high)
    report(result, as_json, output=output)
