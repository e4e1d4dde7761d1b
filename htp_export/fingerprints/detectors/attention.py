"""Attention: whether it is causal, and whether its keys come from where its queries do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from htp_export.findings.attention_steps import MaskUse, attention_steps
from htp_export.fingerprints.detectors.inputs import ModelInputs
from htp_export.fingerprints.detectors.masks import CausalMasks
from htp_export.model.graph_facts import GraphFacts
from htp_export.model.operators import is_standard

__all__ = ["Attention", "attentions_of"]

_FUSED = (
    "Attention",
    "MultiHeadAttention",
    "GroupQueryAttention",
    "PackedMultiHeadAttention",
    "DecoderMaskedMultiHeadAttention",
)
_LAYOUT_STEPS = 3
"""Layout operators between a softmax and the product that it weights: a cast or dropout, a reshape, a transposition."""


@dataclass(frozen=True)
class Attention:
    """One attention.

    Attributes:
        node: Its softmax, or the operator that does it all.
        causal: Whether each position sees only those before it.
        queries_from: The data inputs that its queries depend on, one bit each.
        keys_from: Those that its keys depend on.
    """

    node: ir.Node
    causal: bool
    queries_from: int
    keys_from: int

    @property
    def crosses(self) -> bool:
        """Whether the keys come from elsewhere than the queries."""
        return self.queries_from != self.keys_from

    @property
    def kind(self) -> str:
        """``"causal"``, ``"bidirectional"``, ``"cross"``, or ``"learned queries"``."""
        if self.causal:
            return "causal"
        if self.crosses:
            return "cross" if self.queries_from else "learned queries"
        return "bidirectional"


def attentions_of(facts: GraphFacts, inputs: ModelInputs, masks: CausalMasks) -> list[Attention]:
    """Every attention of a graph, in single steps or as one operator."""
    attentions = {
        steps.softmax: _from_steps(inputs, masks, steps.softmax, steps.scores, steps.masks)
        for steps in attention_steps(facts)
    }
    for node in facts.nodes:
        if node.op_type in _FUSED:
            attentions[node] = _from_operator(inputs, masks, node)
    for softmax in facts.nodes_of("Softmax"):
        if softmax not in attentions and _weighs(facts, softmax):
            reach = inputs.reaching(softmax.outputs[0])
            attentions[softmax] = Attention(softmax, False, reach, reach)
    return list(attentions.values())


def _from_steps(
    inputs: ModelInputs, masks: CausalMasks, softmax: ir.Node, scores: ir.Node, used: tuple[MaskUse, ...]
) -> Attention:
    queries, keys = scores.inputs[0], scores.inputs[1]
    causal = any(masks.is_causal(mask) for mask in used)
    return Attention(softmax, causal, inputs.reaching(queries), inputs.reaching(keys))


def _from_operator(inputs: ModelInputs, masks: CausalMasks, node: ir.Node) -> Attention:
    packed = node.domain not in ("", "ai.onnx") and node.op_type == "Attention"
    queries = node.inputs[0]
    keys = queries if packed or len(node.inputs) < 2 or node.inputs[1] is None else node.inputs[1]
    written = any(node.attributes.get_int(name, 0) for name in ("is_causal", "unidirectional"))
    causal = bool(written) or node.op_type == "GroupQueryAttention"
    place = 3 if is_standard(node) else 5  # of the mask
    mask = node.inputs[place] if place < len(node.inputs) else None
    if not causal and mask is not None:
        floating = mask.dtype is None or mask.dtype.is_floating_point()
        causal = bool(masks.is_causal(MaskUse(mask, "added" if floating else "kept")))
    return Attention(node, causal, inputs.reaching(queries), inputs.reaching(keys))


def _weighs(facts: GraphFacts, softmax: ir.Node) -> bool:
    """Whether a softmax weights a computed matrix: attention whose scores have another form."""
    rank = facts.rank(softmax.outputs[0])
    if rank is not None and rank < 3:
        return False
    return any(not facts.is_constant(value) for value in _multiplied(softmax))


def _multiplied(softmax: ir.Node) -> Iterator[ir.Value]:
    """Iterate over the values that the result of a softmax weights, after a few layout operators."""
    values = [softmax.outputs[0]]
    for _ in range(_LAYOUT_STEPS + 1):
        readers = [use for value in values for use in value.uses()]
        for use in readers:
            if use.node.op_type in ("MatMul", "Einsum") and use.idx == 0 and use.node.inputs[1] is not None:
                yield use.node.inputs[1]
            elif use.node.op_type == "Mul" and _is_summed(use.node.outputs[0]):
                yield from (value for value in use.node.inputs if value is not None and value not in values)
        onward = ("Cast", "Dropout", "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Where")
        values = [output for use in readers if use.node.op_type in onward for output in use.node.outputs]


def _is_summed(product: ir.Value) -> bool:
    return any(use.node.op_type == "ReduceSum" for use in product.uses())
