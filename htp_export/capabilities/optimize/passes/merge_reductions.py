"""Consecutive reductions."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.node_pass import NodePass
from htp_export.capabilities.optimize.registry import register
from htp_export.editing.editing import add_constant, is_boundary, replace
from htp_export.model.neighbours import only_consumer, producer_of
from htp_export.shapes.known import axes_of, normalized
from htp_export.shapes.symbolic import Symbolic


@register("merge_reductions", level="tolerant")
class MergeReductions(NodePass):
    """Makes one reduction of two in a row over other dimensions: mean of means, sum of sums.

    Not of products: in another order, they may overflow.
    """

    operators = ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum")

    def rewrite(self, node: ir.Node) -> bool:
        first = producer_of(node.inputs[0], node.op_type)
        return first is not None and _merge(self.graph, first, node, self.known)


def _merge(graph: ir.Graph, first: ir.Node, second: ir.Node, known: Symbolic) -> bool:
    between, keep = first.outputs[0], second.attributes.get_int("keepdims", 1)
    first_axes, second_axes = _axes(first, known), _axes(second, known)
    if first_axes is None or second_axes is None or first.attributes.get_int("keepdims", 1) != keep:
        return False
    if only_consumer(between) is None or is_boundary(between):
        return False
    rank = known.rank(first.inputs[0])
    left = [axis for axis in range(rank or 0) if keep or axis not in first_axes]
    axes = sorted({*first_axes, *(left[axis] for axis in second_axes)})
    if "axes" in second.attributes:
        replace(second, [ir.node(second.op_type, [first.inputs[0]], {"axes": axes, "keepdims": keep})])
    else:
        numbers = add_constant(graph, np.array(axes, np.int64), f"{second.outputs[0].name}_axes")
        replace(second, [ir.node(second.op_type, [first.inputs[0], numbers], {"keepdims": keep})])
    return True


def _axes(node: ir.Node, known: Symbolic) -> list[int] | None:
    """The dimensions that a node reduces; None if they are not written, which means all or none."""
    axes, rank = axes_of(node, known), known.rank(node.inputs[0])
    return [normalized(axis, rank) for axis in axes] if axes and rank is not None else None
