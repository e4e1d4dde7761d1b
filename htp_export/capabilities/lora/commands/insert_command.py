"""``htp-export lora insert``."""

from __future__ import annotations

from typing import Annotated

import typer

from htp_export.command.options import FileArgument, JsonOption, OutputOption
from htp_export.command.outputs import report
from htp_export.command.terminal import Steps

EXAMPLE = 'bert.onnx "**.query,**.value" --rank 8 --alpha 16 -o lora.onnx'
PLACE = ("Compress", 5)


def insert_command(
    file: FileArgument,
    select: Annotated[str, "Modules: the linear layers in their regions."],
    output: OutputOption,
    rank: Annotated[
        int, typer.Option(min=1, help="Rank of the adapters, for the factor alpha / rank.")
    ] = 8,
    alpha: Annotated[float | None, "PEFT's lora_alpha; the rank without it."] = None,
    required: Annotated[bool, "Inputs without defaults, for runtimes in JavaScript."] = False,
    as_json: JsonOption = False,
) -> None:
    """Give layers inputs for LoRA adapters."""
    from htp_export.capabilities.lora.lora_inputs import insert

    with Steps(quiet=as_json).step(f"inserting LoRA layers into {file.name}"):
        result = insert(file, select, output, rank=rank, alpha=alpha, required=required)
    report(result, as_json, output=output)
