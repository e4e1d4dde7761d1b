"""Attention in single steps: a product of queries and keys, a softmax, a product with values."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from htp_export.model.graph_facts import GraphFacts

_STEPS = 12
"""How many nodes may lie between a product and the softmax, and after it."""

_PRODUCTS = ("MatMul", "Einsum")
_FIRST_INPUT = ("Cast", "Reshape", "Clip", "Tanh", "Identity", "Slice", "Div")
_BEFORE = (*_FIRST_INPUT, "Add", "Sub", "Mul", "Where", "Max", "Concat")
_AFTER = ("Cast", "Where", "Dropout", "Reshape", "Mul", "Identity", "IsNaN", "Slice", "Transpose")


@dataclass(frozen=True)
class MaskUse:
    """A mask, and how it works: ``"added"`` to the scores; ``"kept"`` or ``"dropped"`` where it is true."""

    value: ir.Value
    role: str


@dataclass(frozen=True)
class AttentionSteps:
    """Attention as single nodes: the products of queries and keys, and with the values; ``nodes`` has all, in order."""

    scores: ir.Node
    masks: tuple[MaskUse, ...]
    softmax: ir.Node
    context: ir.Node
    nodes: tuple[ir.Node, ...]


def attention_steps(facts: GraphFacts) -> Iterator[AttentionSteps]:
    """Every attention that is written in single steps."""

    @functools.cache
    def way_back(value: ir.Value | None, steps: int) -> tuple[ir.Node, ...]:
        """The nodes from a product of computed matrices to a value; none if there is no such product before it."""
        node = None if value is None or not steps else value.producer()
        if node is None or node.op_type not in (*_PRODUCTS, *_BEFORE):
            return ()
        varying = [given for given in node.inputs if given is not None and not facts.is_constant(given)]
        if node.op_type in _PRODUCTS:
            return (node,) if len(varying) == len(node.inputs) else ()
        leading = [given for given in varying if given is node.inputs[0] or node.op_type not in _FIRST_INPUT]
        before = next((way for given in leading if (way := way_back(given, steps - 1))), ())
        return (*before, node) if before else ()

    for softmax in facts.nodes_of("Softmax"):
        after = _way_on(softmax)
        before = way_back(softmax.inputs[0], _STEPS) if after else ()
        if before:
            masks = (mask for given, node in itertools.pairwise(before) for mask in _masks(facts, node, given))
            yield AttentionSteps(before[0], tuple(masks), softmax, after[-1], (*before, softmax, *after))


def _masks(facts: GraphFacts, node: ir.Node, before: ir.Node) -> list[MaskUse]:
    """The masks that a step puts on the scores, which another step gives."""
    through = before.outputs[0]
    if node.op_type == "Where" and node.inputs[0] is not None:
        return [MaskUse(node.inputs[0], "kept" if node.inputs[1] is through else "dropped")]
    others = [value for value in node.inputs if value is not None and value is not through]
    return [MaskUse(value, "added") for value in others if node.op_type == "Add" and facts.scalar(value) is None]


def _way_on(softmax: ir.Node) -> tuple[ir.Node, ...]:
    """The nodes from a softmax to the product that it goes into; none if it goes into none."""
    value, after = softmax.outputs[0], list[ir.Node]()
    for _ in range(_STEPS):
        readers = [use.node for use in value.uses()]
        product = next((node for node in readers if node.op_type in _PRODUCTS), None)
        if product is not None:
            return (*after, product)
        steps = [node for node in readers if node.op_type in _AFTER]
        after += [node for node in steps if node.op_type == "IsNaN"][:1]  # a guard for rows that are masked whole
        onward = next((node for node in steps if node.op_type != "IsNaN"), None)
        if onward is None:
            return ()
        after.append(onward)
        value = onward.outputs[0]
    return ()
