"""OpenVINO as an engine of `profile`: times of its performance counters, by original nodes."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import onnx_ir as ir

from htp_export.capabilities.profile.measurements import (
    Entry,
    Kernel,
    Measurement,
    consistent,
    entry_kernels,
)
from htp_export.errors import ToolError, in_one_line
from htp_export.extras import required
from htp_export.files.model_files import write_for_tool
from htp_export.model.regions import all_nodes
from htp_export.model.tagged import TaggedModel
from htp_export.process.progress import counted
from htp_export.runtime.inputs import Feed
from htp_export.runtime.sessions import RunnableModel

__all__ = ["THREADS", "measure"]

THREADS = "INFERENCE_NUM_THREADS"

_DEVICE = "CPU"
_MARK = re.compile(r"htp#(\d+)#")
"""The mark in the name of every OpenVINO operation of an original node: the node's number."""
_NUMBERED = re.compile(r"(?:htp#\d+#)+\d+")


def measure(
    tagged: TaggedModel,
    feed: Feed,
    runs: int,
    warmup: int,
    *,
    name: str,
    options: Mapping[str, Any],
    folder: Path,
) -> Measurement:
    """Run a model without functions on OpenVINO's CPU device, with counters and without.

    ``options`` are properties as for ``openvino.Core.compile_model``. The model is written to
    ``folder`` if OpenVINO cannot read it from memory.

    Raises:
        ToolError: OpenVINO cannot read, compile or run the model.
    """
    session = _Session(tagged.model, name, options, folder)

    def once() -> Measurement:
        profiled, entries = session.run_counting(feed, warmup, runs)
        kernels = [kernel for kernel in entry_kernels(entries, tagged) if kernel.ms]
        plain = session.run(feed, warmup, runs)
        return Measurement(kernels, profiled, plain, (f"OpenVINO {_DEVICE}",), runs=runs)

    return consistent(once)


class _Session:
    """A model that OpenVINO compiled twice: with performance counters and without."""

    def __init__(
        self, model: ir.Model, name: str, options: Mapping[str, Any], temporary: Path
    ) -> None:
        openvino = required("openvino", "engine 'openvino'")
        self._name = name
        self._nodes = list(all_nodes(model))
        try:
            core = openvino.Core()
            read = core.read_model(_marked(model, temporary))
            producers: dict[str | None, int] = {}
            for number, node in enumerate(self._nodes):
                producers.update((value.name, number) for value in node.outputs)
            _mark_parts(read, producers)
            self._plain = core.compile_model(read, _DEVICE, dict(options))
            self._counting = core.compile_model(read, _DEVICE, {**options, "PERF_COUNT": "YES"})
        except Exception as error:  # OpenVINO's errors have no other common base
            raise ToolError("OpenVINO", f"cannot load {name}: {in_one_line(error)}") from error

    def run(self, feed: Feed, warmup: int, runs: int) -> list[float]:
        """Run the model several times without counters; return the times of measured runs in ms."""
        return self._timed(self._plain.create_infer_request(), feed, warmup + runs)[warmup:]

    def run_counting(self, feed: Feed, warmup: int, runs: int) -> tuple[list[float], list[Entry]]:
        """Run the model several times with counters; return times in ms, and entries in order.

        Counters are means since the model was compiled, in whole microseconds: the share of the
        warmup runs is subtracted.
        """
        request = self._counting.create_infer_request()
        self._timed(request, feed, warmup)
        before: dict[str, timedelta] = {}
        if warmup:
            before = {info.node_name: info.real_time for info in request.profiling_info}
        walls = self._timed(request, feed, runs)
        kinds, times = {}, {}
        for info in request.profiling_info:
            early = before.get(info.node_name, timedelta()) * warmup
            mean = (info.real_time * (warmup + runs) - early) / runs
            kinds[info.node_name] = info.node_type
            times[info.node_name] = max(0.0, mean.total_seconds() * 1000)
        entries = self._graph(kinds, times)
        for name, ms in times.items():  # operations that are not in the graph
            entries.append(Entry(self._kernel(name, kinds[name], ms), ()))
        return walls, entries

    def _graph(self, kinds: Mapping[str, str], times: dict[str, float]) -> list[Entry]:
        """The nodes of the executed graph, with their times, which are removed from ``times``.

        The time of a node that did not run is 0.
        """
        entries = []
        for node in self._counting.get_runtime_model().get_ordered_ops():
            facts = node.get_rt_info()
            name = node.get_friendly_name()
            merged = ""
            if "originalLayersNames" in facts:
                merged = facts["originalLayersNames"].astype(str)
            numbers = dict.fromkeys(int(number) for number in _MARK.findall(merged))
            inputs = [
                source.get_source_output().get_node().get_friendly_name()
                for source in node.inputs()
            ]
            kernel = self._kernel(name, kinds.get(name, ""), times.pop(name, 0.0))
            nodes = [self._nodes[number] for number in numbers]
            entries.append(Entry(kernel, nodes, inputs, [name]))
        return entries

    def _kernel(self, name: str, kind: str, ms: float) -> Kernel:
        return Kernel(self._label(name), kind, _DEVICE, ms, 1.0)

    def _label(self, name: str) -> str:
        """A name with the names of original nodes in place of marks."""

        def original(match: re.Match[str]) -> str:
            marked = (self._nodes[int(number)] for number in _MARK.findall(match[0]))
            return ", ".join(node.name or node.op_type for node in marked)

        return _NUMBERED.sub(original, name)

    def _timed(self, request: Any, feed: Feed, runs: int) -> list[float]:
        """The times of several runs, in ms."""
        names = set[str]().union(*(port.get_names() for port in self._plain.inputs))
        arrays = {name: array for name, array in feed.arrays.items() if name in names}
        times = []
        try:
            for _ in counted(range(runs), "runs"):
                start = time.perf_counter()
                request.infer(arrays)
                times.append((time.perf_counter() - start) * 1000)
        except Exception as error:
            raise ToolError("OpenVINO", f"cannot run {self._name}: {in_one_line(error)}") from error
        return times


def _marked(model: ir.Model, temporary: Path) -> bytes | Path:
    """A copy of a model, with numbers as node names, in a form that OpenVINO can read."""
    copy = model.clone()
    for number, node in enumerate(all_nodes(copy)):
        node.name = f"htp#{number}#"
    runnable = RunnableModel.of(copy, "", temporary)
    if isinstance(runnable.source, Path) or runnable.folder is None:
        return runnable.source
    write_for_tool(copy, temporary / "model.onnx")
    return temporary / "model.onnx"


def _mark_parts(read: Any, producers: Mapping[str | None, int]) -> None:
    """Mark operations of OpenVINO's model that do not have the name of an original node.

    OpenVINO's reader creates several operations for one node, and names the last after the node, or
    after its output if it is an output of the model. The others precede it: they get the marks of
    their consumers.
    """
    mark_of: dict[str, str] = {}
    for operation in reversed(read.get_ordered_ops()):
        name = operation.get_friendly_name()
        marks = _MARK.findall(name)
        if not marks and name in producers:
            marks.append(str(producers[name]))
        if not marks and operation.get_type_name() not in ("Parameter", "Constant", "Result"):
            for output in operation.outputs():
                for target in output.get_target_inputs():
                    consumer = target.get_node().get_friendly_name()
                    marks += _MARK.findall(mark_of.get(consumer, ""))
        mark_of[name] = "".join(f"htp#{mark}#" for mark in dict.fromkeys(marks))
    for number, operation in enumerate(read.get_ordered_ops()):
        mark = mark_of[operation.get_friendly_name()]
        if mark:
            operation.set_friendly_name(f"{mark}{number}")
