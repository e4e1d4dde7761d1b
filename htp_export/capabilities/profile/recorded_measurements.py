"""Measurements by module of traces that ONNX Runtime wrote elsewhere: a phone, a server, a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import onnx_ir as ir

from htp_export.capabilities.profile.measurements import Kernel, Measurement, mean_of, owned
from htp_export.capabilities.profile.onnxruntime_engine import nodes_of_kernels
from htp_export.errors import FileError, OnnxRuntimeError
from htp_export.format.call_tree import NodeCalls
from htp_export.model.tagged import TaggedModel
from htp_export.reporting.columns import many
from htp_export.runtime.recorded_traces import read_recorded
from htp_export.runtime.sessions import OptionChanges, RunnableModel
from htp_export.runtime.settings import RunSettings
from htp_export.runtime.traces import KernelKey, Trace, session_and_graph

_LEVELS = ("ORT_ENABLE_ALL", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_BASIC")
"""ONNX Runtime's levels of optimisation, the default first: each names nodes in its own way."""


def read_measurements(
    tagged: TaggedModel,
    files: Sequence[str | os.PathLike[str]],
    runnable: RunnableModel,
    settings: RunSettings,
    folder: Path,
) -> Measurement:
    """Read traces of a model, each of one or more sessions, as one measurement: the mean of all.

    Kernels are found by name in the graphs that ONNX Runtime optimises here, level by level, and in
    the file itself. The model does not run.

    Raises:
        FileError: A file is not a trace of ONNX Runtime, or less than half of its kernels are nodes
            of the model.
    """
    graphs = _Graphs(tagged, runnable, settings, folder)
    measured: list[Measurement] = []
    for file in files:
        for trace in read_recorded(file):
            kernels = graphs.kernels(trace)
            unmatched = [kernel for kernel in kernels if not kernel.owners]
            # torch names nodes alike in all models (node_add), so that some of any trace are found
            if len(unmatched) > len(kernels) / 2:
                names = ", ".join(repr(kernel.name) for kernel in unmatched[:3])
                raise FileError(
                    file,
                    f"{len(unmatched)} of its {many(len(kernels), 'kernel')} match no node of the model "
                    f"({names}): give the file that was run there, or one that it was made of",
                )
            providers: dict[str, float] = {}
            for kernel in kernels:
                if kernel.provider.endswith("ExecutionProvider"):
                    providers[kernel.provider] = providers.get(kernel.provider, 0.0) + kernel.ms
            measured.append(
                Measurement(
                    kernels,
                    profiled=trace.run_ms,
                    providers=tuple(sorted(providers, key=lambda name: -providers[name])),
                    timing=trace.timing,
                    runs=trace.runs,
                    notes=(f"measured elsewhere: {os.fspath(file)}",),
                )
            )
    whole = measured[0] if len(measured) == 1 else mean_of(measured)
    unmatched = [kernel for kernel in whole.kernels if not kernel.owners]
    if not unmatched:
        return whole
    return whole.with_note(
        f"{len(unmatched)} of {many(len(whole.kernels), 'kernel')} match no node of the file, by name or "
        f"after ONNX Runtime's optimisations here: {', '.join(_described(unmatched))}"
    )


_MOST_NAMED = 10  # kernels in a note; JSON has all


def _described(kernels: Sequence[Kernel]) -> Iterator[str]:
    for kernel in kernels[:_MOST_NAMED]:
        yield f"{kernel.op_type} {kernel.name!r}"
    if len(kernels) > _MOST_NAMED:
        yield f"and {len(kernels) - _MOST_NAMED} more"


class _Graphs:
    """The graphs in which kernels of a trace may be nodes, each made when a kernel needs it."""

    def __init__(
        self,
        tagged: TaggedModel,
        runnable: RunnableModel,
        settings: RunSettings,
        folder: Path,
    ) -> None:
        self._tagged, self._runnable = tagged, runnable
        self._settings, self._folder = settings, folder
        self._made: dict[str, tuple[ir.Model, Mapping[ir.Node, NodeCalls]] | None] = {}

    def kernels(self, trace: Trace) -> tuple[Kernel, ...]:
        """The kernels of a trace, with the owners of their nodes."""
        works: dict[KernelKey, list[NodeCalls]] = {}
        for level in (*_LEVELS, ""):
            missing = [key for key in trace.times if not works.get(key)]
            graph = self._graph(level) if missing else None
            if graph is None:
                continue
            model, known = graph
            # Kernels of equal names are told apart by their order: all of them are looked up.
            nodes = nodes_of_kernels(trace.times, model)
            for key in missing:
                works[key] = [known[node] for node in nodes.get(key, ()) if node in known]
        kernels = []
        for key in trace.times:
            launches = trace.launches[key] / trace.runs
            kernel = Kernel(key.label, key.op_type, key.provider, trace.typical(key), launches)
            kernels.append(owned(kernel, works.get(key, ()), self._tagged.calls))
        return tuple(kernels)

    def _graph(self, level: str) -> tuple[ir.Model, Mapping[ir.Node, NodeCalls]] | None:
        """The graph of a level, and the owners of its nodes; the file itself for ``""``."""
        if level not in self._made:
            self._made[level] = self._optimized(level) if level else self._file()
        return self._made[level]

    def _file(self) -> tuple[ir.Model, Mapping[ir.Node, NodeCalls]]:
        works = {node: self._tagged.work_of(node) for node in self._tagged.nodes}
        return self._tagged.model, {node: work for node, work in works.items() if work.owners}

    def _optimized(self, level: str) -> tuple[ir.Model, Mapping[ir.Node, NodeCalls]] | None:
        import onnxruntime

        from htp_export.alignment.carried_owners import optimized_works

        folder = self._folder / level
        folder.mkdir()
        value = getattr(onnxruntime.GraphOptimizationLevel, level)
        changes = OptionChanges({"graph_optimization_level": value})
        try:
            _, graph = session_and_graph(self._runnable, self._settings, folder, changes)
        except OnnxRuntimeError:  # the model needs operators of the other machine
            return None
        if graph is None:
            return None
        return graph, optimized_works(self._tagged, graph)
