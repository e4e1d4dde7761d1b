"""Constants: work on them that could be done beforehand, equal ones, and what nothing needs."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator

import numpy as np
import onnx_ir as ir

from htp_export.errors import FileError
from htp_export.findings.finding import Match
from htp_export.findings.patterns.groups import connected
from htp_export.model.graph_facts import GraphFacts, constant_tensor
from htp_export.passes.constant_work import held_back, room_left
from htp_export.passes.editing import bytes_of

__all__ = ["dead", "duplicates", "unfolded", "unused"]

_COMPARED = 1024  # elements; what is larger, `eliminate_duplicate_constants` does not compare
_HASHED = 1 << 20  # bytes; of what is larger, a sample is compared first
_SAMPLE = 1024  # elements


def unfolded(facts: GraphFacts) -> Iterator[Match]:
    """Nodes that compute the same in every run, those that read each other together."""
    constant = facts.tagged.index.constant
    trivial = ("Constant", "Identity")
    fixed = (n for n in facts.nodes if n.op_type not in trivial and n.outputs and n.outputs[0] in constant)
    for nodes in connected(fixed):
        ops = ", ".join(dict.fromkeys(node.op_type for node in nodes))
        yield Match("unfolded_constants", nodes, ops, _unfoldable(facts, nodes))


def _unfoldable(facts: GraphFacts, nodes: tuple[ir.Node, ...]) -> str:
    """Why `fold_constants` leaves nodes as they are; empty where it does not."""
    functions = {function.graph for function in facts.tagged.model.functions.values()}
    inside, room = set(nodes), room_left(facts.tagged.model)
    for node in nodes:
        if node.graph in functions:
            return "it lies in a function"
        if why := held_back(node):
            return why
    freed = {value: value.const_value for node in nodes for value in node.inputs if value is not None}
    left = sum(bytes_of(t) for value, t in freed.items() if all(use.node in inside for use in value.uses()))
    results = (value for node in nodes for value in node.outputs if any(use.node not in inside for use in value.uses()))
    grown = sum(_size(facts, value) for value in results) - left
    return f"the result is large: {grown:,} bytes more" if grown > room else ""


def _size(facts: GraphFacts, value: ir.Value) -> int:
    """Bytes of a tensor, as far as they are known."""
    sides = facts.shape(value) or ()
    return int(
        math.prod(side for side in sides if isinstance(side, int)) * (value.dtype.itemsize if value.dtype else 4)
    )


def duplicates(facts: GraphFacts) -> Iterator[Match]:
    """Initializers and ``Constant`` nodes that hold the same."""
    groups: defaultdict[Hashable, list[ir.Value]] = defaultdict(list)
    for value, tensor in _constants(facts):
        groups[(tensor.dtype, tuple(tensor.shape.numpy()))].append(value)
    for alike in groups.values():
        for equal in _equal(alike) if len(alike) > 1 else ():
            makers = tuple(node for value in equal if (node := value.producer()) is not None)
            readers = tuple(dict.fromkeys(use.node for value in equal for use in value.uses()))
            held = _held(equal[0])
            large = held is not None and held.size > _COMPARED
            blocked = f"more than {_COMPARED:,} elements: passes do not read weights to compare them" if large else ""
            size = 0 if held is None else held.nbytes * (len(equal) - 1)
            names = tuple(value.name or "" for value in equal)
            yield Match(
                "duplicate_constants", makers, f"{len(equal)} equal, {size:,} bytes too many", blocked, names, readers
            )


def _constants(facts: GraphFacts) -> Iterator[tuple[ir.Value, ir.TensorProtocol]]:
    """The values of the main graph that hold a tensor."""
    graph = facts.tagged.model.graph
    made = (node.outputs[0] for node in facts.nodes_of("Constant") if node.graph is graph)
    for value in (*graph.initializers.values(), *made):
        tensor = _held(value)
        if tensor is not None and tensor.dtype != ir.DataType.STRING and not value.is_graph_input():
            yield value, tensor


def _held(value: ir.Value) -> ir.TensorProtocol | None:
    return value.const_value if value.const_value is not None else constant_tensor(value)


def _equal(values: list[ir.Value]) -> Iterator[list[ir.Value]]:
    """The groups of equal tensors among some of one type and shape; as little is read as can be."""
    for key in (_sample, _whole):
        found: defaultdict[Hashable, list[ir.Value]] = defaultdict(list)
        for value in values:
            tensor = _held(value)
            said = None if tensor is None else key(tensor)
            if said is not None:
                found[said].append(value)
        if key is _whole:
            yield from (group for group in found.values() if len(group) > 1)
        values = [value for group in found.values() if len(group) > 1 for value in group]


def _sample(tensor: ir.TensorProtocol) -> Hashable | None:
    """The first elements of a large tensor; nothing of a small one, which is read whole at once."""
    if tensor.nbytes <= _HASHED:
        return ()
    try:
        return np.asarray(tensor.numpy()).reshape(-1)[:_SAMPLE].tobytes()
    except (OSError, FileError):  # the file of its external data is not there: nothing can be said
        return None


def _whole(tensor: ir.TensorProtocol) -> Hashable | None:
    try:
        array = np.ascontiguousarray(tensor.numpy())
    except (OSError, FileError):
        return None
    return hashlib.sha256(array.reshape(-1).view(np.uint8).data).digest()


def unused(facts: GraphFacts) -> Iterator[Match]:
    """Initializers that no node reads, together."""
    graph = facts.tagged.model.graph
    outer = {value for node in facts.tagged.index.bodies for value in facts.tagged.index.captured(node)}
    left = [
        value
        for value in graph.initializers.values()
        if not value.uses() and not value.is_graph_output() and not value.is_graph_input() and value not in outer
    ]
    if left:
        size = sum(value.const_value.nbytes for value in left if value.const_value is not None)
        yield Match("unused_initializers", (), f"{len(left)}, {size:,} bytes", "", tuple(v.name or "" for v in left))


def dead(facts: GraphFacts) -> Iterator[Match]:
    """Nodes of the main graph of which nothing leads to an output, those that read each other together."""
    graph = facts.tagged.model.graph
    needed = {value.producer() for value in graph.outputs}
    pending = [node for node in needed if node is not None]
    while pending:
        node = pending.pop()
        for value in (*node.inputs, *facts.tagged.index.captured(node)):
            maker = None if value is None else value.producer()
            if maker is not None and maker not in needed:
                needed.add(maker)
                pending.append(maker)
    for nodes in connected(node for node in graph if node not in needed):
        yield Match("dead_nodes", nodes, ", ".join(dict.fromkeys(node.op_type for node in nodes)))
