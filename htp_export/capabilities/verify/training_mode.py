"""Find nodes that compute as in training: PyTorch runs in eval mode, so that they differ."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from htp_export.model.graph_facts import GraphFacts
from htp_export.model.tagged import TaggedModel
from htp_export.shapes.operator_kinds import RANDOM, is_standard


def training_nodes(
    tagged: TaggedModel, wrong: Collection[str], drawing: Collection[str]
) -> tuple[str, ...]:
    """Describe the nodes of wrong modules that compute as in training, one line for each.

    Such nodes normalise by the batch, drop elements or draw random numbers. ``drawing``: modules
    that drew random numbers in PyTorch in eval mode; their nodes may do so, too.
    """
    facts, lines = GraphFacts(tagged), []
    for node in tagged.nodes:
        owners = [
            owner for owner in tagged.owners_of(node) if owner in wrong and owner not in drawing
        ]
        action = _in_training(node, facts) if owners else ""
        if action:
            lines.append(f"{node.op_type} {node.name!r} of {owners[0] or '(root)'} {action}")
    return tuple(lines)


def _in_training(node: ir.Node, facts: GraphFacts) -> str:
    """The action of a node that happens only in training, as a verb phrase; ``""`` for other nodes."""
    if is_standard(node, *RANDOM):
        return "draws random numbers"
    if is_standard(node, "Dropout") and len(node.inputs) > 2:
        mode = facts.array(node.inputs[2])
        return "drops elements at random" if mode is not None and mode.all() else ""
    if is_standard(node, "BatchNormalization") and node.attributes.get_int("training_mode", 0) == 1:
        return "takes mean and variance of the batch"
    return ""
