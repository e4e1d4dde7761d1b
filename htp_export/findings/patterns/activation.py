"""GELU and softmax in single steps."""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir

from htp_export.findings.finding import Match
from htp_export.model.graph_facts import GraphFacts

__all__ = ["gelus", "softmaxes"]


def gelus(facts: GraphFacts) -> Iterator[Match]:
    """``0.5 x (1 + erf(x / √2))``, and ``0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))``, their factors in any order."""
    for inner, kind in (
        *((n, "gelu_erf") for n in facts.nodes_of("Erf")),
        *((n, "gelu_tanh") for n in facts.nodes_of("Tanh")),
    ):
        argument = _erf_argument(facts, inner) if kind == "gelu_erf" else _tanh_argument(facts, inner)
        if argument is None:
            continue
        x, steps = argument
        rest = _half_x_times_one_plus(facts, inner, x)
        if rest is not None:
            yield Match(kind, tuple(dict.fromkeys((*steps, inner, *rest))), f"{len(steps) + 1 + len(rest)} steps")


def _near(number: float, wanted: float) -> bool:
    return math.isclose(number, wanted, rel_tol=1e-3)


def _erf_argument(facts: GraphFacts, erf: ir.Node) -> tuple[ir.Value, list[ir.Node]] | None:
    node = facts.maker(erf.inputs[0], "Div", "Mul")
    scaled = facts.with_scalar(node) if node is not None else None
    if node is None or scaled is None:
        return None
    factor = scaled[1] if node.op_type == "Mul" else 1 / (scaled[1] or 1)
    return (scaled[0], [node]) if _near(factor, math.sqrt(0.5)) else None


def _tanh_argument(facts: GraphFacts, tanh: ir.Node) -> tuple[ir.Value, list[ir.Node]] | None:
    outer = facts.maker(tanh.inputs[0], "Mul")
    scaled = facts.with_scalar(outer) if outer is not None else None
    if outer is None or scaled is None or not _near(scaled[1], math.sqrt(2 / math.pi)):
        return None
    add = facts.maker(scaled[0], "Add")
    if add is None or len(add.inputs) != 2:
        return None
    for x, cubic in (add.inputs, tuple(reversed(add.inputs))):
        node = facts.maker(cubic, "Mul")
        inner = facts.with_scalar(node) if node is not None else None
        if x is None or node is None or inner is None or not _near(inner[1], 0.044715):
            continue
        cube = _cube(facts, inner[0], x)
        if cube is not None:
            return x, [*cube, node, add, outer]
    return None


def _cube(facts: GraphFacts, value: ir.Value, x: ir.Value) -> list[ir.Node] | None:
    """The nodes that raise ``x`` to the third power: ``Pow``, or two products."""
    node = facts.maker(value, "Pow", "Mul")
    if node is None:
        return None
    if node.op_type == "Pow":
        return [node] if node.inputs[0] is x and facts.scalar(node.inputs[1]) == 3 else None
    for one, other in (node.inputs, tuple(reversed(node.inputs))):
        square = facts.maker(other, "Mul", "Pow")
        if one is not x or square is None or square.inputs[0] is not x:
            continue
        if square.inputs[1] is x or (square.op_type == "Pow" and facts.scalar(square.inputs[1]) == 2):
            return [square, node]
    return None


def _half_x_times_one_plus(facts: GraphFacts, inner: ir.Node, x: ir.Value) -> list[ir.Node] | None:
    """The nodes that make ``0.5 x (1 + inner)`` of ``inner``."""
    add = facts.only_reader(inner.outputs[0], "Add")
    added = facts.with_scalar(add) if add is not None else None
    if add is None or added is None or added[1] != 1:
        return None
    steps, value = [add], add.outputs[0]
    factors = {"x", "half"}
    while factors:
        product = facts.only_reader(value, "Mul", "Div")
        if product is None:
            return None
        other = product.inputs[1] if product.inputs[0] is value else product.inputs[0]
        number = facts.scalar(other)
        halves = number == (0.5 if product.op_type == "Mul" else 2)
        if halves and "half" in factors:
            factors.discard("half")
        elif other is x and product.op_type == "Mul" and "x" in factors:
            factors.discard("x")
        else:
            half = facts.maker(other, "Mul")
            scaled = facts.with_scalar(half) if half is not None else None
            if half is None or scaled is None or scaled[0] is not x or scaled[1] != 0.5 or len(factors) < 2:
                return None
            steps.append(half)
            factors.clear()
        steps.append(product)
        value = product.outputs[0]
    return steps


def softmaxes(facts: GraphFacts) -> Iterator[Match]:
    """``exp(x) / sum(exp(x))``, with or without the largest element taken off before."""
    for div in facts.nodes_of("Div"):
        exponent = facts.maker(div.inputs[0], "Exp")
        total = facts.maker(div.inputs[1], "ReduceSum")
        if exponent is None or total is None or total.inputs[0] is not div.inputs[0]:
            continue
        steps = [exponent, total, div]
        sub = facts.maker(exponent.inputs[0], "Sub")
        largest = facts.maker(sub.inputs[1], "ReduceMax") if sub is not None else None
        if sub is not None and largest is not None and largest.inputs[0] is sub.inputs[0]:
            steps = [largest, sub, *steps]
        yield Match("softmax", tuple(steps), f"{len(steps)} steps")
