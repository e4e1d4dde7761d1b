"""Latency by module, from the kernels of ONNX Runtime's profiler."""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from htp_export.errors import InputError
from htp_export.model.inlining import read_flat
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import ModelSource, TaggedModel, load
from htp_export.run.latency_results import Profile, latency_by_module
from htp_export.run.measured_memory import memory_by_module
from htp_export.run.trace_kernels import trace_kernels
from htp_export.runtime.inputs import Inputs
from htp_export.runtime.profiling import ProfiledSession
from htp_export.runtime.sessions import RunnableModel, SessionSettings, temporary_folder

__all__ = ["profile"]

_log = logging.getLogger(__name__)


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
) -> Profile:
    """Measure the latency of every module in ONNX Runtime.

    The model runs with ONNX Runtime's optimisations, first under its profiler and then without. A kernel that does work
    of several modules is divided equally among them; kernels without a module are listed. On a GPU, ONNX Runtime's
    profiler measures the launch of a kernel, unless it was built to measure more.

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

    Returns:
        Times in ms, by module path.

    Raises:
        UntaggedModelError: The model has no module tags.
        FileError: The file cannot be read.
        InputError: The inputs do not fit the model, ONNX Runtime cannot run it, a provider is missing, or ``runs``
            or ``warmup`` is too small.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1)).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
        >>> report = htp_export.profile(program, runs=2)
        >>> list(report.modules), report.unattributed_ms, report.modules["1"].by_op.keys()
        (['', '0', '1'], 0, dict_keys(['Softmax']))
    """
    if runs < 1 or warmup < 0:
        raise InputError(f"there is nothing to measure in {runs} runs after {warmup} to warm up")
    settings = SessionSettings(tuple(providers), session_options)
    settings.check()
    original = load(model)
    tagged = read_flat(original)  # ONNX Runtime would inline functions under names of its own
    tagged.require_tags()
    wanted = Inputs.of(tagged.model)
    feed = wanted.random(dims, shapes) if inputs is None else wanted.feed(inputs, dims)
    with temporary_folder() as folder:
        file = Path(model) if isinstance(model, str | os.PathLike) and tagged is original else None
        runnable = _runnable(file, tagged, folder)
        session = ProfiledSession(runnable, settings, folder)
        session.run(feed, warmup)
        profiled = session.run(feed, runs)
        trace = session.end_profiling(runs)
        plain = session.run(feed, runs)
        kernels = trace_kernels(trace, tagged, session.optimized)
        measured = memory_by_module(runnable, settings, feed, tagged, folder) if memory else None
    if trace.runs < runs:
        _log.warning("ONNX Runtime's profile is full: it has %d of %d runs; ask for fewer", trace.runs, runs)
    unattributed = tuple(kernel for kernel in kernels if not kernel.owners)
    return Profile(
        modules=latency_by_module(kernels, tagged, measured),
        end_to_end_ms=statistics.median(plain),
        profiled_ms=statistics.median(profiled),
        kernels_ms=sum(kernel.ms for kernel in kernels),
        unattributed_ms=sum(kernel.ms for kernel in unattributed),
        unattributed=unattributed,
        kernels=kernels,
        runs=runs,
        providers=session.providers,
        assumed=feed.notes,
        tags=tagged.tag_facts,
        memory=measured,
    )


def _runnable(file: Path | None, tagged: TaggedModel, folder: Path) -> RunnableModel:
    """The model as ONNX Runtime reads it: the file itself, if the model has no functions."""
    if file is not None:
        return RunnableModel.of_file(file, tagged.model, folder)
    return RunnableModel.of(tagged.model, tagged.hierarchy.root.simple_class or "model", folder)
