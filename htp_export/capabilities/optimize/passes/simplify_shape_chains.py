"""Computations of sizes: constant ones folded, equal ones shared, unneeded ones removed."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.registry import NodePass, integers, register
from htp_export.editing.editing import add_constant, replace, replace_with
from htp_export.model.neighbours import only_consumer, producer_of
from htp_export.model.recipes import depends_on_entries
from htp_export.shapes.known import Contents
from htp_export.shapes.operator_kinds import is_standard
from htp_export.shapes.sizes import Dim


@register("simplify_shape_chains", level="exact")
class SimplifyShapeChains(NodePass):
    """Computes sizes once, and replaces shapes of ``Reshape`` and ``Expand`` by constants."""

    operators = ()

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        self._seen: dict[object, ir.Value] = {}  # type and contents → the first value with them
        return super().call(model)

    def rewrite(self, node: ir.Node) -> bool:
        modified = self._constant_target(node) or self._one_gather(node)
        contents = self.known.contents(node.outputs[0]) if len(node.outputs) == 1 else None
        if contents is not None and node.inputs:
            modified |= self._reuse(node.outputs[0], contents)
            modified |= self._put_together(node, contents)
        return modified

    def _constant_target(self, node: ir.Node) -> bool:
        """Replace the computed shape of a ``Reshape`` or ``Expand`` by a constant."""
        if not is_standard(node, "Reshape", "Expand") or node.inputs[1] is None:
            return False
        if self.known.constant(node.inputs[1]):
            return False
        source, result = self.known.shape(node.inputs[0]), self.known.shape(node.outputs[0])
        if node.op_type == "Expand":
            target = _expand_target(source, result)
        elif node.attributes.get_int("allowzero", 0) == 1:
            return False
        else:
            target = reshape_target(source, result)
        if target is None:
            return False
        node.replace_input_with(1, integers(node, target, "shape"))
        return True

    def _one_gather(self, node: ir.Node) -> bool:
        """Gather a size as a vector, instead of as a number before an ``Unsqueeze``."""
        gather = producer_of(node.inputs[0], "Gather") if is_standard(node, "Unsqueeze") else None
        if gather is None or only_consumer(gather.outputs[0]) is None:
            return False
        index = self.known.contents(gather.inputs[1])
        if index is None or index.ndim or self.known.rank(gather.inputs[0]) != 1:
            return False
        # The Gather of a vector of one index has one axis; an Unsqueeze may add more.
        if self.known.rank(node.outputs[0]) != 1:
            return False
        indices = integers(node, [index.item()], "index")
        replace(node, [ir.node("Gather", [gather.inputs[0], indices], {"axis": 0})])
        return True

    def _reuse(self, value: ir.Value, contents: Contents) -> bool:
        """Replace a value by a constant, or by an earlier value with equal contents."""
        dtype = self.known.dtype(value)
        if dtype is None or not value.uses():
            return False
        flat = contents.reshape(-1).tolist()
        if all(isinstance(item, int) for item in flat):
            # numbers of parameters are folded with their recipes: `FoldConstants`
            if value.is_graph_output() or depends_on_entries(value):
                return False
            array = np.array(flat, dtype=dtype.numpy()).reshape(contents.shape)
            return replace_with(value, add_constant(self.graph, array, f"{value.name}_folded"))
        earlier = self._seen.setdefault((dtype, contents.shape, *flat), value)
        return earlier is not value and replace_with(value, earlier)

    def _put_together(self, node: ir.Node, contents: Contents) -> bool:
        """Replace a shape that ``Where`` selects by the ``Concat`` of its elements."""
        result, seen = node.outputs[0], self._seen
        dtype = self.known.dtype(result)
        if not is_standard(node, "Where") or contents.ndim != 1:
            return False
        if dtype is None or not result.uses():
            return False
        parts: list[ir.Value] = []
        for size in contents:
            if isinstance(size, int):
                array = np.array([size], dtype.numpy())
                parts.append(add_constant(self.graph, array, f"{result.name}_part"))
            elif (dtype, (1,), size) in seen:
                parts.append(seen[dtype, (1,), size])
            else:
                return False
        concat = ir.node("Concat", parts, {"axis": 0})
        replace(node, [concat])
        # the old value has no producer any more
        seen[dtype, contents.shape, *contents.tolist()] = concat.outputs[0]
        return True


def reshape_target(
    source: tuple[Dim, ...] | None, result: tuple[Dim, ...] | None
) -> list[int] | None:
    """The shape argument of a ``Reshape`` from one shape to another; None if there is none.

    A size that both shapes have at one position is 0, and one other unknown size is -1.

    Examples:
        >>> from htp_export.shapes.sizes import symbol
        >>> batch, length = symbol("batch"), symbol("length")
        >>> reshape_target((batch, length, 64), (batch, length, 4, 16))
        [0, 0, 4, 16]
        >>> reshape_target((batch, length, 64), (batch * length, 64))
        [-1, 64]
    """
    if source is None or result is None:
        return None
    target: list[int] = []
    for axis, dim in enumerate(result):
        if isinstance(dim, int):
            if dim == 0:
                return None
            target.append(dim)
        elif axis < len(source) and source[axis] == dim:
            target.append(0)
        elif -1 in target:
            return None
        else:
            target.append(-1)
    return target


def _expand_target(
    source: tuple[Dim, ...] | None, result: tuple[Dim, ...] | None
) -> list[int] | None:
    """The shape argument of an ``Expand``; a size that the input has, too, is 1."""
    if source is None or result is None:
        return None
    aligned: tuple[Dim, ...] = (1,) * (len(result) - len(source)) + source
    target: list[int] = []
    for dim, source_dim in zip(result, aligned, strict=True):
        size = 1 if dim == source_dim else dim
        if not isinstance(size, int):
            return None
        target.append(size)
    return target
