"""Scaling in attention, done once instead of on both sides of a product."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from htp_export.passes.declining import decline
from htp_export.passes.editing import add_constant, multiple, replace, scaled
from htp_export.passes.node_pass import NodePass
from htp_export.passes.registry import register


@register("cleanup_attention", level="tolerant")
class CleanupAttention(NodePass):
    """Scales the product of two scaled matrices once: queries and keys come scaled by a square root each."""

    operators = ("MatMul",)

    def rewrite(self, node: ir.Node) -> bool:
        sides = [scaled(value) for value in node.inputs]
        if any(side is None for side in sides):
            producers = [value.producer() for value in node.inputs if value is not None]
            if all(multiple(producer) is not None for producer in producers):
                decline("double_scaling", [*filter(None, producers), node], "what is scaled is read elsewhere")
            return False
        (left, left_factor), (right, right_factor) = (side for side in sides if side is not None)
        scale = np.asarray(left_factor * right_factor, dtype=left_factor.dtype)
        factor = add_constant(self.graph, scale, f"{node.outputs[0].name}_scale")
        joint = ir.node("MatMul", [left, right])
        replace(node, [joint, ir.node("Mul", [joint.outputs[0], factor])])
        return True
