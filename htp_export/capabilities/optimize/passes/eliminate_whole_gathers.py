"""``GatherND`` of every element once, in order: the indexing of masks in PyTorch models."""

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
    """Replaces a ``GatherND`` of all elements in order by ``Unsqueeze``.

    ``mask[batch_index, key_index]``, with ranges that are broadcast to a grid, is the mask with
    further dimensions of size 1. See https://onnx.ai/onnx/operators/onnx__GatherND.html.
    """

    operators = ("GatherND",)
    opset = 13  # Unsqueeze with axes as an input

    def rewrite(self, node: ir.Node) -> bool:
        source, indices = node.inputs[0], node.inputs[1]
        shape, grid = self.known.shape(source), self.known.shape(node.outputs[0])
        if source is None or shape is None or grid is None:
            return False
        if node.attributes.get_int("batch_dims", 0):
            return False
        parts = stacked(indices, self.known)
        if parts is None or len(parts) != len(shape):
            return False
        axes: list[int] = []
        for part, size in zip(parts, shape, strict=True):
            axis = _counted(part, size, grid, self.known)
            if axis is None:
                return False
            axes.append(axis)
        if axes != sorted(set(axes)):
            return False
        added = [axis for axis in range(len(grid)) if axis not in axes]
        if any(grid[axis] != 1 for axis in added):
            return False
        if added:
            replace(node, [ir.node("Unsqueeze", [source, integers(node, added, "axes")])])
        else:
            replace(node, [ir.node("Identity", [source])])
        return True


def stacked(value: ir.Value | None, known: Symbolic) -> list[ir.Value] | None:
    """The tensors that are stacked along a new last axis, as the indices of each dimension are."""
    concat, rank = producer_of(value, "Concat"), known.rank(value)
    if concat is None or rank is None:
        return None
    if normalized(concat.attributes["axis"].as_int(), rank) != rank - 1:
        return None
    parts: list[ir.Value] = []
    for part in concat.inputs:
        unsqueeze = producer_of(part, "Unsqueeze")
        axes = axes_of(unsqueeze, known) if unsqueeze is not None else None
        if unsqueeze is None or unsqueeze.inputs[0] is None or axes not in ([-1], [rank - 1]):
            return None
        parts.append(unsqueeze.inputs[0])
    return parts


def _counted(value: ir.Value, size: Dim, grid: Sequence[Dim], known: Symbolic) -> int | None:
    """The axis of a grid along which a tensor counts from 0 to below a size.

    Along all other axes it is constant; None if it is another tensor.
    """
    node = producer_of(value, "Expand", "Reshape", "Unsqueeze", "Range")
    while node is not None and node.op_type == "Expand" and node.inputs[0] is not None:
        value = node.inputs[0]
        node = producer_of(value, "Expand", "Reshape", "Unsqueeze", "Range")
    shape = known.shape(value)
    if node is None or shape is None or len(shape) > len(grid):
        return None
    aligned = (1,) * (len(grid) - len(shape)) + tuple(shape)
    axes = [axis for axis, dim in enumerate(aligned) if dim != 1]
    if len(axes) != 1:
        return None
    [axis] = axes
    counting = node if node.op_type == "Range" else producer_of(node.inputs[0], "Range")
    if counting is None or not aligned[axis] == size == grid[axis]:
        return None
    start, step = known.constant(counting.inputs[0]), known.constant(counting.inputs[2])
    counts = (start, step) == ([0], [1]) and known.shape(counting.outputs[0]) == (size,)
    return axis if counts else None
