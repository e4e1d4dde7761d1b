"""A transpose between two reshapes that merge and split axes."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from htp_export.capabilities.optimize.passes.eliminate_redundant_transposes import permutation
from htp_export.capabilities.optimize.passes.simplify_shape_chains import reshape_target
from htp_export.capabilities.optimize.registry import NodePass, integers, register
from htp_export.editing.editing import is_boundary, replace
from htp_export.model.neighbours import only_consumer, producer_of
from htp_export.shapes.sizes import Dim


@register("merge_layout_ops", level="exact")
class MergeLayoutOps(NodePass):
    """Merges Reshape, Transpose, Reshape into one ``Transpose`` if they move whole axes.

    Also, a ``Transpose`` next to a ``Reshape`` becomes a ``Reshape`` if it only moves axes of size
    1.
    """

    operators = ("Transpose",)

    def rewrite(self, node: ir.Node) -> bool:
        before = producer_of(node.inputs[0], "Reshape")
        after = only_consumer(node.outputs[0], "Reshape")
        perm = permutation(node, self.known)
        if perm is None or (before is None and after is None):
            return False
        if before is not None and after is not None and self._join(before, node, after, perm):
            return True
        return self._reshape(node, perm)

    def _join(self, first: ir.Node, node: ir.Node, last: ir.Node, perm: Sequence[int]) -> bool:
        """Merge a transpose between two reshapes into one ``Transpose``."""
        if is_boundary(first.outputs[0]) or is_boundary(node.outputs[0]):
            return False
        if last.inputs[0] is not node.outputs[0]:
            return False
        source_shape, merged = self.known.shape(first.inputs[0]), self.known.shape(node.inputs[0])
        if source_shape is None or merged is None:
            return False
        groups = grouped(source_shape, merged)
        if groups is None:
            return False
        axes = [axis for merged_axis in perm for axis in groups[merged_axis]]
        if tuple(source_shape[axis] for axis in axes) != self.known.shape(last.outputs[0]):
            return False
        replace(last, [ir.node("Transpose", [first.inputs[0]], {"perm": axes})])
        return True

    def _reshape(self, node: ir.Node, perm: Sequence[int]) -> bool:
        """Replace a ``Transpose`` that only moves axes of size 1 by a ``Reshape``."""
        source_shape = self.known.shape(node.inputs[0])
        target = reshape_target(source_shape, self.known.shape(node.outputs[0]))
        if source_shape is None or target is None:
            return False
        moving = [axis for axis in perm if source_shape[axis] != 1]
        if moving != sorted(moving):
            return False
        replace(node, [ir.node("Reshape", [node.inputs[0], integers(node, target, "shape")])])
        return True


def grouped(split: Sequence[Dim], merged: Sequence[Dim]) -> list[list[int]] | None:
    """For each axis of a merged shape, the consecutive axes of the other; None if it is no merge.

    Examples:
        >>> grouped((2, 4, 8, 16), (8, 8, 16)), grouped((2, 4), (8,)), grouped((8, 4), (4, 8))
        ([[0, 1], [2], [3]], [[0, 1]], None)
    """
    groups: list[list[int]] = []
    axis = 0
    for size in merged:
        group: list[int] = []
        total: Dim = 1
        while axis < len(split) and (not group or total != size):
            group.append(axis)
            total = total * split[axis]
            axis += 1
        if total != size:
            return None
        groups.append(group)
    return groups if axis == len(split) else None
