"""A model that OpenVINO has compiled: its performance counters, the graph that it runs, and the owners of its nodes."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import onnx_ir as ir

from htp_export.capabilities.profile.engine_entries import Entry, entry_kernels
from htp_export.capabilities.profile.kernels import Kernel, Timed
from htp_export.errors import InputError, ToolError, in_one_line
from htp_export.files.model_files import write_for_tool
from htp_export.model.regions import all_nodes
from htp_export.model.tagged import TaggedModel
from htp_export.process.progress import counted
from htp_export.runtime.inputs import Feed
from htp_export.runtime.sessions import RunnableModel

__all__ = ["EngineNode", "OpenvinoSession", "openvino_kernels"]

_MARK = re.compile(r"htp#(\d+)#")
"""What stands in the name of everything that OpenVINO makes of an original node: its number."""
_NUMBERED = re.compile(r"(?:htp#\d+#)+\d+")


@dataclass(frozen=True)
class EngineNode:
    """A node of the graph that OpenVINO runs.

    Attributes:
        name: Its name, which tells it from others.
        label: Its name, with those of the original nodes.
        kind: What OpenVINO calls it.
        ms: Its mean time in the measured runs; None if it did not run.
        nodes: The original nodes that were merged into it; none for an inserted node.
        inputs: The names of the nodes whose results it reads.
    """

    name: str
    label: str
    kind: str
    ms: float | None
    nodes: tuple[ir.Node, ...]
    inputs: tuple[str, ...]


class OpenvinoSession:
    """A model that OpenVINO has compiled, once with performance counters and once without.

    Args:
        model: The model, without functions; not changed.
        name: Its name in errors.
        options: OpenVINO's properties, as for ``openvino.Core.compile_model``.
        temporary: A folder, in which the model is written if OpenVINO cannot read it from memory.

    Attributes:
        device: The device that it runs on.

    Raises:
        InputError: If OpenVINO is not installed.
        ToolError: If it cannot read or compile the model.
    """

    device = "CPU"

    def __init__(self, model: ir.Model, name: str, options: Mapping[str, Any], temporary: Path) -> None:
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
            _mark_parts(read, {value.name: k for k, node in enumerate(self._nodes) for value in node.outputs})
            self._plain = core.compile_model(read, self.device, dict(options))
            self._counting = core.compile_model(read, self.device, {**options, "PERF_COUNT": "YES"})
        except Exception as error:  # OpenVINO's errors share no base but this
            raise ToolError("OpenVINO", f"cannot load {name}: {in_one_line(error)}") from error

    def run(self, feed: Feed, warmup: int, runs: int) -> list[float]:
        """Run the model several times without counters, and return the time of each run after the first, in ms.

        Args:
            feed: The inputs.
            warmup: Number of runs that are not measured.
            runs: Number of runs that are.

        Raises:
            ToolError: If it cannot run on these inputs.
        """
        return self._timed(self._plain.create_infer_request(), feed, warmup + runs)[warmup:]

    def run_counting(self, feed: Feed, warmup: int, runs: int) -> tuple[list[float], list[EngineNode]]:
        """Run the model several times with counters.

        Counters are means since the model was compiled, in whole microseconds: those of the runs before are taken off.

        Returns:
            The time of each measured run, in ms, and the graph that OpenVINO runs, in the order of execution.

        Raises:
            ToolError: If it cannot run on these inputs.
        """
        request = self._counting.create_infer_request()
        self._timed(request, feed, warmup)
        before = {info.node_name: info.real_time for info in request.profiling_info} if warmup else {}
        walls = self._timed(request, feed, runs)
        kinds, times = {}, {}
        for info in request.profiling_info:
            early = before.get(info.node_name, timedelta()) * warmup
            kinds[info.node_name] = info.node_type
            times[info.node_name] = max(0.0, ((info.real_time * (warmup + runs) - early) / runs).total_seconds() * 1000)
        return walls, [
            *self._graph(kinds, times),
            *(EngineNode(name, self._label(name), kinds[name], times[name], (), ()) for name in times),
        ]

    def _graph(self, kinds: Mapping[str, str], times: dict[str, float]) -> list[EngineNode]:
        """The nodes of the graph, with their times, which are taken out of `times`."""
        nodes = []
        for node in self._counting.get_runtime_model().get_ordered_ops():
            facts, name = node.get_rt_info(), node.get_friendly_name()
            merged = facts["originalLayersNames"].astype(str) if "originalLayersNames" in facts else ""
            numbers = dict.fromkeys(int(number) for number in _MARK.findall(merged))
            inputs = (each.get_source_output().get_node().get_friendly_name() for each in node.inputs())
            originals = tuple(self._nodes[number] for number in numbers)
            kind, ms = kinds.get(name, ""), times.pop(name, None)
            nodes.append(EngineNode(name, self._label(name), kind, ms, originals, tuple(inputs)))
        return nodes

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

    OpenVINO's reader makes several operations of one node, and names the last after the node, or after its output if
    the model has that output. The others are between: they get the marks of their consumers.
    """
    found: dict[str, str] = {}
    for operation in reversed(read.get_ordered_ops()):
        name = operation.get_friendly_name()
        marks = _MARK.findall(name)
        if not marks and name in makers:
            marks.append(str(makers[name]))
        if not marks and operation.get_type_name() not in ("Parameter", "Constant", "Result"):
            readers = (each.get_node() for output in operation.outputs() for each in output.get_target_inputs())
            marks = _MARK.findall("".join(found.get(reader.get_friendly_name(), "") for reader in readers))
        found[name] = "".join(f"htp#{mark}#" for mark in dict.fromkeys(marks))
    for number, operation in enumerate(read.get_ordered_ops()):
        if mark := found[operation.get_friendly_name()]:
            operation.set_friendly_name(f"{mark}{number}")


def openvino_kernels(nodes: Sequence[EngineNode], device: str, tagged: TaggedModel) -> tuple[Kernel, ...]:
    """Return the nodes that take time, with their owners.

    Args:
        nodes: The graph that OpenVINO runs, constants and fused nodes included.
        device: The device that it runs on.
        tagged: The original model, without functions.
    """
    entries = [
        Entry(Timed(node.label, node.kind, device, node.ms or 0.0, 1.0), node.nodes, node.inputs, (node.name,))
        for node in nodes
    ]
    kernels = entry_kernels(entries, tagged)
    return tuple(kernel for kernel, node in zip(kernels, nodes, strict=True) if node.ms)
