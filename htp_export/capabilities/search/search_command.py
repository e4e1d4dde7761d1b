"""``htp-export search``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from htp_export.command.options import (
    DepthOption,
    Idle,
    JsonOption,
    SelectOption,
    count_option,
    seed_option,
)
from htp_export.command.outputs import Writes, show_next, show_written, written_folder
from htp_export.command.run_options import RunOptions
from htp_export.command.terminal import Steps, notice_line, print_json, show, split_names
from htp_export.errors import InputError
from htp_export.plans.plan_options import MetricOption, read_metric


def _builds(given: Mapping[str, Any]) -> bool:
    return given["entry"] is not None


EXAMPLE = "bert.onnx --choices int8,int4,fp16 --data inputs.npz -o found/"
PLACE = ("Compress", 3)
IDLE = (
    Idle(("study", "grace"), lambda given: given["storage"] is None, "it is for --storage"),
    Idle(
        ("new_tokens",),
        lambda given: {"tokens", "time"}.isdisjoint(",".join(given["objective"] or ()).split(",")),
        "it is for --objective tokens and time",
    ),
    Idle(
        ("runs",),
        lambda given: not _builds(given) and "latency" not in ",".join(given["objective"] or ()),
        "it is for --objective latency",
    ),
    Idle(
        ("choices", "select", "depth", "dims", "shapes", "by", "repeats", "new_tokens"),
        _builds,
        "it is for the search on a file, and --entry builds modules",
    ),
    Idle(("dynamo",), lambda given: not _builds(given), "it is for --entry"),
)


_OBJECTIVES = "By comma, of error, size, bits, latency, metric, nonzeros; of a decoder tokens, time (error,size)."


@dataclass(frozen=True)
class SearchRunOptions(RunOptions):
    """The options of runs, with a seed that is for the sampler, too."""

    seed: Annotated[int, seed_option("Of the sampler, and of random inputs.")] = 0


def search_command(
    runs_on: SearchRunOptions,
    file: Annotated[Path | None, typer.Argument(help="The ONNX file; not with --entry.")] = None,
    space: Annotated[
        Path | None,
        typer.Argument(
            help="A .yaml or .json file: for each selector, the choices of its modules; with --entry, "
            "for each name."
        ),
    ] = None,
    entry: Annotated[
        str | None,
        "In place of a file, package.module:function that is called with choices, and returns an nn.Module, "
        "or it and example inputs.",
    ] = None,
    choices: Annotated[
        list[str] | None,
        "By comma: the choices of every module: precisions, values of prune, or both, as 2:4+int8 (auto,fp32).",
    ] = None,
    objective: Annotated[
        list[str] | None, typer.Option("--objective", "--objectives", help=_OBJECTIVES)
    ] = None,
    metric: MetricOption = None,
    select: SelectOption = None,
    depth: DepthOption = None,
    by: Annotated[
        Literal["module", "class"], "Decide each module, or all modules of a class together."
    ] = "module",
    trials: Annotated[int, count_option("Plans that are measured.")] = 50,
    sampler: Annotated[str, "tpe, nsga2, random or grid."] = "tpe",
    storage: Annotated[
        str | None, "sqlite:///study.db, postgresql://..., grpc://host:port, or a journal file."
    ] = None,
    study: Annotated[str, "Name of the study in the storage."] = "htp_export",
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds until a silent process is taken for dead.")
    ] = 60.0,
    runs: Annotated[int, count_option("Timed runs of each plan, for the objective latency.")] = 20,
    repeats: Annotated[
        int,
        count_option(
            "Measure the plans of the front so often again, for medians and a spread (0).", 0
        ),
    ] = 0,
    new_tokens: Annotated[int, count_option("Tokens after each prompt.")] = 64,
    dynamo: Annotated[
        bool, typer.Option("--dynamo/--no-dynamo", help="How modules of --entry are exported.")
    ] = True,
    output: Annotated[
        Path | None, "A folder for the plans of the front, and its picture.", Writes()
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Search for precisions, pruning or an architecture.

    The same command in several processes or on several machines, with one --storage, works on one
    study.
    """
    from htp_export.capabilities.search.drawing import render_search
    from htp_export.capabilities.search.front_files import check_plans, plan_file, write_plans
    from htp_export.capabilities.search.search_results import Search
    from htp_export.capabilities.search.searching import search
    from htp_export.plans.rules import read_plan
    from htp_export.process.user_code import named_function

    if entry is not None:
        file, space = None, space or file  # with --entry, the space is the only file
        if space is None:
            raise InputError("a function needs a file of its space: name → list of choices")
    elif file is None:
        raise InputError(
            "name an ONNX file, or a function that builds modules: --entry package.module:function"
        )
    names = split_names(choices) or ["auto", "fp32"]
    if space is not None and choices:
        raise typer.BadParameter("give a file of selector → choices of modules, or --choices")
    if output is not None:
        check_plans(output)
    inputs = runs_on.keywords
    model: Any = file if entry is None else named_function(entry)
    try:
        with Steps(quiet=as_json).step(
            f"searching {'plans for' if file else 'by'} {file or entry}"
        ):
            result = search(
                model,
                names if space is None else read_plan(space),
                objectives=split_names(objective) or None,
                **inputs,
                select=select or None,
                depth=depth,
                by=by,
                trials=trials,
                sampler=sampler,
                storage=storage,
                study=study,
                metric=read_metric(metric),
                runs=runs,
                repeats=repeats,
                new_tokens=new_tokens,
                grace=grace,
                dynamo=dynamo,
            )
    except KeyboardInterrupt as stopped:
        _show_stopped(stopped, output, inputs, storage, trials)
        raise
    if output is not None:
        write_plans(result, output, inputs)
    if as_json:
        print_json(result.to_dict())
        return
    show(render_search(result))
    if output is None:
        return
    show_written(written_folder(output))
    if file is None or not isinstance(result, Search):
        return
    for best in result.pareto[:1]:
        plan = output / plan_file(0, best)
        if best.prune:
            show_next("htp-export", "pipeline", plan, "-m", file, "-o", "smaller.onnx")
        else:
            show_next("htp-export", "quantize", file, plan, "-o", "quantized.onnx")


def _show_stopped(
    stopped: KeyboardInterrupt,
    output: Path | None,
    inputs: Mapping[str, Any],
    storage: str | None,
    trials: int,
) -> None:
    """Write the front so far, and print how to continue."""
    from htp_export.capabilities.search.front_files import write_plans
    from htp_export.capabilities.search.search_results import SearchInterrupted

    measured = stopped.result.trials if isinstance(stopped, SearchInterrupted) else ()
    written = ""
    if output is not None and isinstance(stopped, SearchInterrupted) and measured:
        write_plans(stopped.result, output, inputs)
        written = f"; their front is in {output}"
    notice_line(f"{len(measured)} of {trials} trials are measured{written}")
    if storage is None:
        notice_line(
            "nothing is kept to go on from; with --storage study.journal, the same command goes on"
        )
    else:
        notice_line(f"the same command goes on from there: all that was measured is in {storage}")
