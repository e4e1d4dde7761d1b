"""ONNX Runtime as the engine of `profile`: kernels of its profiler, or modules that run alone."""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from htp_export.capabilities.profile.measurements import Kernel, Measurement, consistent, owned
from htp_export.editing.cut_models import cut_model
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.model.cutting import Cut, Cutter, check_outside
from htp_export.model.tagged import TaggedModel
from htp_export.process.progress import counted
from htp_export.runtime.arrays import PORTION_BYTES, Array
from htp_export.runtime.inputs import Feed, Inputs
from htp_export.runtime.sessions import RunnableModel, Session, kernels_at_once
from htp_export.runtime.settings import DEFAULTS, RunSettings
from htp_export.runtime.traces import KernelKey, ProfiledSession, Trace
from htp_export.shapes.operator_kinds import subgraphs

_DEVICES = {
    "CUDAExecutionProvider": "cuda",
    "TensorrtExecutionProvider": "cuda",
    "NvTensorRTRTXExecutionProvider": "cuda",
    "ROCMExecutionProvider": "cuda",  # ONNX Runtime's name for AMD's devices, too
    "MIGraphXExecutionProvider": "cuda",
    "DmlExecutionProvider": "dml",
}


def device_of(providers: Sequence[str]) -> str:
    """Return ONNX Runtime's name of the device where the first provider keeps tensors."""
    return _DEVICES.get(providers[0], "cpu") if providers else "cpu"


def times_of_modules(
    tagged: TaggedModel,
    feed: Feed,
    settings: RunSettings,
    providers: Sequence[str],
    warmup: int,
    temporary: Path,
) -> tuple[tuple[Kernel, ...], dict[str, str]]:
    """Run each module with nodes of its own alone, on its inputs in a run of the model.

    A module's own time is the time of its run, without the own times of its descendants, and at
    least 0. Inputs and outputs are on the device of the first of ``providers``. Also returns path →
    reason, for modules that did not run alone: their times count for their parents.
    """
    from htp_export.capabilities.verify.file_run import FileRun

    cuts, reasons = _cuts(tagged)
    wanted: dict[str, None] = {}
    for parts in cuts.values():
        for part in parts:
            wanted.update(dict.fromkeys(str(value.name) for value in part.inputs.values()))
    arrays: dict[str, Array] = {}
    source = FileRun(tagged, "the model", feed.arrays, DEFAULTS, PORTION_BYTES)
    source.fetch(dict.fromkeys(wanted, 0), arrays.__setitem__)
    device = device_of(providers)
    alone: dict[str, float] = {}
    for path, parts in counted(list(cuts.items()), "modules"):
        try:
            times = [
                _time(tagged, part, arrays, settings, device, warmup, temporary) for part in parts
            ]
        except InputError as error:
            reasons[path] = str(error)
        else:
            alone[path] = sum(times)
    own: dict[str, float] = {}

    def depth(path: str) -> int:
        return sum(1 for _ in tags.ancestors(path))

    for path in sorted(alone, key=depth, reverse=True):  # descendants first
        below = [ms for other, ms in own.items() if other != path and tags.is_under(other, path)]
        own[path] = max(0.0, alone[path] - sum(below))
    kernels = []
    for path in tagged.paths:
        if path in own:
            kernel = Kernel(path or "(root)", "module", providers[0], own[path], len(cuts[path]))
            kernels.append(owned(kernel, [tagged.calls.work((path,))], tagged.calls))
    return tuple(kernels), reasons


def _cuts(tagged: TaggedModel) -> tuple[dict[str, list[Cut]], dict[str, str]]:
    """The calls of each module with nodes of its own; and path → reason why it cannot run alone."""
    cutter = Cutter(tagged)
    owning = {owner for node in tagged.nodes for owner in tagged.owners_of(node)}
    cuts: dict[str, list[Cut]] = {}
    reasons: dict[str, str] = {}
    for path in tagged.paths:
        if path not in owning:
            continue
        try:
            parts = [cutter.cut(path, call) for call in range(max(tagged[path].calls, 1))]
            for part in parts:
                check_outside(tagged, (value.name for value in part.inputs.values()))
        except InputError as error:
            reasons[path] = str(error)
        else:
            cuts[path] = [part for part in parts if part.nodes]
    return cuts, reasons


def _time(
    tagged: TaggedModel,
    part: Cut,
    arrays: Mapping[str, Array],
    settings: RunSettings,
    device: str,
    warmup: int,
    temporary: Path,
) -> float:
    """The median time of one call of a module that runs alone, in ms."""
    model = cut_model(tagged, part)
    feed = Inputs.of(model).feed(
        {name: arrays[str(value.name)] for name, value in part.inputs.items()}
    )
    session = Session(RunnableModel.of(model, f"module {part.path!r} alone", temporary), settings)
    run = session.bound(feed.arrays, feed.types, device)
    times = []
    for _ in range(warmup + settings.runs):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times[warmup:])


_log = logging.getLogger(__name__)


def measure(
    tagged: TaggedModel,
    runnable: RunnableModel,
    feed: Feed,
    settings: RunSettings,
    warmup: int,
    *,
    timing: str,
    folder: Path,
) -> Measurement:
    """Run a model with ONNX Runtime's profiler, and in the same session without.

    With ``timing="modules"``, modules run alone, too; with ``"auto"``, only if times of launches do
    not explain the time of a run.
    """
    runs = settings.runs

    def once() -> Measurement:
        """One measurement: runs with the profiler, and then without."""
        session = ProfiledSession(runnable, settings, Path(tempfile.mkdtemp(dir=folder)))
        session.run(feed, warmup)
        profiled = session.run(feed, runs)
        trace = session.end_profiling(runs)
        plain = session.run(feed, runs)
        if trace.runs < runs:
            _log.warning(
                "ONNX Runtime's profile is full: it has %d of %d runs; ask for fewer",
                trace.runs,
                runs,
            )
        kernels = _kernels(trace, tagged, session.optimized)
        return Measurement(
            kernels,
            profiled,
            plain,
            session.providers,
            trace.timing,
            runs,
            kernels_at_once(settings),
        )

    measured = consistent(once)
    explained = measured.timing != "launches" or _explain(measured.kernels, measured.end_to_end_ms)
    if timing != "modules" and (timing != "auto" or explained):
        return measured
    kernels, reasons = times_of_modules(tagged, feed, settings, measured.providers, warmup, folder)
    notes = (f"{path or '(root)'} did not run alone: {reason}" for path, reason in reasons.items())
    return replace(measured, kernels=kernels, timing="modules", notes=(*notes, *measured.notes))


def _explain(kernels: Sequence[Kernel], run_ms: float) -> bool:
    """Whether launches of kernels with modules are at least half of a run, and explain it."""
    return sum(kernel.ms for kernel in kernels if kernel.owners) >= run_ms / 2


def _kernels(trace: Trace, tagged: TaggedModel, optimized: ir.Model | None) -> tuple[Kernel, ...]:
    """The kernels of a trace, by first launch.

    Without the optimized graph, only kernels that kept their names have owners.
    """
    from htp_export.alignment.carried_owners import optimized_works

    graph = tagged.model if optimized is None else optimized
    works = optimized_works(tagged, graph)
    nodes = nodes_of_kernels(trace.times, graph)
    kernels = []
    for key in trace.times:
        launches = trace.launches[key] / trace.runs
        kernel = Kernel(key.label, key.op_type, key.provider, trace.typical(key), launches)
        kernel_works = [works[node] for node in nodes[key] if node in works]
        kernels.append(owned(kernel, kernel_works, tagged.calls))
    return tuple(kernels)


def nodes_of_kernels(keys: Iterable[KernelKey], model: ir.Model) -> dict[KernelKey, list[ir.Node]]:
    """Kernel → the nodes that it may be; more than one only if equal names are ambiguous."""
    groups: defaultdict[tuple[tuple[KernelKey, ...], str, str], list[KernelKey]] = defaultdict(list)
    nodes_of_kernel: dict[KernelKey, list[ir.Node]] = {}
    named: dict[ir.Graph, dict[tuple[str, str], list[ir.Node]]] = {}
    for key in keys:
        unnamed = key.label == f"{key.op_type}_{key.index}"
        groups[key.holders, "" if unnamed else key.label, key.op_type].append(key)
    # Outer graphs first: the subgraph of a kernel is found through the node that holds it.
    for (holders, label, op_type), members in sorted(
        groups.items(), key=lambda group: len(group[0][0])
    ):
        graphs = [model.graph]
        if holders:
            holding = nodes_of_kernel.get(holders[-1], ())
            graphs = [body for node in holding for body in subgraphs(node)]
        names = [label] if label else ["", *(member.label for member in members)]
        candidates: list[ir.Node] = []
        for graph in graphs:
            if graph not in named:
                named[graph] = _by_name(graph)
            for name in names:
                candidates.extend(named[graph].get((name, op_type), ()))
        # A graph runs in the order of its nodes: as many nodes as kernels are the same ones.
        is_unambiguous = len(candidates) == len(members)
        for index, key in enumerate(members):
            nodes_of_kernel[key] = [candidates[index]] if is_unambiguous else candidates
    return nodes_of_kernel


def _by_name(graph: ir.Graph) -> dict[tuple[str, str], list[ir.Node]]:
    """Name and operator → nodes of a graph, without its subgraphs."""
    nodes_by_name: defaultdict[tuple[str, str], list[ir.Node]] = defaultdict(list)
    for node in graph:
        nodes_by_name[node.name or "", node.op_type].append(node)
    return nodes_by_name
