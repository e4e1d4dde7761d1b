"""``htp-export lora fuse``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from htp_export.command.options import FileArgument, JsonOption, OutputOption
from htp_export.command.outputs import report
from htp_export.command.terminal import Steps

EXAMPLE = "bert.onnx tuned/ -o tuned.onnx"
PLACE = ("Compress", 7)


def fuse_command(
    file: FileArgument,
    adapter: Annotated[Path, "Folder of PEFT, or an adapter file of ONNX Runtime."],
    output: OutputOption,
    as_json: JsonOption = False,
) -> None:
    """Add a LoRA adapter to the weights of a model."""
    from htp_export.capabilities.lora import lora_files

    with Steps(quiet=as_json).step(f"fusing {adapter.name}"):
        result = lora_files.fuse(file, adapter, output)
    report(result, as_json, output=output)
