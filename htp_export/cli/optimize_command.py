"""``htp-export optimize``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from htp_export.cli.terminal import Steps, print_json, show
from htp_export.passes.optimizing import optimize
from htp_export.passes.registry import Level, available, choose
from htp_export.show.optimized import render_optimized

__all__ = ["optimize_command"]


def optimize_command(
    file: Annotated[Path | None, typer.Argument(help="The ONNX file.", show_default=False)] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The file to write.", show_default=False)
    ] = None,
    passes: Annotated[str, typer.Option(help="'default', or names of passes with commas between them.")] = "default",
    level: Annotated[
        str, typer.Option(help="exact: the same results, bit for bit; tolerant: to 1e-5; fused: for ONNX Runtime only.")
    ] = "exact",
    verify: Annotated[
        bool, typer.Option("--verify", help="Run it before and after every pass; undo what is off.")
    ] = False,
    attribution: Annotated[bool, typer.Option("--attribution", help="A line for each module of each pass.")] = False,
    list_passes: Annotated[bool, typer.Option("--list", help="Show the passes there are, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Make a file's graph smaller, and keep its module tags true."""
    if list_passes:
        found = sorted(available().values(), key=lambda info: info.name)
        if as_json:
            print_json([{"name": info.name, "level": info.level, "summary": info.summary} for info in found])
        else:
            for info in found:
                typer.echo(f"{info.name:34} {info.level:9} {info.summary}")
        return
    if file is None or output is None:
        raise typer.BadParameter("give a file, and with -o the file to write")
    wanted = cast(Level, level)  # another word is refused, with those there are
    choose(passes, wanted)
    with Steps(quiet=as_json).step(f"optimising {file.name}"):
        result = optimize(file, output, passes=passes, level=wanted, verify=verify)
    if as_json:
        print_json(result.to_dict())
    else:
        show(render_optimized(result, attribution=attribution))
