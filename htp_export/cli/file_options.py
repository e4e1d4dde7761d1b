"""Arguments and options that several commands on a file have, in the same words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

__all__ = [
    "DepthOption",
    "FeedDimsOption",
    "FeedOption",
    "FileArgument",
    "InPlaceOption",
    "JsonOption",
    "ModuleArgument",
    "OutputOption",
    "SelectOption",
    "ShareOption",
]

FileArgument: TypeAlias = Annotated[Path, typer.Argument(help="The ONNX file.", show_default=False)]
OutputOption: TypeAlias = Annotated[
    Path, typer.Option("--output", "-o", help="The ONNX file to write.", show_default=False)
]
InPlaceOption: TypeAlias = Annotated[bool, typer.Option("--in-place", help="Allow --output to be a file that is read.")]
ShareOption: TypeAlias = Annotated[
    bool, typer.Option("--share-weights", help="Refer to the data file of the input instead of writing a copy of it.")
]
ModuleArgument: TypeAlias = Annotated[
    str, typer.Argument(help="Path of the module: encoder.layer.0", show_default=False)
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Write the result as JSON.")]
SelectOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(help="Only these modules: encoder.layer.*, class:Linear, re:..., !excluded. May be repeated."),
]
DepthOption: TypeAlias = Annotated[int | None, typer.Option(min=0, help="Levels below the root.", show_default=False)]
FeedOption: TypeAlias = Annotated[
    Path | None, typer.Option(help='Inputs: values in an .npz file, or shapes in JSON: {"input_ids": [2, 16]}.')
]
FeedDimsOption: TypeAlias = Annotated[
    list[str] | None, typer.Option(help="Open sizes of inputs, by comma: batch=1,sequence=16.")
]
