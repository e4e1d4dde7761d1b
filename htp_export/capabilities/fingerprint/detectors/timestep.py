"""Time steps of diffusion: a number for each example, as sines and cosines, that a small network reads."""

from __future__ import annotations

import onnx_ir as ir

from htp_export.model.graph_facts import GraphFacts

__all__ = ["timestep_inputs"]

_ON_THE_WAY = frozenset((
    "Cast", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Mul", "Div", "Add", "Identity", "Flatten", "MatMul",
    "Where", "Equal"
))  # fmt: skip
_STEPS_TO_WAVES = 16
"""Nodes from a time step to its sines and cosines: casts, reshapes, scaling, and the product with the frequencies."""
_STEPS_TO_LAYER = 8
"""Nodes from the sines and cosines to the linear layer that reads them: their concatenation, slices, casts."""
_AFTERWARDS = frozenset((
    "Concat", "Cast", "Slice", "Reshape", "Mul", "Identity", "Unsqueeze", "Squeeze", "Flatten", "Split", "Gather"
))  # fmt: skip


def timestep_inputs(facts: GraphFacts) -> list[ir.Value]:
    """The inputs of one number for each example whose sines and cosines enter a linear layer.

    Rotary positions do not count: their sines and cosines multiply queries and keys, and enter no layer.
    """
    graph = facts.tagged.model.graph
    return [
        value
        for value in graph.inputs
        if not value.is_initializer() and _one_number(facts, value) and _waves_enter_layer(facts, value)
    ]


def _one_number(facts: GraphFacts, value: ir.Value) -> bool:
    shape = facts.shape(value)
    return shape is not None and (len(shape) < 2 or (len(shape) == 2 and shape[1] == 1))


def _waves_enter_layer(facts: GraphFacts, value: ir.Value) -> bool:
    waves = [node for node in _after(facts, [value], _ON_THE_WAY, _STEPS_TO_WAVES) if node.op_type in ("Sin", "Cos")]
    if {node.op_type for node in waves} != {"Sin", "Cos"}:
        return False
    reached = _after(facts, [node.outputs[0] for node in waves], _AFTERWARDS, _STEPS_TO_LAYER)
    return any(node.op_type in ("MatMul", "Gemm") and facts.is_constant(node.inputs[1]) for node in reached)


def _after(facts: GraphFacts, values: list[ir.Value], through: frozenset[str], steps: int) -> list[ir.Node]:
    """Return the consumers of values, and further consumers as long as the path leads through the given operators."""
    consumers: dict[ir.Node, None] = {}
    for _ in range(steps):
        readers = [use.node for value in values for use in value.uses() if use.node not in consumers]
        consumers.update(dict.fromkeys(readers))
        values = [output for node in readers if node.op_type in through for output in node.outputs]
        if not values:
            break
    return list(consumers)
