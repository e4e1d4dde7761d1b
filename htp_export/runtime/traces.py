"""Records of ONNX Runtime about a session: the optimised graph, the time of each kernel, the memory of each node.

The record of memory has a line for each node of the optimised graph: bytes, and a name that ends in
a hash of the names of its inputs and outputs. The hash is that of ``MakeUniqueNodeName`` in
``core/framework/resource_accountant.cc``.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import struct
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import onnx_ir as ir

from htp_export.errors import OnnxRuntimeError
from htp_export.extras import required
from htp_export.model.regions import all_nodes
from htp_export.process.progress import counted
from htp_export.process.restoring import no_collection
from htp_export.runtime.inputs import Feed
from htp_export.runtime.sessions import (
    LARGE_BYTES,
    OptionChanges,
    RunnableModel,
    Session,
)
from htp_export.runtime.settings import RunSettings

_EXTERNAL_FILE = "session.optimized_model_external_initializers_file_name"
_EXTERNAL_SIZE = "session.optimized_model_external_initializers_min_size_in_bytes"


def session_and_graph(
    model: RunnableModel,
    settings: RunSettings,
    folder: Path,
    changes: OptionChanges | None = None,
) -> tuple[Session, ir.Model | None]:
    """Return a session and its optimised graph, without the values of weights.

    The graph is None if ONNX Runtime cannot write one, because an execution provider compiles parts
    of it. ONNX Runtime writes weights that are not in a file into the graph or, if they are too
    large for a protobuf message, into a file beside it, which is slower. All files are in
    ``folder``.
    """
    changes = changes or OptionChanges()
    attempts = ["beside", "none"]  # where to write the weights; "none": write no graph
    if model.size < LARGE_BYTES:
        attempts.insert(0, "within")
    first_error: OnnxRuntimeError | None = None
    for attempt in attempts:
        file = folder / f"{attempt}.onnx"
        path = os.fspath(file) if attempt != "none" else ""
        attributes = {**changes.attributes, "optimized_model_filepath": path}
        entries = dict(changes.entries)
        if attempt == "beside":
            entries |= {_EXTERNAL_FILE: f"{file.name}.data", _EXTERNAL_SIZE: "1024"}
        try:
            session = Session(model, settings, OptionChanges(attributes, entries))
        except OnnxRuntimeError as error:
            first_error = first_error or error
            continue
        if not path:
            return session, None
        return session, ir.from_proto(onnx.load(file, load_external_data=False))
    assert first_error is not None
    raise first_error


RUN = "model_run"
"""Name of the event of a run."""
_KERNEL = "_kernel_time"
_DEEPEST = 100  # kernels in the subgraphs of kernels; each has an execution between them


class DeepTrace(ValueError):  # noqa: N818 - it is a fault of the file
    """The kernels of a trace are nested too deeply."""


_EXECUTE = "Executor::Execute"
QUEUED = frozenset(
    f"{name}ExecutionProvider"
    for name in ("CUDA", "Tensorrt", "NvTensorRTRTX", "ROCM", "MIGraphX", "Dml", "WebGpu", "CANN")
)
"""Execution providers that put kernels into a queue of a device and return at once."""
_ON_DEVICE = "device kernel"


@dataclass(frozen=True)
class KernelKey:
    """The identity of a kernel in the trace: its label is the name of its node, or the operator and the index.

    ``index`` is that of the node in its graph; ``holders`` are the kernels whose subgraphs contain
    it, outermost first.
    """

    label: str
    op_type: str
    index: int
    provider: str = field(default="", compare=False)
    holders: tuple[KernelKey, ...] = ()


@dataclass(frozen=True)
class Trace:
    """Times of kernels in several runs, in ms, without nested kernels, in the order of their first launch.

    ``times``: kernel → its time in each run. ``timing`` is ``kernels``, or ``launches`` if the
    trace contains only the times to put kernels into the queue of a device. ``run_ms`` are the
    times of the runs, under the profiler.
    """

    runs: int
    times: Mapping[KernelKey, Sequence[float]]
    launches: Mapping[KernelKey, int]
    timing: str = "kernels"
    run_ms: Sequence[float] = ()

    def typical(self, key: KernelKey) -> float:
        """Return the time of a kernel in ms: the mean over the middle half of the runs, sorted by their total time.

        Like a median, this ignores runs with interruptions, but the times of all kernels add up to
        the time of a run. Medians of kernels do not: on a busy machine, each run is interrupted in
        another kernel, and the sum of the medians is a third of the time of a run.
        """
        return statistics.fmean(self.times[key][run] for run in self._middle)

    @cached_property
    def _middle(self) -> list[int]:
        def total(run: int) -> float:
            return math.fsum(times[run] for times in self.times.values())

        totals = list(map(total, range(self.runs)))
        order = sorted(range(self.runs), key=totals.__getitem__)
        cut = self.runs // 4
        return order[cut : self.runs - cut]


class ProfiledSession:
    """A session with ONNX Runtime's profiler.

    ``optimized`` is the optimised graph, without the values of weights; None if ONNX Runtime cannot
    write it, because an execution provider compiles parts of it.
    """

    def __init__(self, model: RunnableModel, settings: RunSettings, temporary: Path) -> None:
        profiling = {
            "enable_profiling": True,
            "profile_file_prefix": os.fspath(temporary / "profile"),
        }
        self._session, self.optimized = session_and_graph(
            model, settings, temporary, OptionChanges(profiling)
        )

    @property
    def providers(self) -> tuple[str, ...]:
        """The execution providers in use."""
        return self._session.providers

    def run(self, feed: Feed, runs: int) -> list[float]:
        """Run the model several times, and return the time of each run, in ms."""
        values = self._session.values(feed.arrays, feed.types)
        times = []
        for _ in counted(range(runs), "runs"):
            start = time.perf_counter()
            self._session.run_values(values)
            times.append((time.perf_counter() - start) * 1000)
        return times

    def end_profiling(self, runs: int) -> Trace:
        """Stop the profiler, and read its trace of the last runs."""
        return read_trace(self._session.end_profiling(), runs)


class _Kernel(NamedTuple):
    """One launch of a kernel; ``duration`` is without nested kernels. Times are in microseconds."""

    key: KernelKey
    start: int
    duration: int
    on_device: int


@dataclass
class _Event:
    """A kernel, or the execution of a graph, which has no key; ``inside``: the events nested in it."""

    key: KernelKey | None
    start: int
    duration: int
    inside: list[_Event]
    on_device: int = 0
    depth: int = 0

    def kernels(self, holders: tuple[KernelKey, ...] = ()) -> Iterator[_Kernel]:
        """Iterate over this kernel and the nested ones."""
        if self.key is None:
            for event in self.inside:
                yield from event.kernels(holders)
            return
        own = self.key
        key = KernelKey(own.label, own.op_type, own.index, own.provider, holders)
        nested: list[_Kernel] = []
        for event in self.inside:
            nested += event.kernels((*holders, key))
        own_duration = self.duration - sum(kernel.duration for kernel in nested)
        yield _Kernel(key, self.start, max(0, own_duration), self.on_device)
        yield from nested


def read_trace(path: Path, runs: int) -> Trace:
    """Read the last runs of a profile of ``InferenceSession.end_profiling``; earlier runs are warm-up.

    Incomplete runs are left out: the profiler stops after a million events.
    """
    with no_collection():
        return trace_of_events(json.loads(path.read_bytes()), runs)


def trace_of_events(events: Sequence[Mapping[str, Any]], runs: int) -> Trace:
    """The last runs in the events of a profile, in the order of the file.

    Raises:
        DeepTrace: Kernels are nested deeper than those of any model.
    """
    run_events = [event for event in events if event.get("name") == RUN]
    windows = [(event["ts"], event["ts"] + event["dur"]) for event in run_events[-runs:]]
    first = windows[0][0] if windows else 0
    kernels = _kernels_by_start([event for event in events if event.get("ts", first) >= first])
    providers = {kernel.key.provider for kernel in kernels}
    measured = {kernel.key.provider for kernel in kernels if kernel.on_device}
    launches_only = not providers.isdisjoint(QUEUED - measured)
    times: defaultdict[KernelKey, list[float]] = defaultdict(lambda: [0.0] * len(windows))
    launches: defaultdict[KernelKey, int] = defaultdict(int)
    for run, kernel in _in_runs(kernels, windows):
        key = kernel.key
        if launches_only and key.provider == _ON_DEVICE:
            continue  # the time of its launch is counted
        time_us = kernel.on_device if key.provider in measured else kernel.duration
        times[key][run] += time_us / 1000
        launches[key] += 1
    timing = "launches" if launches_only else "kernels"
    run_ms = [(end - start) / 1000 for start, end in windows]
    return Trace(len(windows), dict(times), dict(launches), timing, run_ms)


def _in_runs(
    kernels: Iterable[_Kernel], windows: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, _Kernel]]:
    """The kernels that started during a run, each with the number of the run; both are in order of time."""
    run = 0
    for kernel in kernels:
        while run < len(windows) and kernel.start > windows[run][1]:
            run += 1
        if run < len(windows) and kernel.start >= windows[run][0]:
            yield run, kernel


def _kernels_by_start(events: Sequence[Mapping[str, Any]]) -> list[_Kernel]:
    kernels: list[_Kernel] = []
    for event in _nested(events):
        kernels += event.kernels()
    kernels.sort(key=lambda kernel: kernel.start)
    return kernels


def _nested(events: Sequence[Mapping[str, Any]]) -> list[_Event]:
    """Return the kernels of the main graph, with their nested events.

    An event is written when it ends, after its nested events. Only kernels contain executions of
    graphs, and only executions contain kernels; an event is nested in the next one on its thread
    that started before it.
    """
    open_events: defaultdict[int, list[_Event]] = defaultdict(list)
    launched: dict[str, _Event] = {}
    for event in events:
        name = str(event.get("name", ""))
        if event.get("cat") == "Kernel":
            _add_to_launch(event, launched, open_events)
            continue
        is_kernel = event.get("cat") == "Node" and name.endswith(_KERNEL)
        if not is_kernel and not name.endswith(_EXECUTE):
            continue
        key = _kernel_key(name, event.get("args", {})) if is_kernel else None
        before = open_events[event["tid"]]
        inside: list[_Event] = []
        while before and before[-1].start >= event["ts"] and (before[-1].key is None) == is_kernel:
            inside.append(before.pop())
        depth = 1 + max((nested.depth for nested in inside), default=0)
        if depth > 2 * _DEEPEST:
            raise DeepTrace(f"its kernels are nested deeper than {_DEEPEST} levels")
        before.append(_Event(key, event["ts"], event["dur"], inside[::-1], depth=depth))
        launched[name] = before[-1]
    return [event for thread in open_events.values() for event in thread]


def _kernel_key(name: str, arguments: Mapping[str, Any]) -> KernelKey:
    return KernelKey(
        name.removesuffix(_KERNEL),
        str(arguments.get("op_name", "")),
        int(arguments.get("node_index", -1)),
        str(arguments.get("provider", "")),
    )


def _add_to_launch(
    event: Mapping[str, Any],
    launched: Mapping[str, _Event],
    open_events: Mapping[int, list[_Event]],
) -> None:
    """Add the time of a kernel on a device to the node that launched it, whose event is earlier.

    ONNX Runtime does not record the node of every kernel: one without a node is a kernel of its
    own, which belongs to no module.
    """
    launch = launched.get(str(event.get("args", {}).get("parent_name", "")))
    if launch is not None and launch.key is not None:
        launch.on_device += event["dur"]
        return
    key = KernelKey(str(event.get("name", "")), _ON_DEVICE, -1, _ON_DEVICE)
    open_events[event["tid"]].append(_Event(key, event["ts"], event["dur"], [], event["dur"]))


_STATISTICS = "session.collect_node_memory_stats_to_file"
# 32 bits; the constants below are those of MurmurHash3_x86_128, which ONNX Runtime uses
_MASK = 0xFFFFFFFF
_FACTORS = (0x239B961B, 0xAB0E9789, 0x38B34AE5, 0xA1E38B93)  # multiplied with each word
_ROTATIONS = (15, 16, 17, 18)  # of each word, in bits
_MIXED = ((19, 0x561CCD1B), (17, 0x0BCAA747), (15, 0x96CD1C35), (13, 0x32AC3B17))


@dataclass(frozen=True)
class NodeMemory:
    """The bytes that ONNX Runtime allocated for a node in one run: for its outputs, and temporarily.

    An output in the memory of an input counts 0. ``name`` is that of the record; ``op_type`` is
    empty if no node of the graph has this name; there are several ``nodes`` if names of tensors are
    repeated in subgraphs.
    """

    name: str
    op_type: str
    bytes: int
    nodes: tuple[ir.Node, ...]


def measured_memory(
    model: RunnableModel, settings: RunSettings, feed: Feed, temporary: Path
) -> tuple[list[NodeMemory], ir.Model | None]:
    """Run a model once, and return the memory that ONNX Runtime allocated for each node, and the optimised graph.

    Buffers are not reused, so that each node has its own: otherwise, of many buffers of the same
    size, only the first one would be allocated. A node that overwrites its input allocates nothing.
    A node in a loop counts once. The graph is None if ONNX Runtime cannot write it.
    """
    onnxruntime = required("onnxruntime")

    file = temporary / "memory.csv"
    attributes = {
        "enable_mem_pattern": False,
        "enable_mem_reuse": False,
        "execution_mode": onnxruntime.ExecutionMode.ORT_SEQUENTIAL,
    }
    session, optimized = session_and_graph(
        model, settings, temporary, OptionChanges(attributes, {_STATISTICS: str(file)})
    )
    session.run_values(session.values(feed.arrays, feed.types))
    del session  # the record is written when the session is closed
    return _read(file, optimized or model.model), optimized


def _read(file: Path, graph: ir.Model | None) -> list[NodeMemory]:
    """Read the record of memory, and find its nodes in the graph."""
    nodes_of_key: defaultdict[str, list[ir.Node]] = defaultdict(list)
    if graph is not None:
        for node in all_nodes(graph):
            nodes_of_key[node_key(node)].append(node)
    records: list[NodeMemory] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        key, _, _, outputs, temporary = line.rsplit(",", 4)
        nodes = tuple(nodes_of_key.get(key, ()))
        op_type = nodes[0].op_type if nodes else ""
        allocated = int(outputs) + int(temporary)
        records.append(NodeMemory(key.rpartition("_")[0], op_type, allocated, nodes))
    return records


def node_key(node: ir.Node) -> str:
    """Return the name of a node in ONNX Runtime's record.

    Examples:
        >>> x, y = ir.val("x"), ir.val("y")
        >>> node_key(ir.node("Neg", [x], outputs=[y], name="act"))
        'act_6214874688972982532'
    """
    state = (0, 0, 0, 0)
    for value in (*node.inputs, *node.outputs):
        state = _murmur3(((value.name if value is not None else "") or "").encode(), state[0])
    return f"{node.name or node.op_type}_{state[0] | state[1] << 32}"


def _murmur3(data: bytes, seed: int) -> tuple[int, int, int, int]:
    """Return the MurmurHash3 x86_128 of bytes as four numbers of 32 bits."""
    state = [seed] * 4
    whole = len(data) // 16 * 16
    for start in range(0, whole, 16):
        for lane, word in enumerate(struct.unpack_from("<4I", data, start)):
            state[lane] ^= _scrambled(word, lane)
            rotation, added = _MIXED[lane]
            state[lane] = (_rotated(state[lane], rotation) + state[(lane + 1) % 4]) & _MASK
            state[lane] = (state[lane] * 5 + added) & _MASK
    rest = data[whole:]
    for lane, word in enumerate(struct.unpack("<4I", rest.ljust(16, b"\0"))):
        state[lane] ^= _scrambled(word, lane) if lane * 4 < len(rest) else 0
    state = list(_together(word ^ len(data) for word in state))
    return _together(map(_final, state))


def _together(state: Iterable[int]) -> tuple[int, int, int, int]:
    first, *others = state
    first = (first + sum(others)) & _MASK
    second, third, fourth = ((word + first) & _MASK for word in others)
    return first, second, third, fourth


def _scrambled(word: int, lane: int) -> int:
    word = _rotated(word * _FACTORS[lane] & _MASK, _ROTATIONS[lane])
    return word * _FACTORS[(lane + 1) % 4] & _MASK


def _rotated(word: int, by: int) -> int:
    return (word << by | word >> (32 - by)) & _MASK


def _final(word: int) -> int:
    word = (word ^ word >> 16) * 0x85EBCA6B & _MASK
    word = (word ^ word >> 13) * 0xC2B2AE35 & _MASK
    return word ^ word >> 16
