"""The memory that ONNX Runtime allocates for each node, as it records it itself.

ONNX Runtime writes a line for each node of the graph that ran: a name that ends in a hash of the names of its inputs
and outputs, and bytes. It takes the hash of ``core/framework/resource_accountant.cc``, ``MakeUniqueNodeName``.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from htp_export.model.regions import all_nodes
from htp_export.runtime.inputs import Feed
from htp_export.runtime.saved_graphs import session_and_graph
from htp_export.runtime.sessions import OptionChanges, RunnableModel, SessionSettings

_STATISTICS = "session.collect_node_memory_stats_to_file"
_MASK = 0xFFFFFFFF
_FACTORS = (0x239B961B, 0xAB0E9789, 0x38B34AE5, 0xA1E38B93)
_ROTATIONS = (15, 16, 17, 18)
_MIXED = ((19, 0x561CCD1B), (17, 0x0BCAA747), (15, 0x96CD1C35), (13, 0x32AC3B17))


@dataclass(frozen=True)
class NodeMemory:
    """What ONNX Runtime allocated for a node, as the record names it, in one run: for its outputs, and while it ran.

    An output that takes the memory of an input has none. ``op_type`` is empty if no node of the graph has the name;
    ``nodes`` are several if names of tensors repeat in subgraphs.
    """

    name: str
    op_type: str
    bytes: int
    nodes: tuple[ir.Node, ...]


def measured_memory(
    model: RunnableModel, settings: SessionSettings, feed: Feed, temporary: Path
) -> tuple[list[NodeMemory], ir.Model | None]:
    """Run a model once, and return what ONNX Runtime allocated for each of its nodes, and the graph that ran.

    Buffers are not reused, so that each node has its own: otherwise only the first of many with equal sizes would have
    any. A node that writes over its input allocates nothing. A node in a loop counts once. The graph is None if ONNX
    Runtime cannot write it.
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
            found.append(NodeMemory(name.rpartition("_")[0], op_type, int(outputs) + int(inside), tuple(nodes)))
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
