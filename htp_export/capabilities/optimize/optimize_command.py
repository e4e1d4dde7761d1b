"""``htp-export optimize``."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from htp_export.command.options import JSON_HAS_ALL, Idle, JsonOption, ShareOption
from htp_export.command.outputs import Writes, check_output, show_next, show_written, written_files
from htp_export.command.run_options import RunOptions
from htp_export.command.terminal import Steps, print_json, print_text, show
from htp_export.files.folders import new_folder
from htp_export.files.targets import Kind, check_parent

if TYPE_CHECKING:
    from htp_export.capabilities.optimize.results import OptimizedModels

EXAMPLE = "bert.onnx -o small.onnx --level tolerant"
PLACE = ("Optimise", 1)
IDLE = (
    Idle(
        (
            "files",
            "output",
            "passes",
            "level",
            "verify",
            "keep_exact",
            "attribution",
            "depth",
            "share_weights",
        ),
        lambda given: given["list_passes"],
        "--list shows the passes, and ends",
    ),
    Idle(
        ("data", "dims", "shapes", "seed"), lambda given: not given["verify"], "it is for --verify"
    ),
    Idle(("attribution", "depth"), lambda given: given["as_json"], JSON_HAS_ALL),
    Idle(("depth",), lambda given: not given["attribution"], "it is for --attribution"),
)


def optimize_command(
    runs_on: RunOptions,
    files: Annotated[list[Path] | None, typer.Argument(help="The ONNX file, or several.")] = None,
    output: Annotated[
        Path | None, "The file to write; for several a folder that is there.", Writes(in_place=True)
    ] = None,
    passes: Annotated[str, "'default', or names of passes with commas between them."] = "default",
    level: Annotated[
        Literal["exact", "tolerant", "fused"],
        "exact: the same results, bit for bit; tolerant: to 1e-5; fused: for ONNX Runtime only.",
    ] = "exact",
    verify: Annotated[bool, "Run it before and after every pass; undo what is off."] = False,
    keep_exact: Annotated[
        bool, "No fusion across the boundary of a module whose tensors all stay."
    ] = False,
    attribution: Annotated[
        bool, "A line for each module of each pass, for several files too."
    ] = False,
    depth: Annotated[
        int | None,
        typer.Option(min=0, help="With --attribution: add what is deeper to the module above."),
    ] = None,
    list_passes: Annotated[
        bool, typer.Option("--list", help="Show the passes there are, and end.")
    ] = False,
    share_weights: ShareOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a graph smaller, and keep its module tags correct."""
    from htp_export.capabilities.optimize.drawing import render_optimized
    from htp_export.capabilities.optimize.optimizing import optimize
    from htp_export.capabilities.optimize.registry import choose
    from htp_export.capabilities.optimize.results import Optimized, OptimizedModels

    if list_passes:
        _list_passes(as_json)
        return
    if not files or output is None:
        raise typer.BadParameter("give a file, and with -o the file to write")
    choose(passes, level)  # raises for unknown passes before any work
    targets = _targets(files, output)
    steps = Steps(quiet=as_json, count=len(targets))
    results: dict[str, Optimized] = {}
    with new_folder(output) if len(targets) > 1 else nullcontext():
        for _, target in targets:
            check_output(target, Kind.MODEL)
        for file, target in targets:
            with steps.step(f"optimising {file.name}"):
                results[file.name] = optimize(
                    file,
                    target,
                    passes=passes,
                    level=level,
                    verify=verify,
                    keep_exact=keep_exact,
                    **runs_on.keywords,
                    share_weights=share_weights,
                )
    several = OptimizedModels(results) if len(results) > 1 else None
    if as_json:
        print_json((several or results[files[0].name]).to_dict())
        return
    if several is None:
        show(render_optimized(results[files[0].name], attribution=attribution, depth=depth))
    else:
        _show_several(several, attribution, depth)
    for _, target in targets:
        show_written(written_files(target))
    show_next("htp-export", "diff", *targets[0])


def _list_passes(as_json: bool) -> None:
    from htp_export.capabilities.optimize.registry import available

    passes = sorted(available().values(), key=lambda info: info.name)
    if not as_json:
        print_text("".join(f"{info.name:34} {info.level:9} {info.summary}\n" for info in passes))
        return
    rows = [{"name": info.name, "level": info.level, "summary": info.summary} for info in passes]
    print_json({"passes": rows})


def _show_several(several: OptimizedModels, attribution: bool, depth: int | None) -> None:
    """Show the table of several models, after the modules of each with ``attribution``."""
    from htp_export.capabilities.optimize.drawing import render_optimized
    from htp_export.reporting.module_table import flat_table

    if attribution:
        for name, result in several.models.items():
            print_text(f"{name}:\n")
            show(render_optimized(result, attribution=True, depth=depth))
    show(flat_table(*several.table()))


def _targets(files: list[Path], output: Path) -> list[tuple[Path, Path]]:
    """Each file with the file to write."""
    if len(files) == 1:
        return [(files[0], output)]
    if output.exists() and not output.is_dir():
        raise typer.BadParameter(f"{output} is a file; several files go into a folder")
    counts = Counter(file.name for file in files)
    repeated = sorted(name for name, count in counts.items() if count > 1)
    if repeated:
        raise typer.BadParameter(
            f"several files are called {repeated[0]}; in one folder they would be one"
        )
    if not output.exists():
        check_parent(output)
    return [(file, output / file.name) for file in files]
