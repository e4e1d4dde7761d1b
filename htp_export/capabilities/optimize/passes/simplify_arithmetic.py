"""Merging of consecutive factors, and of products with reciprocals."""

from __future__ import annotations

import onnx_ir as ir

from htp_export.capabilities.optimize.registry import NodePass, absorbed, register
from htp_export.editing.editing import add_constant, is_constant, multiple, replace, scaled, times
from htp_export.model.recipes import of_values


@register("simplify_arithmetic", level="tolerant")
class SimplifyArithmetic(NodePass):
    """Merges consecutive constant factors, and replaces products with reciprocals by divisions."""

    operators = ("Mul", "Div")

    def rewrite(self, node: ir.Node) -> bool:
        if _divide(node):
            return True
        outer = multiple(node)
        if outer is None:
            return False
        value, outer_factor = outer
        inner = scaled(value)
        if inner is None:
            return False
        source, inner_factor = inner
        joint = times(outer_factor, inner_factor)
        if joint is None:
            return False
        inputs = [*node.inputs, *value.producer().inputs]  # type: ignore[union-attr]
        recipe = of_values("a joint factor", *filter(is_constant, inputs))
        factor = add_constant(self.graph, joint, f"{node.outputs[0].name}_factor", recipe)
        replace(node, [ir.node("Mul", [source, factor])])
        return True


def _divide(node: ir.Node) -> bool:
    """Replace a ``Mul`` by a ``Reciprocal`` without other consumers by a ``Div``."""
    if node.op_type != "Mul":
        return False
    for value, other in (reversed(node.inputs), node.inputs):
        reciprocal = absorbed(value, "Reciprocal")
        if reciprocal is not None:
            replace(node, [ir.node("Div", [other, reciprocal.inputs[0]])])
            return True
    return False
