"""``htp-export tree``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from htp_export.analyze.tree import tree_rows
from htp_export.cli.terminal import print_json, show
from htp_export.show.tree import render
from htp_export.tagged import load

__all__ = ["tree_command"]


def tree_command(
    file: Annotated[Path, typer.Argument(help="The ONNX file.", show_default=False)],
    depth: Annotated[int | None, typer.Option(min=0, help="Levels below the root.", show_default=False)] = None,
    select: Annotated[
        list[str] | None,
        typer.Option(help="Only these modules: encoder.layer.*, class:Linear, re:..., !excluded. May be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    fold: Annotated[bool, typer.Option("--fold/--no-fold", help="Draw alike siblings as one line.")] = True,
) -> None:
    """Show the module tree of a file: classes, nodes, parameters and fates."""
    tree = tree_rows(load(file), depth=depth, select=select or None)
    if as_json:
        print_json(tree.to_dict())
    else:
        show(render(tree, fold=fold))
