"""What ONNX Runtime records of a session: the graph that it runs, the time of each kernel, and the memory of each node.

It writes a line about memory for each node of the graph that ran: a name that ends in a hash of the
names of its inputs and outputs, and bytes. It takes the hash of
``core/framework/resource_accountant.cc``, ``MakeUniqueNodeName``.
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
from typing import Any

import onnx
import onnx_ir as ir

from htp_export.errors import OnnxRuntimeError
from htp_export.model.regions import all_nodes
from htp_export.process.progress import counted
from htp_export.process.restoring import no_collection
from htp_export.runtime.inputs import Feed
from htp_export.runtime.sessions import (
    LARGE_BYTES,
    OptionChanges,
    RunnableModel,
    Session,
    SessionSettings,
)

_EXTERNAL_FILE = "session.optimized_model_external_initializers_file_name"
_EXTERNAL_SIZE = "session.optimized_model_external_initializers_min_size_in_bytes"


def session_and_graph(
    model: RunnableModel,
    settings: SessionSettings,
    folder: Path,
    changes: OptionChanges | None = None,
) -> tuple[Session, ir.Model | None]:
    """Return a session and its optimised graph, without the values of weights.

    The graph is None if ONNX Runtime cannot write one, because an execution provider compiles parts
    of it. ONNX Runtime writes weights that are not in a file into the graph, or, which takes
    longer, into a file beside it if they are too large for a protobuf message. All files are in
    ``folder``.
    """
    changes = changes or OptionChanges()
    attempts: Sequence[str] = (
        ["within", "beside", "none"] if model.size < LARGE_BYTES else ["beside", "none"]
    )
    first: OnnxRuntimeError | None = None
    for attempt in attempts:
        written = folder / f"{attempt}.onnx"
        entries = (
            {_EXTERNAL_FILE: f"{written.name}.data", _EXTERNAL_SIZE: "1024"}
            if attempt == "beside"
            else {}
        )
        path = os.fspath(written) if attempt != "none" else ""
        attributes = {**changes.attributes, "optimized_model_filepath": path}
        try:
            session = Session(
                model, settings, OptionChanges(attributes, {**changes.entries, **entries})
            )
        except OnnxRuntimeError as error:
            first = first or error
        else:
            return session, ir.from_proto(
                onnx.load(written, load_external_data=False)
            ) if path else None
    assert first is not None
    raise first


_KERNEL = "_kernel_time"
_EXECUTE = "Executor::Execute"
QUEUED = frozenset(
    f"{name}ExecutionProvider"
    for name in ("CUDA", "Tensorrt", "NvTensorRTRTX", "ROCM", "MIGraphX", "Dml", "WebGpu", "CANN")
)
"""Execution providers that put kernels in a queue of a device and return at once."""
_ON_DEVICE = "device kernel"


@dataclass(frozen=True)
class KernelKey:
    """A kernel, as it is identified in the trace: its label, which is the node's name, or operator and index.

    ``index`` is that of the node in its graph; ``holders`` are the kernels whose subgraphs contain
    it, the outermost first.
    """

    label: str
    op_type: str
    index: int
    provider: str = field(default="", compare=False)
    holders: tuple[KernelKey, ...] = ()


@dataclass(frozen=True)
class Trace:
    """Times of kernels in several runs: each kernel's own, in ms, by run, in the order of their first launch.

    ``timing`` is ``kernels``; ``launches`` if kernels on a device were only put in its queue, and
    the trace does not have their times on the device.
    """

    runs: int
    times: Mapping[KernelKey, Sequence[float]]
    launches: Mapping[KernelKey, int]
    timing: str = "kernels"

    def typical(self, key: KernelKey) -> float:
        """Return the time of a kernel in ms: the mean over the middle half of the runs, sorted by their total time.

        Like a median, this ignores runs with interruptions, but the times of all kernels add up to
        the time of a run. Medians of kernels do not: on a busy machine each run is interrupted
        elsewhere, and their sum is a third of it.
        """
        return statistics.fmean(self.times[key][run] for run in self._middle)

    @cached_property
    def _middle(self) -> list[int]:
        totals = [
            math.fsum(times[run] for times in self.times.values()) for run in range(self.runs)
        ]
        order = sorted(range(self.runs), key=totals.__getitem__)
        cut = self.runs // 4
        return order[cut : self.runs - cut]


class ProfiledSession:
    """A session under ONNX Runtime's profiler.

    ``optimized`` is the optimised graph, without the values of weights; None if ONNX Runtime cannot
    write it, because an execution provider compiles parts of it.
    """

    def __init__(self, model: RunnableModel, settings: SessionSettings, temporary: Path) -> None:
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


@dataclass
class _Event:
    key: KernelKey | None
    start: int
    duration: int
    inside: list[_Event]
    on_device: int = 0

    def kernels(
        self, holders: tuple[KernelKey, ...] = ()
    ) -> Iterator[tuple[KernelKey, int, int, int]]:
        """Iterate over this kernel and those inside: key, start, own duration and time on a device, in microseconds."""
        if self.key is None:
            for event in self.inside:
                yield from event.kernels(holders)
            return
        key = KernelKey(
            self.key.label, self.key.op_type, self.key.index, self.key.provider, holders
        )
        inside = [kernel for event in self.inside for kernel in event.kernels((*holders, key))]
        yield (
            key,
            self.start,
            max(0, self.duration - sum(duration for _, _, duration, _ in inside)),
            self.on_device,
        )
        yield from inside


def read_trace(path: Path, runs: int) -> Trace:
    """Read the last runs of a profile that ``InferenceSession.end_profiling`` wrote; earlier ones are warm-up.

    Incomplete runs are left out: the profiler stops after a million events.
    """
    with no_collection():
        return _trace(json.loads(path.read_bytes()), runs)


def _trace(events: Sequence[Mapping[str, Any]], runs: int) -> Trace:
    windows = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("name") == "model_run"][
        -runs:
    ]
    first = windows[0][0] if windows else 0
    late = [event for event in events if event.get("ts", first) >= first]
    kernels = sorted(
        (kernel for event in _nested(late) for kernel in event.kernels()),
        key=lambda kernel: kernel[1],
    )
    measured = {key.provider for key, _, _, on_device in kernels if on_device}
    launches_only = bool({key.provider for key, _, _, _ in kernels} & QUEUED - measured)
    times: defaultdict[KernelKey, list[float]] = defaultdict(lambda: [0.0] * len(windows))
    launches: defaultdict[KernelKey, int] = defaultdict(int)
    run = 0
    for key, start, duration, on_device in kernels:
        if launches_only and key.provider == _ON_DEVICE:
            continue  # its launch has a time already
        while run < len(windows) and start > windows[run][1]:
            run += 1
        if run < len(windows) and start >= windows[run][0]:
            times[key][run] += (on_device if key.provider in measured else duration) / 1000
            launches[key] += 1
    return Trace(
        len(windows), dict(times), dict(launches), "launches" if launches_only else "kernels"
    )


def _nested(events: Sequence[Mapping[str, Any]]) -> list[_Event]:
    """Return the kernels of the main graph, with the events inside them.

    An event is written when it ends, after the events inside it. Only kernels contain executions of
    graphs, and only executions contain kernels; an event is inside the next one on its thread that
    started before it.
    """
    open_events: defaultdict[int, list[_Event]] = defaultdict(list)
    launched: dict[str, _Event] = {}
    for event in events:
        name = str(event.get("name", ""))
        if event.get("cat") == "Kernel":
            _add_to_launch(event, launched, open_events)
            continue
        kernel = event.get("cat") == "Node" and name.endswith(_KERNEL)
        if not kernel and not name.endswith(_EXECUTE):
            continue
        arguments = event.get("args", {})
        key = None
        if kernel:
            label = name.removesuffix(_KERNEL)
            index = int(arguments.get("node_index", -1))
            key = KernelKey(
                label, str(arguments.get("op_name", "")), index, str(arguments.get("provider", ""))
            )
        before = open_events[event["tid"]]
        inside: list[_Event] = []
        while before and before[-1].start >= event["ts"] and (before[-1].key is None) == kernel:
            inside.append(before.pop())
        before.append(_Event(key, event["ts"], event["dur"], inside[::-1]))
        launched[name] = before[-1]
    return [event for thread in open_events.values() for event in thread]


def _add_to_launch(
    event: Mapping[str, Any],
    launched: Mapping[str, _Event],
    open_events: Mapping[int, list[_Event]],
) -> None:
    """Add the time of a kernel on a device to the node that launched it, whose event stands before it.

    ONNX Runtime does not find the node of each: those without are kernels of their own, which
    belong to no module.
    """
    launch = launched.get(str(event.get("args", {}).get("parent_name", "")))
    if launch is not None and launch.key is not None:
        launch.on_device += event["dur"]
        return
    key = KernelKey(str(event.get("name", "")), _ON_DEVICE, -1, _ON_DEVICE)
    open_events[event["tid"]].append(_Event(key, event["ts"], event["dur"], [], event["dur"]))


_STATISTICS = "session.collect_node_memory_stats_to_file"
# 32 bits; the numbers below are those of MurmurHash3_x86_128, which ONNX Runtime uses
_MASK = 0xFFFFFFFF
_FACTORS = (0x239B961B, 0xAB0E9789, 0x38B34AE5, 0xA1E38B93)  # multiplied with each word
_ROTATIONS = (15, 16, 17, 18)  # of each word, in bits
_MIXED = ((19, 0x561CCD1B), (17, 0x0BCAA747), (15, 0x96CD1C35), (13, 0x32AC3B17))


@dataclass(frozen=True)
class NodeMemory:
    """What ONNX Runtime allocated for a node, as the record names it, in one run: for its outputs, and while it ran.

    An output that takes the memory of an input has none. ``op_type`` is empty if no node of the
    graph has the name; ``nodes`` are several if names of tensors repeat in subgraphs.
    """

    name: str
    op_type: str
    bytes: int
    nodes: tuple[ir.Node, ...]


def measured_memory(
    model: RunnableModel, settings: SessionSettings, feed: Feed, temporary: Path
) -> tuple[list[NodeMemory], ir.Model | None]:
    """Run a model once, and return what ONNX Runtime allocated for each of its nodes, and the graph that ran.

    Buffers are not reused, so that each node has its own: otherwise only the first of many with
    equal sizes would have any. A node that writes over its input allocates nothing. A node in a
    loop counts once. The graph is None if ONNX Runtime cannot write it.
    """
    import onnxruntime

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
    del session  # it writes the record when it is closed
    return _read(file, optimized or model.model), optimized


def _read(file: Path, graph: ir.Model | None) -> list[NodeMemory]:
    known: defaultdict[str, list[ir.Node]] = defaultdict(list)
    for node in all_nodes(graph) if graph is not None else ():
        known[node_key(node)].append(node)
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            name, _, _, outputs, inside = line.rsplit(",", 4)
            nodes = known.get(name, [])
            op_type = nodes[0].op_type if nodes else ""
            found.append(
                NodeMemory(
                    name.rpartition("_")[0], op_type, int(outputs) + int(inside), tuple(nodes)
                )
            )
    return found


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
    """MurmurHash3 x86_128 of some bytes, as four numbers of 32 bits."""
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
    return _together(_final(each) for each in _together(each ^ len(data) for each in state))


def _together(state: Iterable[int]) -> tuple[int, int, int, int]:
    first, *others = state
    first = (first + sum(others)) & _MASK
    second, third, fourth = ((each + first) & _MASK for each in others)
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
