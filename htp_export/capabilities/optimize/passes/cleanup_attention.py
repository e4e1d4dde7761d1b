"""Scaling in attention, done once instead of on both sides of a product."""

from __future__ import annotations

import onnx_ir as ir

from htp_export.capabilities.optimize.registry import NodePass, decline, register
from htp_export.editing.editing import add_constant, is_constant, multiple, replace, scaled, times
from htp_export.format.recipes import Recipe
from htp_export.model.recipes import of_values


@register("cleanup_attention", level="tolerant")
class CleanupAttention(NodePass):
    """Scales once where both factors of a product are scaled: queries and keys come scaled by a square root each.

    The first factor is scaled, so that no number becomes larger than it was: a product of unscaled
    float16 overflows. A scale of more than 1 is applied to the product.
    """

    operators = ("MatMul",)

    def rewrite(self, node: ir.Node) -> bool:
        sides = [scaled(value) for value in node.inputs]
        if any(side is None for side in sides):
            producers = [value.producer() for value in node.inputs if value is not None]
            if all(multiple(producer) is not None for producer in producers):
                decline(
                    "double_scaling",
                    [*filter(None, producers), node],
                    "what is scaled is read elsewhere",
                )
            return False
        (left, left_factor), (right, right_factor) = (side for side in sides if side is not None)
        scale = times(left_factor, right_factor)
        if scale is None:
            return False
        factor = add_constant(self.graph, scale, f"{node.outputs[0].name}_scale", _recipe(node))
        if max(abs(left_factor), abs(right_factor)) > 1:
            joint = ir.node("MatMul", [left, right])
            replace(node, [joint, ir.node("Mul", [joint.outputs[0], factor])])
        else:
            first = ir.node("Mul", [left, factor])
            replace(node, [first, ir.node("MatMul", [first.outputs[0], right])])
        return True


def _recipe(product: ir.Node) -> Recipe:
    scalings = [value.producer() for value in product.inputs if value is not None]
    return of_values(
        "a joint scale",
        *(value for node in scalings if node for value in node.inputs if is_constant(value)),
    )
