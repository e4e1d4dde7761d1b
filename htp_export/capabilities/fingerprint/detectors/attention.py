"""Attention: whether it is causal, and whether its keys come from where its queries do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx_ir as ir

from htp_export.capabilities.fingerprint.detectors.inputs import ModelInputs
from htp_export.capabilities.fingerprint.detectors.masks import CausalMasks
from htp_export.model.graph_facts import GraphFacts
from htp_export.shapes.operator_kinds import is_standard

if TYPE_CHECKING:
    from htp_export.capabilities.forensics.attention_steps import MaskUse

__all__ = ["Attention", "attentions_of"]

_FUSED = (
    "Attention",
    "MultiHeadAttention",
    "GroupQueryAttention",
    "PackedMultiHeadAttention",
    "DecoderMaskedMultiHeadAttention",
)


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
    from htp_export.capabilities.forensics.attention_steps import attention_steps

    attentions = {
        steps.softmax: _from_steps(inputs, masks, steps.softmax, steps.scores, steps.masks)
        for steps in attention_steps(facts)
    }
    for node in facts.nodes:
        if node.op_type in _FUSED:
            attentions[node] = _from_operator(inputs, masks, node)
    return list(attentions.values())


def _from_steps(
    inputs: ModelInputs, masks: CausalMasks, softmax: ir.Node, scores: ir.Node, used: tuple[MaskUse, ...]
) -> Attention:
    queries, keys = scores.inputs[0], scores.inputs[1]
    causal = any(masks.is_causal(mask) for mask in used)
    return Attention(softmax, causal, inputs.reaching(queries), inputs.reaching(keys))


def _from_operator(inputs: ModelInputs, masks: CausalMasks, node: ir.Node) -> Attention:
    from htp_export.capabilities.forensics.attention_steps import MaskUse

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
