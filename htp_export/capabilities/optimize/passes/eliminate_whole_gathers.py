"""``GatherND`` that takes every element once, in order, as masks of PyTorch are indexed."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from htp_export.capabilities.optimize.registry import NodePass, integers, register
from htp_export.editing.editing import replace
from htp_export.model.neighbours import producer_of
from htp_export.shapes.known import axes_of, normalized
from htp_export.shapes.sizes import Dim
from htp_export.shapes.symbolic import Symbolic


@register("eliminate_whole_gathers", level="exact")
class EliminateWholeGathers(NodePass):
    """Makes ``Unsqueeze`` of a ``GatherND`` whose indices count all places of each dimension.

    ``mask[batch_index, key_index]``, with ranges that are broadcast to a grid, is the mask with
    further dimensions of size 1. See https://onnx.ai/onnx/operators/onnx__GatherND.html.
    """

    operators = ("GatherND",)
    opset = 13  # Unsqueeze with axes as an input

    def rewrite(self, node: ir.Node) -> bool:
        source, indices = node.inputs[0], node.inputs[1]
        shape, grid = self.known.shape(source), self.known.shape(node.outputs[0])
        parts = (
            stacked(indices, self.known) if not node.attributes.get_int("batch_dims", 0) else None
        )
        if (
            source is None
            or shape is None
            or grid is None
            or parts is None
            or len(parts) != len(shape)
        ):
            return False
        axes = [
            _counted(part, size, grid, self.known) for part, size in zip(parts, shape, strict=True)
        ]
        along = [axis for axis in axes if axis is not None]
        if len(along) < len(axes) or along != sorted(set(along)):
            return False
        added = [axis for axis in range(len(grid)) if axis not in along]
        if any(grid[axis] != 1 for axis in added):
            return False
        made = (
            ir.node("Unsqueeze", [source, integers(node, added, "axes")])
            if added
            else ir.node("Identity", [source])
        )
        replace(node, [made])
        return True


def stacked(value: ir.Value | None, known: Symbolic) -> list[ir.Value] | None:
    """The tensors that are stacked along a new last axis, as the indices of each dimension are."""
    joined, rank = producer_of(value, "Concat"), known.rank(value)
    if (
        joined is None
        or rank is None
        or normalized(joined.attributes["axis"].as_int(), rank) != rank - 1
    ):
        return None
    parts = []
    for each in joined.inputs:
        unsqueeze = producer_of(each, "Unsqueeze")
        axes = axes_of(unsqueeze, known) if unsqueeze is not None else None
        if unsqueeze is None or unsqueeze.inputs[0] is None or axes not in ([-1], [rank - 1]):
            return None
        parts.append(unsqueeze.inputs[0])
    return parts


def _counted(value: ir.Value, size: Dim, grid: Sequence[Dim], known: Symbolic) -> int | None:
    """The axis of a grid along which a tensor counts from 0 to below a size, and along all others it is the same."""
    node = producer_of(value, "Expand", "Reshape", "Unsqueeze", "Range")
    while node is not None and node.op_type == "Expand" and node.inputs[0] is not None:
        value = node.inputs[0]
        node = producer_of(value, "Expand", "Reshape", "Unsqueeze", "Range")
    shape = known.shape(value)
    if node is None or shape is None or len(shape) > len(grid):
        return None
    shape = (1,) * (len(grid) - len(shape)) + tuple(shape)
    axes = [axis for axis, dim in enumerate(shape) if dim != 1]
    counting = node if node.op_type == "Range" else producer_of(node.inputs[0], "Range")
    if counting is None or len(axes) != 1 or not shape[axes[0]] == size == grid[axes[0]]:
        return None
    start, step = (known.constant(counting.inputs[place]) for place in (0, 2))
    return (
        axes[0]
        if (start, step) == ([0], [1]) and known.shape(counting.outputs[0]) == (size,)
        else None
    )
