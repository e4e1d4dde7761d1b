"""Routers: the selection of experts for each position, in mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from htp_export.model.graph_facts import GraphFacts
from htp_export.model.neighbours import producer_of

__all__ = ["Router", "routers"]

_GATES = ("Softmax", "Sigmoid", "Cast", "Add", "Sub", "Mul", "Div", "Identity", "Softplus", "Sqrt", "Reshape", "Where")
_PICKS = frozenset((
    "Gather", "GatherElements", "GatherND", "Equal", "NonZero", "OneHot", "Scatter", "ScatterElements", "ScatterND"
))  # fmt: skip
_MOST_EXPERTS = 1024
"""A wider linear layer before a ``TopK`` is a vocabulary, not a router."""
_GATE_NODES = 7
"""Nodes between a router's linear layer and its selection: softmax, bias, scaling, casts, masks of expert groups."""
_PICK_STEPS = 8
"""Steps from the selected indices to the node that uses them: casts, reshapes, one-hot encodings, transpositions."""
_PICK_WIDTH = 16
"""Values that are followed in each of these steps: indices have few consumers, activations many."""


@dataclass(frozen=True)
class Router:
    """A router.

    Attributes:
        node: The node that selects.
        experts: Number of experts; None if unknown.
        chosen: Number of selected experts; None if it is not constant.
    """

    node: ir.Node
    experts: int | None
    chosen: int | None


def routers(facts: GraphFacts) -> list[Router]:
    """Return the ``TopK`` and ``ArgMax`` nodes over the result of a linear layer whose indices select something."""
    return [*_by_top_k(facts), *_by_largest(facts)]


def _by_top_k(facts: GraphFacts) -> Iterator[Router]:
    for node in facts.nodes_of("TopK"):
        experts = _scored(facts, node.inputs[0])
        last = _along_last(facts, node)
        chosen = facts.scalar(node.inputs[1]) if len(node.inputs) > 1 else None
        if experts is None or not last or (chosen is not None and chosen >= experts):
            continue
        if len(node.outputs) > 1 and _picks(node.outputs[1]):
            yield Router(node, experts, None if chosen is None else int(chosen))


def _by_largest(facts: GraphFacts) -> Iterator[Router]:
    for node in facts.nodes_of("ArgMax"):
        experts = _scored(facts, node.inputs[0])
        if experts is None or not _picks(node.outputs[0]):
            continue
        if _weighed(facts, node.inputs[0]) or (_weighs(facts, node) and _picks_weights(facts, node.outputs[0])):
            yield Router(node, experts, 1)


def _weighed(facts: GraphFacts, value: ir.Value | None) -> bool:
    """Return whether a value is the result of a gate, possibly cast, that has further consumers."""
    shared = False
    while value is not None:
        shared = shared or len(value.uses()) > 1
        if producer_of(value, "Softmax", "Sigmoid") is not None:
            return shared
        cast = producer_of(value, "Cast", "Identity")
        value = None if cast is None else cast.inputs[0]
    return False


def _weighs(facts: GraphFacts, node: ir.Node) -> bool:
    """Return whether the selected index also selects its probability from the result of a gate."""
    readers = (use.node for use in node.outputs[0].uses() if use.idx == 1)
    return any(
        reader.op_type == "GatherElements" and producer_of(reader.inputs[0], "Softmax", "Sigmoid") is not None
        for reader in readers
    )


def _scored(facts: GraphFacts, value: ir.Value | None) -> int | None:
    """Return the width of the linear layer before a value, with only a gate between; None if there is none."""
    for _ in range(_GATE_NODES + 1):
        node = None if value is None else value.producer()
        if node is None:
            return None
        if node.op_type in ("MatMul", "Gemm"):
            shape = facts.shape(node.outputs[0])
            weight = facts.shape(node.inputs[1])
            if not facts.is_constant(node.inputs[1]) or weight is None or len(weight) != 2:
                return None
            turned = node.attributes.get_int("transB", 0)
            width = shape[-1] if shape and isinstance(shape[-1], int) else weight[0 if turned else 1]
            return width if isinstance(width, int) and 2 <= width <= _MOST_EXPERTS else None
        if node.op_type not in _GATES:
            return None
        operands = node.inputs[1:] if node.op_type == "Where" else node.inputs  # its condition masks groups of experts
        value = next((each for each in operands if each is not None and not facts.is_constant(each)), None)
    return None


def _along_last(facts: GraphFacts, node: ir.Node) -> bool:
    axis, rank = node.attributes.get_int("axis", -1), facts.rank(node.inputs[0])
    return axis == -1 or (rank is not None and axis == rank - 1)


def _picks(value: ir.Value) -> bool:
    """Return whether selected indices are used to select something."""
    return any(node.op_type in _PICKS for node in _behind(value))


def _picks_weights(facts: GraphFacts, value: ir.Value) -> bool:
    """Return whether selected indices select weight matrices."""
    return any(
        node.op_type in ("Gather", "GatherND")
        and facts.is_constant(node.inputs[0])
        and (facts.rank(node.inputs[0]) or 0) >= 3
        for node in _behind(value)
    )


def _behind(value: ir.Value) -> Iterator[ir.Node]:
    """Iterate over the nearest nodes that depend on a value."""
    values = [value]
    for _ in range(_PICK_STEPS):
        readers = [use.node for each in values for use in each.uses()]
        yield from readers
        values = [output for node in readers for output in node.outputs][:_PICK_WIDTH]
