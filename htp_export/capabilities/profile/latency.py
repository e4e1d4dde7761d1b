"""`profile`: latency by module, in ONNX Runtime or in an engine of another package."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from htp_export.capabilities.profile.latency_results import OWN_ENGINE, Profile
from htp_export.capabilities.profile.measured_files import engine_of
from htp_export.capabilities.profile.measured_memory import MeasuredMemory, memory_by_module
from htp_export.capabilities.profile.measurements import Measurement, ProfileEngine
from htp_export.capabilities.profile.onnxruntime_engine import measure
from htp_export.capabilities.profile.recorded_measurements import read_measurements
from htp_export.discovery import plug_in
from htp_export.editing.flattening import read_flat
from htp_export.errors import InputError
from htp_export.files.filesystem import temporary_folder
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import ModelSource, TaggedModel, load, name_of
from htp_export.process.argument_types import MOST_RUNS, check_whole
from htp_export.runtime.data import Data
from htp_export.runtime.samples import Samples
from htp_export.runtime.sessions import RunnableModel
from htp_export.runtime.settings import HOST, RunSettings

_TIMINGS = ("auto", "kernels", "modules")


@names_model_faults("model")
def profile(
    model: ModelSource,
    data: Data | None = None,
    *,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    runs: int = 20,
    warmup: int = 3,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
    session_options: Any = None,
    memory: bool = False,
    timing: str = "auto",
    engine: str = OWN_ENGINE,
    engine_options: Mapping[str, Any] | None = None,
    measured: Sequence[str | os.PathLike[str]] | None = None,
) -> Profile:
    """Measure the latency of every module.

    The model runs in ONNX Runtime with its optimizations, first with its profiler and then without.
    A kernel that does work of several modules is divided equally among them; kernels without a
    module are listed. ``timing`` of the result states what was timed: on a GPU, ONNX Runtime's
    profiler measures launches, unless it was built to measure kernels.

    Thread-safe, but calls at the same time slow each other down.

    Args:
        model: A file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed.
            Nothing is written beside a file.
        data: The inputs of one run or of several, as for `quantize`; of several, the times are means,
            and ``worst_ms`` of a module is its longest one. Random by default: floats are normal,
            integers 0 or 1, booleans true.
        dims: Open dimension → size, for random inputs; 1 by default. ``data`` of other sizes are
            refused.
        shapes: For random inputs: input name → shape.
        runs: Number of measured runs of each inputs, each with the profiler and without.
        warmup: Number of runs before the measurement.
        providers: Execution providers, in order of preference, as for
            ``onnxruntime.InferenceSession``.
        session_options: An ``onnxruntime.SessionOptions``: threads, level of optimization and so
            on. It is restored afterwards.
        memory: Run the model once more, and record the allocations of ONNX Runtime for each kernel,
            beside the estimate of `cost`.
        timing: ``kernels``: ONNX Runtime's profiler. ``modules``: each module runs alone, with its
            inputs on the device. ``auto``: the second if the device only queues kernels, the
            profiler has no times for them, and the times of launches explain less than half of a
            run.
        engine: ``onnxruntime``, or the name of an engine of another package: an entry point of the
            group ``htp_export.profile``.
        engine_options: Options of such an engine.
        measured: Run nothing; read the files in which an engine recorded measurements elsewhere. Of
            ONNX Runtime, these are files of ``session.end_profiling()``, of one session each or of
            several; kernels that are no nodes of the model are counted and named. Files of another
            engine are recognized, without ``engine``.

    Returns:
        Times in ms, by module path.

    Raises:
        UntaggedModelError: The model has no module tags.
        FileError: A file cannot be read, or its measurements belong to another model.
        InputError: The inputs do not fit the model, ONNX Runtime cannot run it, a provider or
            engine is missing, the engine does not have an option, or ``runs`` or ``warmup`` is too
            small.
        ToolError: An engine of another package cannot run the model.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1)).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
        >>> report = htp_export.profile(program, runs=2)
        >>> list(report.modules), report.unattributed_ms, report.modules["1"].by_op.keys()
        (['', '0', '1'], 0, dict_keys(['Softmax']))
    """
    settings = RunSettings(
        data, dims, shapes, providers=providers, session_options=session_options, runs=runs
    )
    options = dict(engine_options or {})
    if measured and engine == OWN_ENGINE:
        engine = engine_of(measured[0]) or OWN_ENGINE
    if timing not in _TIMINGS:
        raise InputError(f"no timing {timing!r}; there are {', '.join(_TIMINGS)}")
    other: ProfileEngine | None = None if engine == OWN_ENGINE else plug_in("profile", engine)
    if other is None:
        _check_options_of_own_engine(settings, options)
    else:
        _check_other_engine(settings, memory, timing)
    if measured is not None:
        has_timing = memory or timing != "auto"
        _check_nothing_runs(measured, settings, options, has_timing=has_timing)
    original = load(model)
    tagged = read_flat(original)  # ONNX Runtime would inline functions, with names of its own
    tagged.require_tags()
    name = name_of(model, "the model")
    if measured is not None and other is not None:
        return _read_by_engine(other, engine, tagged, measured, name)
    if measured is not None:
        with temporary_folder() as folder:
            optimizable = _runnable(model, tagged, tagged is original, folder)
            traces = read_measurements(tagged, measured, optimizable, settings, folder)
        return replace(Profile.of(tagged, traces, engine), recorded=True)
    settings.check_timed_runs(1)
    check_whole("warmup", warmup, 0, MOST_RUNS)
    samples = Samples.of(settings, tagged.model)
    if other is not None:
        return _measure_by_engine(
            other, engine, tagged, samples, runs, warmup, name=name, options=options
        )
    results: list[Measurement] = []
    allocated: MeasuredMemory | None = None
    notes: tuple[str, ...] = ()
    with temporary_folder() as folder:
        runnable = _runnable(model, tagged, tagged is original, folder)
        for feed in samples.feeds():
            notes = feed.notes
            result = measure(tagged, runnable, feed, settings, warmup, timing=timing, folder=folder)
            if memory and not results:  # of the first inputs
                allocated = memory_by_module(runnable, settings, feed, tagged, folder)
            results.append(result)
    return Profile.over_inputs(tagged, results, engine, notes, allocated)


def _check_other_engine(settings: RunSettings, memory: bool, timing: str) -> None:
    """Refuse settings that ONNX Runtime alone has."""
    given = {
        "providers": settings.providers != (HOST,),
        "session_options": settings.session_options is not None,
        "memory": memory,
        "timing": timing == "modules",
    }
    for name, is_given in given.items():
        if is_given:
            raise InputError(f"{name} is for engine={OWN_ENGINE!r}")


def _check_options_of_own_engine(settings: RunSettings, options: Mapping[str, Any]) -> None:
    """Refuse what ONNX Runtime as the engine does not have."""
    settings.check_providers()
    if options:
        raise InputError("engine_options are for other engines, see engine")


def _check_nothing_runs(
    measured: Sequence[str | os.PathLike[str]],
    settings: RunSettings,
    options: Mapping[str, Any],
    *,
    has_timing: bool,
) -> None:
    """Refuse options of a run beside measurements that were recorded elsewhere."""
    if has_timing:
        raise InputError(
            "measured reads times of a run that took place; memory and timing have no effect"
        )
    if settings.has_inputs or options:
        raise InputError(
            "measured reads times of a run that took place; data, sizes and options have no effect"
        )
    if not measured:
        raise InputError("measured has no files")


def _measure_by_engine(
    other: ProfileEngine,
    engine: str,
    tagged: TaggedModel,
    samples: Samples,
    runs: int,
    warmup: int,
    *,
    name: str,
    options: dict[str, Any],
) -> Profile:
    """Measure each of the inputs in an engine of another package."""
    if not hasattr(other, "measure"):
        raise InputError(
            f"{engine} is not run here: give the files of its measurements, measured=(...)"
        )
    results: list[Measurement] = []
    notes: tuple[str, ...] = ()
    with temporary_folder() as folder:
        for feed in samples.feeds():
            notes = feed.notes
            result = other.measure(
                tagged, feed, runs, warmup, name=name, options=options, folder=folder
            )
            results.append(result)
    return Profile.over_inputs(tagged, results, engine, notes)


def _read_by_engine(
    other: ProfileEngine,
    engine: str,
    tagged: TaggedModel,
    measured: Sequence[str | os.PathLike[str]],
    name: str,
) -> Profile:
    """The measurements that an engine recorded elsewhere."""
    if not hasattr(other, "read"):
        raise InputError(f"{engine} runs models here, and reads no files: leave out measured")
    return Profile.of(tagged, other.read(tagged, measured, name=name), engine)


def _runnable(
    model: ModelSource, tagged: TaggedModel, is_unchanged: bool, folder: Path
) -> RunnableModel:
    """The model for ONNX Runtime: the file itself, unless its functions were inlined."""
    if is_unchanged and isinstance(model, str | os.PathLike):
        return RunnableModel.of_file(Path(model), tagged.model, folder)
    return RunnableModel.of(tagged.model, tagged.hierarchy.root.simple_class or "model", folder)
