"""Attention in single steps: a product of queries and keys, a softmax, a product with values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from htp_export.model.graph_facts import GraphFacts
from htp_export.model.neighbours import producer_of

__all__ = ["AttentionSteps", "MaskUse", "attention_steps"]

_STEPS = 12
"""How many nodes may lie between a product and the softmax, and after it."""

_BEFORE = ("Add", "Sub", "Mul", "Div", "Where", "Cast", "Reshape", "Max", "Clip", "Tanh", "Identity", "Concat", "Slice")
_AFTER = ("Cast", "Where", "Dropout", "Reshape", "Mul", "Identity", "IsNaN", "Slice", "Transpose")


@dataclass(frozen=True)
class MaskUse:
    """A mask, and how it works.

    Attributes:
        value: The mask.
        role: ``"added"`` to the scores; ``"kept"`` where it is true; ``"dropped"`` where it is true.
    """

    value: ir.Value
    role: str


@dataclass(frozen=True)
class AttentionSteps:
    """Attention as single nodes.

    Attributes:
        scores: The product of queries and keys.
        between: What lies between it and the softmax, from the product on: scale, mask, casts.
        masks: What is added to the scores, or picks among them.
        softmax: The softmax.
        after: What lies between the softmax and the second product.
        context: The product with the values.
    """

    scores: ir.Node
    between: tuple[ir.Node, ...]
    masks: tuple[MaskUse, ...]
    softmax: ir.Node
    after: tuple[ir.Node, ...]
    context: ir.Node

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        """All its nodes, in order."""
        return (self.scores, *self.between, self.softmax, *self.after, self.context)


def attention_steps(facts: GraphFacts) -> Iterator[AttentionSteps]:
    """Every attention that is written in single steps."""
    for softmax in facts.nodes_of("Softmax"):
        context = _context(facts, softmax)
        scores = _scores(facts, softmax) if context is not None else None
        if context is not None and scores is not None:
            yield AttentionSteps(scores[0], scores[1], scores[2], softmax, context[0], context[1])


def _scores(facts: GraphFacts, softmax: ir.Node) -> tuple[ir.Node, tuple[ir.Node, ...], tuple[MaskUse, ...]] | None:
    """The product that a softmax is taken of, what lies between them, and the masks among that."""
    value, between, masks = softmax.inputs[0], list[ir.Node](), list[MaskUse]()
    for _ in range(_STEPS):
        node = None if value is None else value.producer()
        if node is None:
            return None
        if node.op_type in ("MatMul", "Einsum"):
            constant = any(facts.is_constant(operand) for operand in node.inputs)
            return None if constant else (node, tuple(reversed(between)), tuple(masks))
        if node.op_type not in _BEFORE:
            return None
        through = _main_input(facts, node)
        if through is None:
            return None
        masks += _masks(facts, node, through)
        between.append(node)
        value = through
    return None


def _masks(facts: GraphFacts, node: ir.Node, through: ir.Value) -> list[MaskUse]:
    """The masks that a step puts on the scores."""
    if node.op_type == "Where" and node.inputs[0] is not None:
        return [MaskUse(node.inputs[0], "kept" if node.inputs[1] is through else "dropped")]
    if node.op_type != "Add":
        return []
    others = [value for value in node.inputs if value is not None and value is not through]
    return [MaskUse(value, "added") for value in others if facts.scalar(value) is None]


def _main_input(facts: GraphFacts, node: ir.Node) -> ir.Value | None:
    """The input of a step that leads back to the product: the one with a product within a few steps."""
    candidates = [value for value in node.inputs if value is not None and not facts.is_constant(value)]
    if node.op_type in ("Cast", "Reshape", "Clip", "Tanh", "Identity", "Slice", "Div"):
        return candidates[0] if candidates and candidates[0] is node.inputs[0] else None
    if len(candidates) == 1:
        return candidates[0]
    return next((value for value in candidates if _leads_to_product(facts, value, 6)), None)


def _leads_to_product(facts: GraphFacts, value: ir.Value, steps: int) -> bool:
    """Whether a product of two computed matrices lies straight behind a value."""
    for _ in range(steps):
        node = value.producer()
        if node is None:
            return False
        if node.op_type in ("MatMul", "Einsum"):
            return not any(facts.is_constant(operand) for operand in node.inputs)
        varying = [given for given in node.inputs if given is not None and not facts.is_constant(given)]
        if node.op_type not in _BEFORE or not varying:
            return False
        value = next((given for given in varying if _is_product(facts, given)), varying[0])
    return False


def _is_product(facts: GraphFacts, value: ir.Value) -> bool:
    node = producer_of(value, "MatMul", "Einsum")
    return node is not None and not any(facts.is_constant(operand) for operand in node.inputs)


def _context(facts: GraphFacts, softmax: ir.Node) -> tuple[tuple[ir.Node, ...], ir.Node] | None:
    """The product that a softmax goes into, and what lies between."""
    value, after = softmax.outputs[0], list[ir.Node]()
    for _ in range(_STEPS):
        readers = [use.node for use in value.uses()]
        product = next((node for node in readers if node.op_type in ("MatMul", "Einsum")), None)
        if product is not None:
            return tuple(after), product
        steps = [node for node in readers if node.op_type in _AFTER]
        if not steps:
            return None
        guard = next((node for node in steps if node.op_type == "IsNaN"), None)
        if guard is not None:
            after.append(guard)
        onward = next((node for node in steps if node.op_type != "IsNaN"), None)
        if onward is None:
            return None
        after.append(onward)
        value = onward.outputs[0]
    return None
