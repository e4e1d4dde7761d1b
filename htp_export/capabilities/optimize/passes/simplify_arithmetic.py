"""Consecutive factors, and products with reciprocals."""

from __future__ import annotations

import onnx_ir as ir

from htp_export.capabilities.optimize.registry import NodePass, absorbed, register
from htp_export.editing.editing import add_constant, is_constant, multiple, replace, scaled, times
from htp_export.model.recipes import of_values


@register("simplify_arithmetic", level="tolerant")
class SimplifyArithmetic(NodePass):
    """Multiplies once where a value is multiplied by one constant after another, and divides where by a reciprocal."""

    operators = ("Mul", "Div")

    def rewrite(self, node: ir.Node) -> bool:
        if _divide(node):
            return True
        outer = multiple(node)
        inner = scaled(outer[0]) if outer is not None else None
        joint = times(outer[1], inner[1]) if outer is not None and inner is not None else None
        if inner is None or joint is None:
            return False
        read = [*node.inputs, *(outer[0].producer().inputs if outer is not None else ())]  # type: ignore[union-attr]
        recipe = of_values("a joint factor", *filter(is_constant, read))
        factor = add_constant(self.graph, joint, f"{node.outputs[0].name}_factor", recipe)
        replace(node, [ir.node("Mul", [inner[0], factor])])
        return True


def _divide(node: ir.Node) -> bool:
    """Make a ``Div`` of a ``Mul`` by a ``Reciprocal`` that nothing else reads."""
    for place in (1, 0) if node.op_type == "Mul" else ():
        if reciprocal := absorbed(node.inputs[place], "Reciprocal"):
            replace(node, [ir.node("Div", [node.inputs[1 - place], reciprocal.inputs[0]])])
            return True
    return False
