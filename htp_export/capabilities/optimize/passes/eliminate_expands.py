"""``Expand`` before operators that broadcast."""

from __future__ import annotations

import onnx_ir as ir

from htp_export.capabilities.optimize.registry import NodePass, register
from htp_export.editing.editing import is_boundary
from htp_export.shapes.known import Shape
from htp_export.shapes.operator_kinds import is_standard
from htp_export.shapes.operators.elementwise import ELEMENTWISE, broadcast
from htp_export.shapes.symbolic import Symbolic


@register("eliminate_expands", level="exact")
class EliminateExpands(NodePass):
    """Removes ``Expand`` before element-wise operators that broadcast without it."""

    operators = ("Expand",)

    def rewrite(self, node: ir.Node) -> bool:
        source, expanded = node.inputs[0], node.outputs[0]
        if source is None or is_boundary(expanded) or expanded.is_graph_output():
            return False
        consumers = expanded.consumers()
        if not consumers:
            return False
        if not all(_broadcasts(consumer, expanded, source, self.known) for consumer in consumers):
            return False
        for use in tuple(expanded.uses()):
            use.node.replace_input_with(use.idx, source)
        return True


def _broadcasts(consumer: ir.Node, expanded: ir.Value, source: ir.Value, known: Symbolic) -> bool:
    """Whether the output shape of an operator stays the same without the ``Expand`` before it."""
    if not is_standard(consumer, *ELEMENTWISE) or consumer.graph is not expanded.graph:
        return False
    shapes: list[Shape] = []
    for value in consumer.inputs:
        shape = known.shape(source if value is expanded else value)
        if shape is None:
            return False
        shapes.append(shape)
    result = known.shape(consumer.outputs[0])
    return result is not None and tuple(broadcast(shapes)) == result
