"""``htp-export profile``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

from htp_export.command.options import (
    JSON_HAS_ALL,
    DepthOption,
    FileArgument,
    Idle,
    JsonOption,
    count_option,
)
from htp_export.command.outputs import report
from htp_export.command.run_options import InputOptions, ProviderOption, read_providers
from htp_export.command.streams import quiet_runtime
from htp_export.command.terminal import CheckFailed, Steps
from htp_export.discovery import plug_in
from htp_export.errors import InputError
from htp_export.extras import required
from htp_export.plans.plan_options import typed_pairs
from htp_export.process.argument_types import check_whole, most_threads

EXAMPLE = "bert.onnx --runs 50"
PLACE = ("Check and measure", 3)
IDLE = (
    Idle(("sort", "depth", "fold"), lambda given: given["as_json"], JSON_HAS_ALL),
    Idle(
        ("runs", "warmup", "memory", "timing", "optimization"),
        lambda given: given["measured"],
        "--measured runs nothing",
    ),
)

_OWN_ENGINE = "onnxruntime"
_Level: TypeAlias = Literal["disable", "basic", "extended", "all"]


def profile_command(
    file: FileArgument,
    runs_on: InputOptions,
    runs: Annotated[int, count_option("Measured runs, each with the profiler and without.")] = 20,
    warmup: Annotated[int, count_option("Runs before those.", 0)] = 3,
    provider: ProviderOption = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads within an operator.")] = None,
    optimization: Annotated[_Level, "Optimizations of ONNX Runtime at load time."] = "all",
    memory: Annotated[bool, "Measure memory too, beside the estimate of cost."] = False,
    timing: Annotated[
        Literal["auto", "kernels", "modules"],
        "Kind of times on a device that queues kernels; modules: each one alone.",
    ] = "auto",
    engine: Annotated[
        str, "The engine that runs the model; also one of another package."
    ] = _OWN_ENGINE,
    measured: Annotated[
        list[Path] | None,
        typer.Option(
            help="Run nothing; read a trace of ONNX Runtime's profiler, or files of trtexec. May be repeated."
        ),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SELECTOR=LIMIT",
            help="The most that each of these modules may take: 5ms, or 20%. May be repeated.",
        ),
    ] = None,
    sort: Annotated[Literal["tree", "total", "self"], "Order of the lines."] = "tree",
    depth: DepthOption = None,
    fold: Annotated[
        bool, typer.Option("--fold/--no-fold", help="Draw alike siblings as one line.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Measure the latency of every module.

    The engine is ONNX Runtime or one of another package. Exit status 1 if a module exceeds its
    budget.
    """
    from htp_export.capabilities.profile.drawing import render_profile
    from htp_export.capabilities.profile.latency import profile
    from htp_export.capabilities.profile.latency_results import budgets_by_module
    from htp_export.model.tagged import load

    if threads is not None:
        check_whole(f"--threads, on {os.cpu_count()} cores:", threads, 1, most_threads())
    budgets = typed_pairs(budget or (), "--budget", "SELECTOR=LIMIT")
    if budgets:  # invalid ones are refused before the measurement
        budgets_by_module(budgets, load(file).classes)
    # ONNX Runtime warns of options that are set again.
    with Steps(quiet=as_json).step(f"profiling {file}"), quiet_runtime():
        result = profile(
            file,
            **runs_on.keywords,
            runs=runs,
            warmup=warmup,
            **_options(engine, provider, threads, optimization),
            engine=engine,
            measured=measured or None,
            memory=memory,
            timing=timing,
        )
    over = result.over(budgets)
    facts: dict[str, Any] = {"over_budget": over} if budgets else {}
    report(
        result, as_json, lambda: render_profile(result, sort=sort, depth=depth, fold=fold), **facts
    )
    if over:
        texts = []
        for path, limit in over.items():
            ms = result.modules[path].total_ms
            texts.append(f"{path or '(root)'} takes {ms:.3f} of {limit:.3f} ms")
        raise CheckFailed(f"over budget: {', '.join(texts)}")


def _options(
    engine: str, provider: list[str] | None, threads: int | None, level: _Level
) -> dict[str, Any]:
    """The options of the engine; ``profile`` refuses ONNX Runtime's for another engine."""
    if engine != _OWN_ENGINE:
        options: dict[str, Any] = {"providers": provider} if provider else {}
        if level != "all":
            options["session_options"] = _session_options(None, level)
        if threads is not None:
            option = getattr(plug_in("profile", engine), "THREADS", "")
            if not option:
                raise InputError(f"--threads: the engine {engine} has no such option")
            options["engine_options"] = {option: threads}
        return options
    return {
        "providers": read_providers(provider),
        "session_options": _session_options(threads, level),
    }


def _session_options(threads: int | None, level: _Level) -> Any:
    onnxruntime = required("onnxruntime")

    options = onnxruntime.SessionOptions()
    name = "ORT_DISABLE_ALL" if level == "disable" else f"ORT_ENABLE_{level.upper()}"
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, name)
    if threads is not None:
        options.intra_op_num_threads = threads
    return options
