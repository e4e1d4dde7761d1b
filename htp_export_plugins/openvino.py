"""OpenVINO as an engine of ``profile``: the times of its performance counters, and the owners of what it runs."""

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
from htp_export.errors import InputError, ToolError, in_one_line
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
"""What stands in the name of everything that OpenVINO makes of an original node: its number."""
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
    """Run a model without functions on OpenVINO's CPU device, with performance counters and without.

    ``options`` are properties as for ``openvino.Core.compile_model``. The model is written to
    ``folder`` if OpenVINO cannot read it from memory. What it cannot read, compile or run is a
    `ToolError`.
    """
    session = _Session(tagged.model, name, options, folder)

    def once() -> Measurement:
        profiled, entries = session.run_counting(feed, warmup, runs)
        kernels = [kernel for kernel in entry_kernels(entries, tagged) if kernel.ms]
        plain = session.run(feed, warmup, runs)
        return Measurement(kernels, profiled, plain, (f"OpenVINO {_DEVICE}",), runs=runs)

    return consistent(once)


class _Session:
    """A model that OpenVINO has compiled, once with performance counters and once without."""

    def __init__(
        self, model: ir.Model, name: str, options: Mapping[str, Any], temporary: Path
    ) -> None:
        try:
            import openvino
        except ImportError as error:
            raise InputError(
                "engine 'openvino' needs OpenVINO; install it with: pip install 'htp-export[openvino]'"
            ) from error
        self._name, self._nodes = name, list(all_nodes(model))
        try:
            core = openvino.Core()
            read = core.read_model(_marked(model, temporary))
            _mark_parts(
                read,
                {value.name: k for k, node in enumerate(self._nodes) for value in node.outputs},
            )
            self._plain = core.compile_model(read, _DEVICE, dict(options))
            self._counting = core.compile_model(read, _DEVICE, {**options, "PERF_COUNT": "YES"})
        except Exception as error:  # OpenVINO's errors share no base but this
            raise ToolError("OpenVINO", f"cannot load {name}: {in_one_line(error)}") from error

    def run(self, feed: Feed, warmup: int, runs: int) -> list[float]:
        """Run the model several times without counters: the times of the measured runs, in ms."""
        return self._timed(self._plain.create_infer_request(), feed, warmup + runs)[warmup:]

    def run_counting(self, feed: Feed, warmup: int, runs: int) -> tuple[list[float], list[Entry]]:
        """Run the model several times with counters: the times of the measured runs, and what ran, in order.

        Counters are means since the model was compiled, in whole microseconds: those of the runs
        before are taken off.
        """
        request = self._counting.create_infer_request()
        self._timed(request, feed, warmup)
        before = (
            {info.node_name: info.real_time for info in request.profiling_info} if warmup else {}
        )
        walls = self._timed(request, feed, runs)
        kinds, times = {}, {}
        for info in request.profiling_info:
            early = before.get(info.node_name, timedelta()) * warmup
            kinds[info.node_name] = info.node_type
            times[info.node_name] = max(
                0.0, ((info.real_time * (warmup + runs) - early) / runs).total_seconds() * 1000
            )
        entries = self._graph(kinds, times)
        return walls, [
            *entries,
            *(Entry(self._kernel(name, kinds[name], ms), ()) for name, ms in times.items()),
        ]

    def _graph(self, kinds: Mapping[str, str], times: dict[str, float]) -> list[Entry]:
        """The nodes of the graph that runs, with their times, which are taken out of `times`; 0 if one did not run."""
        entries = []
        for node in self._counting.get_runtime_model().get_ordered_ops():
            facts, name = node.get_rt_info(), node.get_friendly_name()
            merged = (
                facts["originalLayersNames"].astype(str) if "originalLayersNames" in facts else ""
            )
            numbers = dict.fromkeys(int(number) for number in _MARK.findall(merged))
            inputs = [
                source.get_source_output().get_node().get_friendly_name()
                for source in node.inputs()
            ]
            kernel = self._kernel(name, kinds.get(name, ""), times.pop(name, 0.0))
            entries.append(
                Entry(kernel, [self._nodes[number] for number in numbers], inputs, [name])
            )
        return entries

    def _kernel(self, name: str, kind: str, ms: float) -> Kernel:
        return Kernel(self._label(name), kind, _DEVICE, ms, 1.0)

    def _label(self, name: str) -> str:
        def original(match: re.Match[str]) -> str:
            marked = (self._nodes[int(number)] for number in _MARK.findall(match[0]))
            return ", ".join(node.name or node.op_type for node in marked)

        return _NUMBERED.sub(original, name)

    def _timed(self, request: Any, feed: Feed, runs: int) -> list[float]:
        known = {name for each in self._plain.inputs for name in each.get_names()}
        arrays = {name: array for name, array in feed.arrays.items() if name in known}
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
    """A copy of a model whose nodes are named by their numbers, as OpenVINO reads it."""
    copy = model.clone()
    for number, node in enumerate(all_nodes(copy)):
        node.name = f"htp#{number}#"
    runnable = RunnableModel.of(copy, "", temporary)
    if isinstance(runnable.source, Path) or runnable.folder is None:
        return runnable.source
    write_for_tool(copy, temporary / "model.onnx")
    return temporary / "model.onnx"


def _mark_parts(read: Any, makers: Mapping[str | None, int]) -> None:
    """Mark what has no name of an original node in the model as OpenVINO read it.

    OpenVINO's reader makes several operations of one node, and names the last after the node, or
    after its output if the model has that output. The others are between: they get the marks of
    their consumers.
    """
    found: dict[str, str] = {}
    for operation in reversed(read.get_ordered_ops()):
        name = operation.get_friendly_name()
        marks = _MARK.findall(name)
        if not marks and name in makers:
            marks.append(str(makers[name]))
        if not marks and operation.get_type_name() not in ("Parameter", "Constant", "Result"):
            readers = (
                each.get_node()
                for output in operation.outputs()
                for each in output.get_target_inputs()
            )
            marks = _MARK.findall(
                "".join(found.get(reader.get_friendly_name(), "") for reader in readers)
            )
        found[name] = "".join(f"htp#{mark}#" for mark in dict.fromkeys(marks))
    for number, operation in enumerate(read.get_ordered_ops()):
        if mark := found[operation.get_friendly_name()]:
            operation.set_friendly_name(f"{mark}{number}")
