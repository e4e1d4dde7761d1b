"""The scales of both factors of a product, merged into one."""

from __future__ import annotations

import onnx_ir as ir

from htp_export.capabilities.optimize.registry import NodePass, decline, register
from htp_export.editing.editing import add_constant, is_constant, multiple, replace, scaled, times
from htp_export.format.recipes import Recipe
from htp_export.model.recipes import of_values


@register("cleanup_attention", level="tolerant")
class CleanupAttention(NodePass):
    """Merges the scales of both factors of a product, such as queries and keys.

    PyTorch scales both by the square root of the scale. The first factor is scaled, so that no
    number becomes larger than before: a product of unscaled float16 overflows. A scale of more than
    1 is applied to the product.
    """

    operators = ("MatMul",)

    def rewrite(self, node: ir.Node) -> bool:
        sides = [scaled(value) for value in node.inputs]
        factors = [side for side in sides if side is not None]
        if len(factors) < len(sides):
            producers = [value.producer() for value in node.inputs if value is not None]
            if all(multiple(producer) is not None for producer in producers):
                nodes = [*filter(None, producers), node]
                decline("double_scaling", nodes, "other nodes use a tensor before or after scaling")
            return False
        (left, left_factor), (right, right_factor) = factors
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
    factors: list[ir.Value | None] = []
    for value in product.inputs:
        scaling = value.producer() if value is not None else None
        if scaling is not None:
            factors += [factor for factor in scaling.inputs if is_constant(factor)]
    return of_values("a joint scale", *factors)
