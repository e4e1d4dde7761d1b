"""Latency by module, from the kernels of ONNX Runtime's profiler."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from htp_export.capabilities.profile.kernels import Kernel, trace_kernels
from htp_export.capabilities.profile.latency_results import Profile
from htp_export.capabilities.profile.measured_memory import memory_by_module
from htp_export.capabilities.profile.measurements import Measurement, consistent
from htp_export.capabilities.profile.module_times import device_of, times_of_modules
from htp_export.capabilities.profile.openvino_session import OpenvinoSession, openvino_kernels
from htp_export.capabilities.profile.tensorrt_files import read_engine
from htp_export.capabilities.profile.tensorrt_layers import tensorrt_kernels
from htp_export.editing.flattening import read_flat
from htp_export.errors import InputError
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import ModelSource, TaggedModel, load, name_of
from htp_export.process.bounds import MOST_RUNS, check_whole
from htp_export.runtime.inputs import Feed, Inputs
from htp_export.runtime.sessions import RunnableModel, SessionSettings, temporary_folder
from htp_export.runtime.traces import ProfiledSession

__all__ = ["profile"]

_log = logging.getLogger(__name__)
_CPU = ("CPUExecutionProvider",)
_TENSORRT = "tensorrt"
_TIMINGS = ("auto", "kernels", "modules")
_ENGINES = ("onnxruntime", "openvino")


@names_model_faults("model")
def profile(
    model: ModelSource,
    inputs: Mapping[str, Any] | None = None,
    *,
    runs: int = 20,
    warmup: int = 3,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
    session_options: Any = None,
    memory: bool = False,
    timing: str = "auto",
    engine: str = "onnxruntime",
    engine_options: Mapping[str, Any] | None = None,
    tensorrt: tuple[str | os.PathLike[str], str | os.PathLike[str]] | None = None,
) -> Profile:
    """Measure the latency of every module in ONNX Runtime.

    The model runs with ONNX Runtime's optimisations, first under its profiler and then without. A kernel that does work
    of several modules is divided equally among them; kernels without a module are listed. ``timing`` of the result says
    what was timed: on a GPU, ONNX Runtime's profiler measures launches, unless it was built to measure kernels.

    Thread-safe, but calls at the same time slow each other down.

    Args:
        model: A file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed.
            Nothing is written beside a file.
        inputs: Input name → numpy array or torch tensor. Random ones without: floats are normal, integers 0 or 1,
            booleans true.
        runs: Number of measured runs, each with the profiler and without.
        warmup: Number of runs before those.
        dims: Name of an open dimension → size. Random inputs have 1 if it is not given; ``inputs`` of another size are
            rejected.
        shapes: For random inputs: input name → shape.
        providers: Execution providers, in order of preference, as for ``onnxruntime.InferenceSession``.
        session_options: An ``onnxruntime.SessionOptions``: threads, level of optimisation and so on. It is restored
            afterwards.
        memory: Run the model once more, and record what ONNX Runtime allocates for each kernel, beside the estimate of
            `cost`.
        timing: ``kernels``: what ONNX Runtime's profiler measures. ``modules``: each module runs alone, with its inputs
            on the device. ``auto``: the second if the device only queues kernels, the profiler has no times of them,
            and the times of launches explain less than half of a run.
        engine: ``onnxruntime`` or ``openvino``.
        engine_options: OpenVINO's properties, as for ``openvino.Core.compile_model``: ``INFERENCE_NUM_THREADS`` and so
            on.
        tensorrt: Nothing is run. The files of ``trtexec --exportLayerInfo`` and ``--exportProfile`` of an engine that
            TensorRT built of the model.

    Returns:
        Times in ms, by module path.

    Raises:
        UntaggedModelError: The model has no module tags.
        FileError: A file cannot be read, or is not one of trtexec.
        InputError: The inputs do not fit the model, ONNX Runtime cannot run it, a provider or engine is missing,
            ``runs`` or ``warmup`` is too small, or the layers of TensorRT are of another model.
        ToolError: OpenVINO cannot run the model.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1)).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
        >>> report = htp_export.profile(program, runs=2)
        >>> list(report.modules), report.unattributed_ms, report.modules["1"].by_op.keys()
        (['', '0', '1'], 0, dict_keys(['Softmax']))
    """
    options = _EngineOptions(tuple(providers), session_options, memory, timing, dict(engine_options or {}))
    original = load(model)
    tagged = read_flat(original)  # ONNX Runtime would inline functions under names of its own
    tagged.require_tags()
    if tensorrt is not None:
        options.check(_TENSORRT, inputs, dims, shapes)
        return _read_tensorrt(tagged, name_of(model, "the model"), *tensorrt)
    if engine == _TENSORRT:
        raise InputError("TensorRT is not run here: give tensorrt=(layers, times), the files of trtexec")
    options.check(engine)
    check_whole("runs", runs, 1, MOST_RUNS)
    check_whole("warmup", warmup, 0, MOST_RUNS)
    wanted = Inputs.of(tagged.model)
    feed = wanted.random(dims, shapes) if inputs is None else wanted.feed(inputs, dims)
    with temporary_folder() as folder:
        if engine == "openvino":
            name = name_of(model, "the model")
            return _run_openvino(tagged, name, feed, runs, warmup, options.of_engine, folder)
        file = Path(model) if isinstance(model, str | os.PathLike) and tagged is original else None
        return _run_onnxruntime(tagged, _runnable(file, tagged, folder), feed, runs, warmup, options, folder)


@dataclass(frozen=True)
class _EngineOptions:
    """The options that only one of the engines has."""

    providers: tuple[Any, ...]
    session_options: Any
    memory: bool
    timing: str
    of_engine: Mapping[str, Any]

    @property
    def settings(self) -> SessionSettings:
        return SessionSettings(self.providers, self.session_options)

    def check(self, engine: str, *of_runs: Any) -> None:
        """Refuse an unknown engine, and options that it does not have."""
        if engine not in (*_ENGINES, _TENSORRT):
            raise InputError(f"no engine {engine!r}; there are {', '.join(_ENGINES)}")
        if self.timing not in _TIMINGS:
            raise InputError(f"no timing {self.timing!r}; there are {', '.join(_TIMINGS)}")
        if engine == "onnxruntime":
            self.settings.check()
            if self.of_engine:
                raise InputError("engine_options are for engine='openvino'; ONNX Runtime has session_options")
            return
        if self.providers != _CPU or self.session_options is not None or self.memory or self.timing == "modules":
            raise InputError("providers, session_options, memory and timing are for engine='onnxruntime'")
        if engine == _TENSORRT and (any(of_runs) or self.of_engine):
            raise InputError("tensorrt reads times of a run that took place; inputs, sizes and options have no effect")


def _run_onnxruntime(
    tagged: TaggedModel,
    runnable: RunnableModel,
    feed: Feed,
    runs: int,
    warmup: int,
    options: _EngineOptions,
    folder: Path,
) -> Profile:

    def measure() -> Measurement:
        session = ProfiledSession(runnable, options.settings, Path(tempfile.mkdtemp(dir=folder)))
        session.run(feed, warmup)
        profiled = session.run(feed, runs)
        trace = session.end_profiling(runs)
        plain = session.run(feed, runs)
        if trace.runs < runs:
            _log.warning("ONNX Runtime's profile is full: it has %d of %d runs; ask for fewer", trace.runs, runs)
        kernels, at_once = trace_kernels(trace, tagged, session.optimized), options.settings.at_once
        return Measurement(kernels, profiled, plain, session.providers, trace.timing, at_once)

    measured, contradictions = consistent(measure)
    timing, providers = measured.timing, measured.providers
    kernels, notes = measured.kernels, (*contradictions, *feed.notes)
    if options.timing == "modules" or (
        options.timing == "auto" and timing == "launches" and not _explain(kernels, measured.end_to_end_ms)
    ):
        device = device_of(providers)
        alone = times_of_modules(tagged, feed, options.settings, device, runs, warmup, folder)
        kernels, timing = alone.kernels, "modules"
        notes = (*(f"{path or '(root)'} did not run alone: {why}" for path, why in alone.reasons.items()), *notes)
    return Profile.of(
        tagged,
        kernels,
        timing=timing,
        memory=memory_by_module(runnable, options.settings, feed, tagged, folder) if options.memory else None,
        end_to_end_ms=measured.end_to_end_ms,
        profiled_ms=measured.profiled_ms,
        runs=runs,
        providers=providers,
        assumed=notes,
    )


def _explain(kernels: Sequence[Kernel], run_ms: float) -> bool:
    """Whether times of launches say where the time of a run goes: they are most of it, and most have modules."""
    known = sum(kernel.ms for kernel in kernels if kernel.owners)
    return known >= run_ms / 2


def _run_openvino(
    tagged: TaggedModel, name: str, feed: Feed, runs: int, warmup: int, options: Mapping[str, Any], folder: Path
) -> Profile:
    session = OpenvinoSession(tagged.model, name, options, folder)

    def measure() -> Measurement:
        profiled, nodes = session.run_counting(feed, warmup, runs)
        kernels, plain = openvino_kernels(nodes, session.device, tagged), session.run(feed, warmup, runs)
        return Measurement(kernels, profiled, plain, (f"OpenVINO {session.device}",))

    measured, contradictions = consistent(measure)
    return Profile.of(
        tagged,
        measured.kernels,
        end_to_end_ms=measured.end_to_end_ms,
        profiled_ms=measured.profiled_ms,
        runs=runs,
        providers=measured.providers,
        assumed=(*contradictions, *feed.notes),
        engine="openvino",
    )


def _read_tensorrt(
    tagged: TaggedModel, name: str, layers: str | os.PathLike[str], times: str | os.PathLike[str]
) -> Profile:
    engine = read_engine(layers, times)
    kernels = tensorrt_kernels(engine, tagged, name)
    whole = sum(kernel.ms for kernel in kernels)
    return Profile.of(
        tagged,
        kernels,
        end_to_end_ms=whole,
        profiled_ms=whole,
        runs=engine.runs,
        providers=("TensorRT",),
        assumed=engine.notes,
        engine="tensorrt",
        timing="layers",
    )


def _runnable(file: Path | None, tagged: TaggedModel, folder: Path) -> RunnableModel:
    """The model as ONNX Runtime reads it: the file itself, if the model has no functions."""
    if file is not None:
        return RunnableModel.of_file(file, tagged.model, folder)
    return RunnableModel.of(tagged.model, tagged.hierarchy.root.simple_class or "model", folder)
