"""Consecutive reshapes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.declining import decline
from htp_export.capabilities.optimize.node_pass import NodePass
from htp_export.capabilities.optimize.passes.simplify_shape_chains import reshape_target
from htp_export.capabilities.optimize.registry import register
from htp_export.editing.editing import add_constant, is_boundary, replace
from htp_export.model.neighbours import producer_of
from htp_export.shapes.operator_kinds import RESHAPING, is_standard
from htp_export.shapes.symbolic import Symbolic


@register("merge_reshapes", level="exact")
class MergeReshapes(NodePass):
    """Makes one ``Reshape`` of several operators in a row that only change the shape."""

    operators = tuple(sorted(RESHAPING))

    def rewrite(self, node: ir.Node) -> bool:
        first = producer_of(node.inputs[0], *RESHAPING)
        return first is not None and _merge(self.graph, first, node, self.known)


def _merge(graph: ir.Graph, first: ir.Node, second: ir.Node, known: Symbolic) -> bool:
    source = first.inputs[0]
    source_shape, result = known.shape(source), known.shape(second.outputs[0])
    if source is None:
        return False
    if why := _needed(first):
        decline("chained_reshapes", [first, second], why)
        return False
    target = None if source_shape is None or result is None else reshape_target(source_shape, result)
    if target is None:
        decline("chained_reshapes", [first, second], "more than one size of the result is not known beforehand")
        return False
    name = f"{second.outputs[0].name}_shape"
    replace(second, [ir.node("Reshape", [source, add_constant(graph, np.array(target, np.int64), name)])])
    return True


def _needed(node: ir.Node) -> str:
    """Why the first of two reshapes would stay; empty if it would be unused."""
    value = node.outputs[0]
    if is_boundary(value):
        return "a module takes or gives the tensor in between"
    alone = not value.is_graph_output() and all(is_standard(use.node, *RESHAPING) for use in value.uses())
    return "" if alone else "what lies between is read elsewhere"
