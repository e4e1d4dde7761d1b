"""A transposition between two reshapes that join and split dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from htp_export.capabilities.optimize.passes.eliminate_redundant_transposes import permutation
from htp_export.capabilities.optimize.passes.simplify_shape_chains import reshape_target
from htp_export.capabilities.optimize.registry import NodePass, integers, register
from htp_export.editing.editing import is_boundary, replace
from htp_export.model.neighbours import only_consumer, producer_of
from htp_export.shapes.sizes import Dim, product


@register("merge_layout_ops", level="exact")
class MergeLayoutOps(NodePass):
    """Makes one ``Transpose`` of Reshape, Transpose, Reshape where whole dimensions move.

    And a ``Reshape`` of a ``Transpose`` next to one, where only dimensions of size 1 move.
    """

    operators = ("Transpose",)

    def rewrite(self, node: ir.Node) -> bool:
        before, after = (
            producer_of(node.inputs[0], "Reshape"),
            only_consumer(node.outputs[0], "Reshape"),
        )
        perm = permutation(node, self.known)
        if perm is None:
            return False
        if before is not None and after is not None and self._join(before, node, after, perm):
            return True
        return (before is not None or after is not None) and self._reshape(node, perm)

    def _join(self, first: ir.Node, node: ir.Node, last: ir.Node, perm: Sequence[int]) -> bool:
        """Make one ``Transpose`` of a transposition between two reshapes."""
        values = (first.inputs[0], node.inputs[0], last.outputs[0])
        source_shape, joined, result = (self.known.shape(value) for value in values)
        if (
            any(map(is_boundary, (first.outputs[0], node.outputs[0])))
            or last.inputs[0] is not node.outputs[0]
        ):
            return False
        groups = None if source_shape is None or joined is None else grouped(source_shape, joined)
        if groups is None or source_shape is None:
            return False
        axes = [axis for place in perm for axis in groups[place]]
        if tuple(source_shape[axis] for axis in axes) != result:
            return False
        replace(last, [ir.node("Transpose", [first.inputs[0]], {"perm": axes})])
        return True

    def _reshape(self, node: ir.Node, perm: Sequence[int]) -> bool:
        """Replace a ``Transpose`` that moves dimensions of size 1 only by a ``Reshape``."""
        source_shape = self.known.shape(node.inputs[0])
        target = reshape_target(source_shape, self.known.shape(node.outputs[0]))
        if source_shape is None or target is None:
            return False
        moving = [axis for axis in perm if source_shape[axis] != 1]
        if moving != sorted(moving):
            return False
        replace(node, [ir.node("Reshape", [node.inputs[0], integers(node, target, "shape")])])
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
