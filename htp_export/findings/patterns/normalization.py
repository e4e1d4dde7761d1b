"""Normalisation in single steps, and batch normalisation after a convolution."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from htp_export.findings.finding import Match
from htp_export.model.graph_facts import GraphFacts

__all__ = ["conv_neighbours", "norms"]


def norms(facts: GraphFacts) -> Iterator[Match]:
    """``x / sqrt(mean(x²) + epsilon)``, with a scale and a shift where there are any: LayerNorm and RMSNorm.

    It is LayerNorm where the mean was taken off before.
    """
    for node in facts.nodes_of("Div", "Mul"):
        found = _normalised(facts, node)
        if found is None:
            continue
        value, steps = found
        kind = "rms_norm"
        mean = _centred(facts, value)
        if mean is not None:
            kind, steps = "layer_norm", [*mean, *steps]
        steps += _affine(facts, node)
        yield Match(kind, tuple(dict.fromkeys(steps)), f"{len(steps)} steps")


def _normalised(facts: GraphFacts, node: ir.Node) -> tuple[ir.Value, list[ir.Node]] | None:
    """What a node divides by its own root mean square, and the nodes that do it."""
    pairs = [node.inputs] if node.op_type == "Div" else [node.inputs, tuple(reversed(node.inputs))]
    for value, other in pairs:
        if value is None or other is None:
            continue
        inverse = None if node.op_type == "Div" else _inverse(facts, other)
        if node.op_type == "Mul" and inverse is None:
            continue
        root = facts.maker(other if inverse is None else inverse[1], "Sqrt")
        if root is None and inverse is not None and inverse[0].op_type == "Pow":
            steps = _mean_square(facts, inverse[1], value)
        else:
            steps = None if root is None else _mean_square(facts, root.inputs[0], value)
        if steps is not None:
            return value, [*steps, *([root] if root else []), *([inverse[0]] if inverse else []), node]
    return None


def _inverse(facts: GraphFacts, value: ir.Value) -> tuple[ir.Node, ir.Value] | None:
    """``1 / y``, written in any of three ways, and ``y``; for a power of -0.5, what is raised to it."""
    node = facts.maker(value, "Reciprocal", "Div", "Pow")
    if node is None:
        return None
    if node.op_type == "Reciprocal" and node.inputs[0] is not None:
        return node, node.inputs[0]
    if node.op_type == "Div" and facts.scalar(node.inputs[0]) == 1 and node.inputs[1] is not None:
        return node, node.inputs[1]
    if node.op_type == "Pow" and facts.scalar(node.inputs[1]) == -0.5 and node.inputs[0] is not None:
        return node, node.inputs[0]
    return None


def _mean_square(facts: GraphFacts, value: ir.Value | None, of: ir.Value) -> list[ir.Node] | None:
    """The nodes that compute ``mean(of²) + epsilon``."""
    steps: list[ir.Node] = []
    add = facts.maker(value, "Add")
    if add is not None:
        added = facts.with_scalar(add)
        if added is None:
            return None
        value = added[0]
        steps.append(add)
    mean = facts.maker(value, "ReduceMean")
    square = facts.maker(mean.inputs[0], "Pow", "Mul") if mean is not None else None
    if mean is None or square is None or len(square.inputs) != 2:
        return None
    base, exponent = square.inputs
    squares = facts.scalar(exponent) == 2 if square.op_type == "Pow" else base is exponent
    return [square, mean, *steps] if squares and _same(base, of) else None


def _same(one: ir.Value | None, other: ir.Value | None) -> bool:
    """Whether two values are one, or are computed by equal nodes from the same: exporters write some twice."""
    if one is other:
        return True
    first, second = (None if value is None else value.producer() for value in (one, other))
    if first is None or second is None or first.op_type not in ("Sub", "Cast"):
        return False
    return first.op_type == second.op_type and tuple(first.inputs) == tuple(second.inputs)


def _centred(facts: GraphFacts, value: ir.Value) -> list[ir.Node] | None:
    """The nodes that took the mean off a value."""
    sub = facts.maker(value, "Sub")
    mean = facts.maker(sub.inputs[1], "ReduceMean") if sub is not None else None
    if sub is None or mean is None or mean.inputs[0] is not sub.inputs[0]:
        return None
    return [mean, sub]


def _affine(facts: GraphFacts, node: ir.Node) -> list[ir.Node]:
    """The nodes that scale and shift by weights afterwards; there may be a cast between."""
    steps: list[ir.Node] = []
    value, wanted = node.outputs[0], ["Mul", "Add"]
    while wanted:
        reader = facts.only_reader(value, "Cast", *wanted)
        if reader is None:
            break
        if reader.op_type != "Cast":
            if facts.with_constant(reader) is None:
                break
            wanted = wanted[wanted.index(reader.op_type) + 1 :]
        steps.append(reader)
        value = reader.outputs[0]
    while steps and steps[-1].op_type == "Cast":
        steps.pop()
    return steps


def conv_neighbours(facts: GraphFacts) -> Iterator[Match]:
    """``Conv`` with ``BatchNormalization`` or ``Relu`` right after it."""
    for norm in facts.nodes_of("BatchNormalization"):
        conv = facts.maker(norm.inputs[0], "Conv")
        if conv is not None:
            yield Match("conv_batchnorm", (conv, norm), "", _unfoldable(facts, conv, norm))
    for relu in facts.nodes_of("Relu"):
        conv = facts.maker(relu.inputs[0], "Conv")
        if conv is not None:
            alone = facts.only_reader(conv.outputs[0]) is not None
            yield Match("conv_relu", (conv, relu), "", "" if alone else "what the Conv gives is read elsewhere")


def _unfoldable(facts: GraphFacts, conv: ir.Node, norm: ir.Node) -> str:
    if facts.only_reader(conv.outputs[0]) is None:
        return "what the Conv gives is read elsewhere"
    if norm.attributes.get_int("training_mode", 0) or sum(bool(value.uses()) for value in norm.outputs) > 1:
        return "the normalisation is in training mode"
    if not all(facts.is_constant(value) for value in (*conv.inputs[1:], *norm.inputs[1:]) if value is not None):
        return "weights or statistics are computed"
    if facts.dtype(conv.inputs[1]) not in (ir.DataType.FLOAT, None):
        return "the weight is not of float32"
    return ""
