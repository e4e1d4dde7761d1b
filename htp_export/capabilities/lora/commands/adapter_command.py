"""``htp-export lora adapter``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from htp_export.command.options import FileArgument, JsonOption
from htp_export.command.outputs import Writes, report, show_written, written_page
from htp_export.command.terminal import Steps
from htp_export.files.targets import Kind

EXAMPLE = "lora.onnx tuned/ -o tuned.onnx_adapter"
PLACE = ("Compress", 6)


def adapter_command(
    file: FileArgument,
    adapter: Annotated[Path, "Folder of a PEFT adapter."],
    output: Annotated[Path, "The adapter file to write.", Writes(Kind.ADAPTER)],
    as_json: JsonOption = False,
) -> None:
    """Convert a PEFT adapter for ONNX Runtime."""
    from htp_export.capabilities.lora import lora_files

    with Steps(quiet=as_json).step(f"converting {adapter.name}"):
        result = lora_files.adapter(file, adapter, output)
    report(result, as_json)
    if not as_json:
        show_written(written_page(output))
