"""``htp-export optimize``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from htp_export.cli.file_options import InPlaceOption, JsonOption, ShareOption
from htp_export.cli.outputs import check_folder, check_output, show_next, show_written, written_files
from htp_export.cli.terminal import Steps, print_json, print_text, show

if TYPE_CHECKING:
    from htp_export.passes.registry import Level
    from htp_export.passes.results import Optimized

__all__ = ["optimize_command"]

EXAMPLE = "bert.onnx -o small.onnx --level tolerant"
PLACE = 140


def optimize_command(
    files: Annotated[list[Path] | None, typer.Argument(help="The ONNX file, or several.", show_default=False)] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="The file to write; for several a folder that is there.", show_default=False
        ),
    ] = None,
    passes: Annotated[str, typer.Option(help="'default', or names of passes with commas between them.")] = "default",
    level: Annotated[
        str, typer.Option(help="exact: the same results, bit for bit; tolerant: to 1e-5; fused: for ONNX Runtime only.")
    ] = "exact",
    verify: Annotated[
        bool, typer.Option("--verify", help="Run it before and after every pass; undo what is off.")
    ] = False,
    keep_exact: Annotated[
        bool, typer.Option("--keep-exact", help="No fusion across the border of a module whose tensors all stay.")
    ] = False,
    attribution: Annotated[
        bool, typer.Option("--attribution", help="A line for each module of each pass, for several files too.")
    ] = False,
    depth: Annotated[
        int | None, typer.Option(min=0, help="With --attribution: add what is deeper to the module above.")
    ] = None,
    list_passes: Annotated[bool, typer.Option("--list", help="Show the passes there are, and end.")] = False,
    share_weights: ShareOption = False,
    in_place: InPlaceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a graph smaller, and keep its module tags true."""
    from htp_export.passes.optimizing import optimize
    from htp_export.passes.registry import available, choose
    from htp_export.passes.results import OptimizedModels
    from htp_export.show.optimized import render_optimized, render_optimized_models

    if list_passes:
        found = sorted(available().values(), key=lambda info: info.name)
        if as_json:
            print_json(
                {"passes": [{"name": info.name, "level": info.level, "summary": info.summary} for info in found]}
            )
        else:
            for info in found:
                typer.echo(f"{info.name:34} {info.level:9} {info.summary}")
        return
    if not files or output is None:
        raise typer.BadParameter("give a file, and with -o the file to write")
    wanted = cast("Level", level)  # another word is refused, with those there are
    choose(passes, wanted)
    targets = _targets(files, output)
    for file, target in targets:
        check_output(target, [file], in_place=in_place)
    steps = Steps(quiet=as_json, count=len(targets))
    results: dict[str, Optimized] = {}
    for file, target in targets:
        with steps.step(f"optimising {file.name}"):
            results[file.name] = optimize(
                file,
                target,
                passes=passes,
                level=wanted,
                verify=verify,
                keep_exact=keep_exact,
                share_weights=share_weights,
            )
    if as_json:
        print_json(next(iter(results.values())).to_dict() if len(files) == 1 else OptimizedModels(results).to_dict())
        return
    for name, result in results.items():
        if len(files) > 1 and attribution:
            print_text(f"{name}:\n")
        if len(files) == 1 or attribution:
            show(render_optimized(result, attribution=attribution, depth=depth))
    if len(files) > 1:
        show(render_optimized_models(OptimizedModels(results)))
    for _, target in targets:
        show_written(written_files(target))
    show_next("htp-export", "diff", *targets[0])


def _targets(files: list[Path], output: Path) -> list[tuple[Path, Path]]:
    """Each file with the one to write."""
    if len(files) == 1:
        return [(files[0], output)]
    if output.exists() and not output.is_dir():
        raise typer.BadParameter(f"{output} is a file; several files go into a folder")
    names = [file.name for file in files]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise typer.BadParameter(f"several files are called {twice[0]}; in one folder they would be one")
    if not output.exists():
        check_folder(output.absolute().parent, output)
        output.mkdir()
    return [(file, output / file.name) for file in files]
