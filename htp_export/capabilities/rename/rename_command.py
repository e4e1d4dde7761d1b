"""``htp-export rename``."""

from __future__ import annotations

from typing import Annotated

from htp_export.command.options import FileArgument, JsonOption, OutputOption, ShareOption
from htp_export.command.outputs import report
from htp_export.command.terminal import Steps

EXAMPLE = "bert.onnx -o named.onnx"
PLACE = ("Deploy", 1)


def rename_command(
    file: FileArgument,
    output: OutputOption,
    style: Annotated[str, "The style of the names; only 'path' exists."] = "path",
    share_weights: ShareOption = False,
    as_json: JsonOption = False,
) -> None:
    """Name nodes and tensors after their modules.

    As in /encoder/layer.0/attention/MatMul; unique, and the same for the same model.
    """
    from htp_export.capabilities.rename.naming import rename

    with Steps(quiet=as_json).step(f"naming {file}"):
        result = rename(file, output, style=style, share_weights=share_weights)
    report(result, as_json, output=output)
