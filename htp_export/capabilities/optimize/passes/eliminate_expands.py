"""``Expand`` before operators that broadcast."""

from __future__ import annotations

import onnx_ir as ir

from htp_export.capabilities.optimize.registry import NodePass, register
from htp_export.editing.editing import is_boundary
from htp_export.shapes.operator_kinds import is_standard
from htp_export.shapes.operators.elementwise import ELEMENTWISE, broadcast
from htp_export.shapes.symbolic import Symbolic


@register("eliminate_expands", level="exact")
class EliminateExpands(NodePass):
    """Takes out ``Expand`` before element-wise operators that broadcast to the same shape without it."""

    operators = ("Expand",)

    def rewrite(self, node: ir.Node) -> bool:
        source, expanded = node.inputs[0], node.outputs[0]
        if (
            source is None
            or is_boundary(expanded)
            or expanded.is_graph_output()
            or not expanded.uses()
        ):
            return False
        if not all(
            _broadcasts(reader, expanded, source, self.known) for reader in expanded.consumers()
        ):
            return False
        for use in tuple(expanded.uses()):
            use.node.replace_input_with(use.idx, source)
        return True


def _broadcasts(reader: ir.Node, expanded: ir.Value, source: ir.Value, known: Symbolic) -> bool:
    """Whether the output shape of an operator stays the same without the ``Expand`` before it."""
    if not is_standard(reader, *ELEMENTWISE) or reader.graph is not expanded.graph:
        return False
    shapes = [known.shape(source if value is expanded else value) for value in reader.inputs]
    wanted = known.shape(reader.outputs[0])
    known_shapes = [shape for shape in shapes if shape is not None]
    return (
        wanted is not None
        and len(known_shapes) == len(shapes)
        and tuple(broadcast(known_shapes)) == wanted
    )
