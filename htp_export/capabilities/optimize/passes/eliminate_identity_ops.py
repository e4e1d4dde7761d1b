"""Removal of nodes whose output is equal to their input."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.registry import changed, decline, register, shapes_in
from htp_export.editing.editing import constant_array, replace_with
from htp_export.shapes.operator_kinds import COMMUTATIVE, NEUTRAL, RESHAPING, graphs_in, is_standard
from htp_export.shapes.symbolic import Symbolic

_IF_SHAPE_STAYS = RESHAPING | {"Expand", "Tile"}
"""Operators that only change the shape, or repeat elements: without effect on an unchanged
shape."""

_NEUTRAL = {op: number for op, number in NEUTRAL.items() if op != "Add"}  # bit for bit

NEEDS_A_NAME = "a graph's output needs a name of its own"
"""The reason why a node without effect stays if its output is an output of the graph."""

_KINDS = {
    "Identity": "identity",
    "Cast": "identity_cast",
    "Transpose": "identity_transpose",
} | dict.fromkeys(RESHAPING, "identity_reshape")


@register("eliminate_identity_ops", level="exact")
class EliminateIdentityOps(ir.passes.InPlacePass):
    """Removes ``Identity``, casts to the same type, slices of everything, and other no-ops."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        bodies = (function.graph for function in model.functions.values())
        for graph in (*graphs_in(model.graph), *bodies):
            infer = Symbolic if modified else shapes_in
            known = infer(graph, model.opset_imports)
            for node in graph:
                equal = (value for value in _candidates(node) if _is_returned(value, node, known))
                source = next(equal, None)
                if source is None:
                    continue
                kind = _KINDS.get(node.op_type, "eliminate_identity_ops")
                if replace_with(node.outputs[0], source):
                    is_weight = kind == "identity" and source.const_value is not None
                    modified = changed("identity_weight" if is_weight else kind, node)
                    graph.remove(node, safe=True)
                else:
                    decline(kind, [node], NEEDS_A_NAME)
        return ir.passes.PassResult(model, modified)


def _candidates(node: ir.Node) -> Iterator[ir.Value]:
    """The inputs that a node may return: the first, and either of two that can be exchanged."""
    count = 2 if is_standard(node, *COMMUTATIVE) and len(node.inputs) == 2 else 1
    return (value for value in node.inputs[:count] if value is not None)


def _is_returned(source: ir.Value, node: ir.Node, known: Symbolic) -> bool:
    """Whether the output of a node is equal to this input."""
    if node.domain != "":
        return False
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        return False
    operator = node.op_type
    if operator == "Identity":
        return True
    if operator in ("Concat", "Sum", "Max", "Min") and len(node.inputs) == 1:
        return True
    if operator == "Cast":
        dtype = known.dtype(source)
        return dtype is not None and node.attributes["to"].as_int() == dtype
    if operator == "Dropout":
        return len(node.inputs) < 3 or node.inputs[2] is None
    shape = known.shape(source)
    if shape is None or shape != known.shape(node.outputs[0]):
        return False
    return operator in _IF_SHAPE_STAYS or _keeps_elements(source, node, known)


def _keeps_elements(source: ir.Value, node: ir.Node, known: Symbolic) -> bool:
    """Whether a node that keeps the shape of an input keeps its elements, too."""
    if node.op_type == "Slice":
        steps = known.constant(node.inputs[4]) if len(node.inputs) > 4 else [1]
        return steps is not None and all(step == 1 for step in steps)
    if node.op_type == "Pad":
        pads = known.constant(node.inputs[1]) if len(node.inputs) > 1 else None
        return pads is not None and not any(pads)
    if node.op_type in _NEUTRAL:
        other = node.inputs[0 if node.inputs[1] is source else 1]
        constant = constant_array(other, 1)
        return constant is not None and bool(np.all(constant == _NEUTRAL[node.op_type]))
    return False
