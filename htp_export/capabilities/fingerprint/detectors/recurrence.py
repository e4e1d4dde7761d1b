"""Recurrence: operators for it, loops that carry a state, and loops that an exporter unrolled."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import onnx_ir as ir

from htp_export.model.graph_facts import GraphFacts

__all__ = ["recurrent_operators", "unrolled_loops"]

_CELLS = ("LSTM", "GRU", "RNN")
_SHORTEST = 4
"""Steps that an unrolled loop has at least: two or three equal slices also occur elsewhere (queries, keys, values)."""
_ENTRY_NODES = 11
"""Nodes between a slice of the input and the state that it meets: the input projection and gates of a cell."""


def recurrent_operators(facts: GraphFacts) -> Counter[str]:
    """``LSTM``, ``GRU``, ``RNN``, and ``Scan`` and ``Loop`` that carry numbers from step to step → how many."""
    counts = Counter({op: len(facts.by_op[op]) for op in _CELLS if op in facts.by_op})
    for node in facts.nodes_of("Scan", "Loop"):
        bodies = facts.tagged.index.bodies.get(node, ())
        products = any(inner.op_type in ("MatMul", "Gemm", "Mul") for body in bodies for inner in body.all_nodes())
        carried = any((facts.dtype(value) or ir.DataType.INT64).is_floating_point() for value in node.inputs if value)
        if products and carried:
            counts[node.op_type] += 1
    return counts


def unrolled_loops(facts: GraphFacts) -> list[int]:
    """For each tensor that an unrolled loop takes apart, how many steps it has.

    Such a loop takes a tensor apart along one dimension, a step at a time, and each step reads what the one before has
    computed. So the pieces, taken in order, enter the graph ever deeper, by the same number of nodes each time.
    """
    pieces = [places for places in _pieces(facts).values() if len(places) >= _SHORTEST]
    if not pieces:
        return []
    depth = _depths(facts)
    loop_lengths = []
    for places in pieces:
        entries = [_entry(depth, places[place]) for place in sorted(places)]
        gaps = [after - before for before, after in itertools.pairwise(entries[1:])]
        if gaps and min(gaps) == max(gaps) > 0:
            loop_lengths.append(len(places))
    return loop_lengths


def _pieces(facts: GraphFacts) -> dict[tuple[ir.Value, int], dict[int, ir.Value]]:
    """Tensor and dimension → place → the piece of size one at it."""
    slices: defaultdict[tuple[ir.Value, int], dict[int, ir.Value]] = defaultdict(dict)
    for node in facts.nodes_of("Gather"):
        index = facts.array(node.inputs[1])
        source = node.inputs[0]
        if source is not None and index is not None and index.size == 1 and not facts.is_constant(source):
            axis = node.attributes.get_int("axis", 0) or 0
            slices[source, axis].setdefault(int(index.reshape(())), node.outputs[0])
    for node in facts.nodes_of("Slice"):
        if len(node.inputs) < 4 or node.inputs[0] is None:
            continue
        start, end, along = (facts.scalar(value) for value in node.inputs[1:4])
        if start is not None and end is not None and along is not None and end - start == 1:
            slices[node.inputs[0], int(along)].setdefault(int(start), node.outputs[0])
    for node in facts.nodes_of("Split"):
        if node.inputs[0] is not None and len(node.outputs) >= _SHORTEST:
            axis = node.attributes.get_int("axis", 0) or 0
            slices[node.inputs[0], axis].update(enumerate(node.outputs))
    return dict(slices)


def _depths(facts: GraphFacts) -> dict[ir.Value, int]:
    """The longest way to each value, in nodes."""
    depth: dict[ir.Value, int] = {}
    for node in facts.nodes:
        deepest = max((depth.get(value, 0) for value in node.inputs if value is not None), default=0)
        for value in node.outputs:
            depth[value] = deepest + 1
    return depth


def _entry(depth: dict[ir.Value, int], piece: ir.Value) -> int:
    """How deep in the graph a piece is first read together with what is deeper than it."""
    value = piece
    for _ in range(_ENTRY_NODES + 1):
        readers = [use.node for use in value.uses()]
        if not readers:
            break
        deeper = [
            depth[node.outputs[0]]
            for node in readers
            if any(operand is not None and depth.get(operand, 0) > depth[value] + 2 for operand in node.inputs)
        ]
        if deeper:
            return min(deeper)
        value = readers[0].outputs[0]
    return depth.get(piece, 0)
