"""Recurrence: operators for it, loops that carry a state, loops that an exporter unrolled, and all steps at once."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass

import onnx_ir as ir

from htp_export.findings.attention_steps import MaskUse
from htp_export.fingerprints.detectors.masks import CausalMasks
from htp_export.model.graph_facts import GraphFacts
from htp_export.model.operators import LAYOUT, is_standard

__all__ = ["linear_recurrences", "recurrent_operators", "unrolled_loops"]

_CELLS = ("LSTM", "GRU", "RNN")
_SHORTEST = 4
"""Steps that an unrolled loop has at least: two or three equal slices also occur elsewhere (queries, keys, values)."""
_ENTRY_NODES = 11
"""Nodes between a slice of the input and the state that it meets: the input projection and gates of a cell."""

_BETWEEN_STEPS = (LAYOUT - {"Flatten"}) | {"Cast", "Gather", "Identity", "Pad", "Slice", "Split"}
_ELEMENTWISE = frozenset(("Add", "Clip", "Div", "Exp", "Min", "Mul", "Neg", "Sub", "Trilu", "Where"))
_SUMMING = ("Einsum", "Gemm", "MatMul")


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


@dataclass(frozen=True)
class _Decayed:
    """Cumulative sums of decays, and the operations on them so far.

    Attributes:
        decays: What is summed, each step's own.
        between: Whether it is the sum between two steps, and not from the beginning.
        lower: Whether only what comes after each step is left of it.
        shares: Whether it is the share that is left, and no logarithm any more.
        mixed: Whether data is multiplied by it.
    """

    decays: ir.Value
    between: bool = False
    lower: bool = False
    shares: bool = False
    mixed: bool = False

    def and_also(self, other: _Decayed) -> _Decayed:
        """The operations on both."""
        return _Decayed(
            self.decays,
            self.between or other.between,
            self.lower or other.lower,
            self.shares or other.shares,
            self.mixed or other.mixed,
        )


def linear_recurrences(facts: GraphFacts, masks: CausalMasks) -> list[ir.Value]:
    """The decays of linear recurrences that are computed for all steps at once, those of one recurrence together.

    ``state[t] = decay[t] * state[t-1] + x[t]`` is a product of all ``x`` with a lower triangle: what is left of step
    *s* at step *t* is the exponential of the sum of the logarithms of the decays between them. So cumulative sums,
    their differences (or sums of a triangle), ``Exp`` and a lower triangle lie before a product, in any order in which
    a triangle can be made (`Dao and Gu <https://arxiv.org/abs/2405.21060>`_, listing 1; `Yang et al.
    <https://arxiv.org/abs/2312.06635>`_).
    """
    known: dict[ir.Value, _Decayed] = {}
    decays: dict[ir.Value, None] = {}
    for node in facts.nodes:
        if is_standard(node, "CumSum"):
            known.update(_summed(facts, node))
            continue
        inputs = [(value, known[value]) for value in node.inputs if value is not None and value in known]
        if not inputs:
            continue
        so_far = inputs[0][1]
        for _, second_operand in inputs[1:]:
            so_far = so_far.and_also(second_operand)
        whole = so_far.between and so_far.lower and so_far.shares
        if whole and (node.op_type in _SUMMING or (node.op_type == "ReduceSum" and so_far.mixed)):
            decays[so_far.decays] = None
        elif is_standard(node) and node.op_type in _BETWEEN_STEPS | _ELEMENTWISE:
            after = _one_step(facts, masks, node, so_far, {value for value, _ in inputs})
            known.update(dict.fromkeys(node.outputs, after))
    return list(decays)


def _summed(facts: GraphFacts, node: ir.Node) -> dict[ir.Value, _Decayed]:
    """What a ``CumSum`` of computed numbers gives; whole numbers are counted, and do not decay."""
    value, between = node.inputs[0], False
    if facts.is_constant(value) or not (facts.dtype(value) or ir.DataType.FLOAT).is_floating_point():
        return {}
    while value is not None and (maker := value.producer()) is not None:
        masked = is_standard(maker, "Trilu", "Where")
        if not masked and not (
            is_standard(maker, "CumSum") or (is_standard(maker) and maker.op_type in _BETWEEN_STEPS)
        ):
            break
        between = between or masked  # each column sums from another step on
        varying = [operand for operand in maker.inputs if operand is not None and not facts.is_constant(operand)]
        floating = [operand for operand in varying if (facts.dtype(operand) or ir.DataType.FLOAT).is_floating_point()]
        if not floating:
            break
        value = floating[0]
    return {} if value is None else {node.outputs[0]: _Decayed(value, between)}


def _one_step(facts: GraphFacts, masks: CausalMasks, node: ir.Node, so_far: _Decayed, ours: set[ir.Value]) -> _Decayed:
    """The state of decays after one operator."""
    others = [value for value in node.inputs if value is not None and value not in ours]
    between, lower, mixed = so_far.between, so_far.lower, so_far.mixed
    if node.op_type in ("Add", "Sub") and not so_far.shares:
        between = between or not others  # also written as a sum with what was negated before
    elif node.op_type == "Mul" and so_far.shares:
        mixed = mixed or any(not facts.is_constant(value) for value in others)
    if not lower:
        lower = _is_lower(masks, node, ours, others)
    return _Decayed(so_far.decays, between, lower, so_far.shares or node.op_type == "Exp", mixed)


def _is_lower(masks: CausalMasks, node: ir.Node, ours: set[ir.Value], others: list[ir.Value]) -> bool:
    """Whether an operator leaves a lower triangle of its input."""
    if node.op_type == "Trilu":
        return not node.attributes.get_int("upper", 1)
    if node.op_type == "Where" and node.inputs[0] is not None:
        return bool(masks.is_causal(MaskUse(node.inputs[0], "kept" if node.inputs[1] in ours else "dropped")))
    role = {"Add": "added", "Mul": "kept"}.get(node.op_type)
    return role is not None and any(masks.is_causal(MaskUse(value, role)) for value in others)
