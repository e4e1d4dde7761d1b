"""Scaling in attention, done once instead of on both sides of a product."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from htp_export.model.operators import is_standard
from htp_export.passes.declining import decline
from htp_export.passes.editing import (
    Array,
    add_constant,
    constant_array,
    is_boundary,
    only_reader,
    replace,
)
from htp_export.passes.node_pass import NodePass
from htp_export.passes.registry import register

__all__ = ["CleanupAttention"]


@register("cleanup_attention", level="tolerant")
class CleanupAttention(NodePass):
    """Scales a product of two scaled matrices once, after it: queries and keys come scaled by a root each."""

    operators = ("MatMul",)

    def rewrite(self, node: ir.Node) -> bool:
        return _scale_after(self.graph, node)


def _scale_after(graph: ir.Graph, node: ir.Node) -> bool:
    sides = [scaled(value) for value in node.inputs]
    if any(side is None for side in sides):
        makers = [value.producer() for value in node.inputs if value is not None and _multiple(value) is not None]
        if len(makers) == 2:
            decline("double_scaling", [*filter(None, makers), node], "what is scaled is read elsewhere")
        return False
    (left, one), (right, other) = (side for side in sides if side is not None)
    factor = add_constant(graph, np.asarray(one * other, dtype=one.dtype), f"{node.outputs[0].name}_scale")
    joint = ir.node("MatMul", [left, right])
    replace(node, [joint, ir.node("Mul", [joint.outputs[0], factor])])
    return True


def scaled(value: ir.Value | None) -> tuple[ir.Value, Array] | None:
    """What a value is a multiple of by one constant, if nothing else reads it."""
    if value is None or only_reader(value) is None or is_boundary(value):
        return None
    return _multiple(value)


def _multiple(value: ir.Value) -> tuple[ir.Value, Array] | None:
    node = value.producer()
    if node is None or not is_standard(node, "Mul", "Div"):
        return None
    for place in (1, 0) if node.op_type == "Mul" else (1,):
        factor, source = constant_array(node.inputs[place], 1), node.inputs[1 - place]
        if factor is not None and factor.dtype.kind == "f" and factor.size == 1 and source is not None:
            flat = factor.reshape(())
            same_rank = value.shape is None or source.shape is None or len(value.shape) == len(source.shape)
            if same_rank and factor.ndim <= 1:
                return source, np.asarray(flat if node.op_type == "Mul" else 1 / flat, dtype=factor.dtype)
    return None
