"""Convolutions: how many dimensions they have, and what the first one does to its input."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import onnx_ir as ir

from htp_export.model.graph_facts import GraphFacts

__all__ = ["Stem", "convolutions", "skip_concatenations", "stem_of"]

_KEEPING_SIZE = ("Add", "BatchNormalization", "Conv", "Gelu", "Identity", "Mul", "Relu", "Sigmoid")
_CONVOLUTIONS = ("Conv", "ConvInteger", "QLinearConv", "ConvTranspose")


@dataclass(frozen=True)
class Stem:
    """The first convolution behind an input.

    Attributes:
        kernel: Its size along each dimension.
        strides: How far it goes at each step.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def patches(self) -> bool:
        """Whether it cuts its input in patches that do not overlap."""
        return self.kernel == self.strides and min(self.kernel, default=1) > 1


def convolutions(facts: GraphFacts) -> Counter[int]:
    """How many convolutions there are with one, two and three dimensions of space or time.

    Those whose kernel is a single point count as none: they are linear layers.
    """
    counts: Counter[int] = Counter()
    for node in facts.nodes_of(*_CONVOLUTIONS):
        weight = facts.shape(node.inputs[3 if node.op_type == "QLinearConv" else 1])
        if weight is not None and any(size != 1 for size in weight[2:]):
            counts[len(weight) - 2] += 1
    return counts


def stem_of(facts: GraphFacts, node: ir.Node) -> Stem | None:
    """The kernel and strides of a convolution."""
    weight = facts.shape(node.inputs[1])
    kernel = tuple(size for size in (weight or ())[2:] if isinstance(size, int))
    if not kernel:
        return None
    strides = tuple(node.attributes.get_ints("strides") or (1,) * len(kernel))
    return Stem(kernel, strides)


def skip_concatenations(facts: GraphFacts) -> int:
    """How often something that was made larger is put beside what was there before: the skips of a U-Net."""
    grown: set[ir.Value] = set()
    count = 0
    for node in facts.nodes:
        if node.op_type in ("Resize", "Upsample", "ConvTranspose", "DepthToSpace"):
            grown.update(node.outputs)
        elif node.op_type == "Concat" and any(value in grown for value in node.inputs):
            count += any(value not in grown and not facts.is_constant(value) for value in node.inputs)
        elif node.op_type in _KEEPING_SIZE and node.inputs and node.inputs[0] in grown:
            grown.update(node.outputs)
    return count
