"""Convolutions: how many dimensions they have, and what the first one does to its input."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

from htp_export.model.graph_facts import GraphFacts

__all__ = ["convolutions", "kernel_and_strides"]

_CONVOLUTIONS = ("Conv", "ConvInteger", "QLinearConv", "ConvTranspose")


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


def kernel_and_strides(facts: GraphFacts, node: ir.Node) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The size of a convolution's kernel along each dimension, and how far it goes at each step."""
    kernel = tuple(size for size in (facts.shape(node.inputs[1]) or ())[2:] if isinstance(size, int))
    return (kernel, tuple(node.attributes.get_ints("strides") or (1,) * len(kernel))) if kernel else None
