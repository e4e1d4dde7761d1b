"""Merging of consecutive reductions."""

from __future__ import annotations

import onnx_ir as ir

from htp_export.capabilities.optimize.registry import NodePass, absorbed, integers, register
from htp_export.editing.editing import replace
from htp_export.shapes.known import axes_of, normalized


@register("merge_reductions", level="tolerant")
class MergeReductions(NodePass):
    """Merges two consecutive reductions over different axes: mean of means, sum of sums.

    Products are not merged: in another order, they may overflow.
    """

    operators = ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum")

    def rewrite(self, node: ir.Node) -> bool:
        first, keep = absorbed(node.inputs[0], node.op_type), node.attributes.get_int("keepdims", 1)
        if first is None or first.attributes.get_int("keepdims", 1) != keep:
            return False
        first_axes, second_axes = self._axes(first), self._axes(node)
        if first_axes is None or second_axes is None:
            return False
        source, rank = first.inputs[0], self.known.rank(first.inputs[0])
        kept_axes = [axis for axis in range(rank or 0) if keep or axis not in first_axes]
        axes = sorted({*first_axes, *(kept_axes[axis] for axis in second_axes)})
        if "axes" in node.attributes:
            reduced = ir.node(node.op_type, [source], {"axes": axes, "keepdims": keep})
            replace(node, [reduced])
        else:
            inputs = [source, integers(node, axes, "axes")]
            replace(node, [ir.node(node.op_type, inputs, {"keepdims": keep})])
        return True

    def _axes(self, node: ir.Node) -> list[int] | None:
        """The axes that a node reduces; None if the node has none, which means all or no axes."""
        axes, rank = axes_of(node, self.known), self.known.rank(node.inputs[0])
        return [normalized(axis, rank) for axis in axes] if axes and rank is not None else None
