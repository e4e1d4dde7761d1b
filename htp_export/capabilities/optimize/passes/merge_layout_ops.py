"""A transposition between two reshapes that join and split dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.node_pass import NodePass
from htp_export.capabilities.optimize.passes.eliminate_redundant_transposes import permutation
from htp_export.capabilities.optimize.passes.simplify_shape_chains import reshape_target
from htp_export.capabilities.optimize.registry import register
from htp_export.editing.editing import add_constant, is_boundary, replace
from htp_export.model.neighbours import only_consumer, producer_of
from htp_export.shapes.sizes import Dim, product
from htp_export.shapes.symbolic import Symbolic


@register("merge_layout_ops", level="exact")
class MergeLayoutOps(NodePass):
    """Makes one ``Transpose`` of Reshape, Transpose, Reshape where whole dimensions move.

    And a ``Reshape`` of a ``Transpose`` next to one, where only dimensions of size 1 move.
    """

    operators = ("Transpose",)

    def rewrite(self, node: ir.Node) -> bool:
        return _between_reshapes(node, self.known) or _moves_only_ones(self.graph, node, self.known)


def _between_reshapes(node: ir.Node, known: Symbolic) -> bool:
    first, last = producer_of(node.inputs[0], "Reshape"), only_consumer(node.outputs[0], "Reshape")
    if first is None or last is None:
        return False
    shapes = [known.shape(value) for value in (first.inputs[0], node.inputs[0], last.outputs[0])]
    perm = permutation(node, known)
    source_shape, joined, result = shapes
    between = (first.outputs[0], node.outputs[0])
    if any(map(is_boundary, between)) or last.inputs[0] is not node.outputs[0]:
        return False
    if source_shape is None or joined is None or result is None or perm is None:
        return False
    groups = grouped(source_shape, joined)
    if groups is None:
        return False
    axes = [axis for place in perm for axis in groups[place]]
    if tuple(source_shape[axis] for axis in axes) != result:
        return False
    replace(last, [ir.node("Transpose", [first.inputs[0]], {"perm": axes})])
    return True


def grouped(apart: Sequence[Dim], joined: Sequence[Dim]) -> list[list[int]] | None:
    """For each dimension of a reshaped shape, the consecutive dimensions that were joined; None if none were.

    Examples:
        >>> grouped((2, 4, 8, 16), (8, 8, 16)), grouped((2, 4), (8,)), grouped((8, 4), (4, 8))
        ([[0, 1], [2], [3]], [[0, 1]], None)
    """
    groups: list[list[int]] = []
    place = 0
    for size in joined:
        group: list[int] = []
        while place < len(apart) and (not group or product(apart[axis] for axis in group) != size):
            group.append(place)
            place += 1
        if product(apart[axis] for axis in group) != size:
            return None
        groups.append(group)
    return groups if place == len(apart) else None


def _moves_only_ones(graph: ir.Graph, node: ir.Node, known: Symbolic) -> bool:
    """Replace a ``Transpose`` that moves dimensions of size 1 only by a ``Reshape``, if there is one beside it."""
    source_shape, result, perm = known.shape(node.inputs[0]), known.shape(node.outputs[0]), permutation(node, known)
    if node.inputs[0] is None or source_shape is None or result is None or perm is None:
        return False
    moving = [axis for axis in perm if source_shape[axis] != 1]
    before, after = producer_of(node.inputs[0], "Reshape"), only_consumer(node.outputs[0], "Reshape")
    if moving != sorted(moving) or (before is None and after is None):
        return False
    target = reshape_target(source_shape, result)
    if target is None:
        return False
    shape = add_constant(graph, np.array(target, np.int64), f"{node.outputs[0].name}_shape")
    replace(node, [ir.node("Reshape", [node.inputs[0], shape])])
    return True
