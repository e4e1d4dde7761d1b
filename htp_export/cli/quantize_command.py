"""``htp-export quantize``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from htp_export.cli.file_options import FeedDimsOption, FileArgument, InPlaceOption, ShareOption, TableOptions
from htp_export.cli.outputs import check_output, show_next, show_written, written_files
from htp_export.cli.sizes import parse_dims
from htp_export.cli.sources import call_factory
from htp_export.cli.terminal import Steps
from htp_export.errors import InputError

EXAMPLE = "bert.onnx plan.yaml -o mixed.onnx --data inputs.npz"
PLACE = 142


def quantize_command(
    file: FileArgument,
    table: TableOptions,
    plan: Annotated[
        str | None, typer.Argument(help="A plan, .yaml or .json, or a preset: int8, w4, fp16.", show_default=False)
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(metavar="SELECTOR=PRECISION", help="A rule after those of the plan; may be repeated."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The ONNX file to write.", show_default=False)
    ] = None,
    data: Annotated[
        list[Path] | None, typer.Option(help="Inputs of a run as .npz, for int8, uint8 and int16; may be repeated.")
    ] = None,
    entry: Annotated[
        str | None, typer.Option(help="package.module:factory that returns the runs: dicts of input name and array.")
    ] = None,
    dims: FeedDimsOption = None,
    seed: Annotated[int, typer.Option(help="Of random inputs.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and the predicted bytes; run nothing.")] = (
        False
    ),
    share_weights: ShareOption = False,
    in_place: InPlaceOption = False,
) -> None:
    """Give modules other precisions: int8, int4, fp16.

    Exactly the modules of the plan change. Without --data or --entry, ranges of activations are those of random inputs.
    """
    from htp_export.compress.quantizing import quantize
    from htp_export.costs.module_tree import visible
    from htp_export.model.tagged import load
    from htp_export.show.compression import compression_csv, render_quantized

    if output is None and not dry_run:
        raise typer.BadParameter("give the file to write with -o, or --dry-run")
    rules = _rules(plan, rule or [])
    if output is not None:
        check_output(output, [file, *(data or [])], in_place=in_place)
    if data and entry:
        raise InputError("data come from --data or from --entry, not from both")
    with Steps(quiet=table.as_json or table.as_csv).step(f"quantizing {file.name}"):
        tagged = load(file)
        result = quantize(
            tagged,
            rules,
            None if dry_run else output,
            data=_data(data, entry, seed) if not dry_run else None,
            dims=parse_dims(dims or []),
            seed=seed,
            dry_run=dry_run,
            share_weights=share_weights,
        )
    rows = [
        result.modules[path] for path in visible(tagged, table.depth, table.select or None) if path in result.modules
    ]
    written = {} if dry_run or output is None else {"file": str(output)}
    table.report(
        {**written, **result.to_dict()},
        lambda: compression_csv(rows, table.sort),
        lambda: render_quantized(result, rows, fold=table.fold, sort=table.sort),
    )
    if output is not None and not dry_run and not table.as_json and not table.as_csv:
        show_written(written_files(output))
        show_next("htp-export", "compare", file, output)


def _rules(plan: str | None, typed: list[str]) -> dict[str, Any]:
    """The rules of the plan, then those that were typed."""
    from htp_export.compress.plans import read_plan, rules_of
    from htp_export.compress.precisions import PRESETS

    rules: dict[str, Any] = {}
    if plan is not None:
        rules.update(PRESETS[plan] if plan in PRESETS else read_plan(plan))
    for selector, precision in rules_of(typed).items():
        rules.pop(selector, None)  # it holds at its new place
        rules[selector] = precision
    if not rules:
        raise typer.BadParameter(f"give a plan, a preset ({', '.join(PRESETS)}), or --rule SELECTOR=PRECISION")
    return rules


def _data(files: list[Path] | None, entry: str | None, seed: int) -> Any:
    """The runs: one of each file, read when it is its turn, or what the factory returns."""
    if entry is not None:
        return call_factory(entry, seed)
    return None if not files else NpzRuns(tuple(files))


class NpzRuns:
    """Runs in files, each read when it is its turn.

    Args:
        files: The files.
    """

    def __init__(self, files: tuple[Path, ...]) -> None:
        self._files = files

    def __iter__(self) -> Any:
        from htp_export.files.npz_file import read_npz

        return (read_npz(file) for file in self._files)
