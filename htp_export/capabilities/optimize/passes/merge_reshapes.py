"""Merging of consecutive reshapes."""

from __future__ import annotations

import onnx_ir as ir

from htp_export.capabilities.optimize.passes.simplify_shape_chains import reshape_target
from htp_export.capabilities.optimize.registry import NodePass, decline, integers, register
from htp_export.editing.editing import is_boundary, replace
from htp_export.model.neighbours import producer_of
from htp_export.shapes.operator_kinds import RESHAPING, is_standard


@register("merge_reshapes", level="exact")
class MergeReshapes(NodePass):
    """Merges consecutive operators that only change the shape into one ``Reshape``."""

    operators = tuple(sorted(RESHAPING))

    def rewrite(self, node: ir.Node) -> bool:
        first = producer_of(node.inputs[0], *RESHAPING)
        source = first.inputs[0] if first is not None else None
        if first is None or source is None:
            return False
        why = _needed(first)
        if why:
            return decline("chained_reshapes", [first, node], why)
        target = reshape_target(self.known.shape(source), self.known.shape(node.outputs[0]))
        if target is None:
            why = "more than one size of the result is not known beforehand"
            return decline("chained_reshapes", [first, node], why)
        replace(node, [ir.node("Reshape", [source, integers(node, target, "shape")])])
        return True


def _needed(node: ir.Node) -> str:
    """Why the first of two reshapes would stay; empty if it would be unused."""
    value = node.outputs[0]
    if is_boundary(value):
        return "a module has the tensor in between as input or output"
    only_reshapes = all(is_standard(use.node, *RESHAPING) for use in value.uses())
    if value.is_graph_output() or not only_reshapes:
        return "other nodes use the tensor in between"
    return ""
