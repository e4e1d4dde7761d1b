"""Options that several commands on a file have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

__all__ = ["FeedDimsOption", "FeedOption", "SelectOption"]

SelectOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(help="Only these modules: encoder.layer.*, class:Linear, re:..., !excluded. May be repeated."),
]
FeedOption: TypeAlias = Annotated[
    Path | None, typer.Option(help='Values in an .npz file, or shapes in a JSON file: {"input_ids": [2, 16]}.')
]
FeedDimsOption: TypeAlias = Annotated[
    list[str] | None, typer.Option(help="Open sizes of random inputs, by comma: batch=1,sequence=16.")
]
