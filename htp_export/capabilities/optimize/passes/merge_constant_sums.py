"""Consecutive additions of constants, and additions of zeros."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.node_pass import NodePass
from htp_export.capabilities.optimize.registry import register
from htp_export.editing.editing import Array, add_constant, constant_array, is_boundary, replace, stand_in
from htp_export.model.neighbours import only_consumer
from htp_export.shapes.operator_kinds import is_standard
from htp_export.shapes.symbolic import Symbolic

_LARGEST = 1 << 22
"""Elements; larger constants are not read."""

_CANCELLING = 10
"""Constants that cancel are added only if neither is larger: the rounding error stays below 1e-6."""


@register("merge_constant_sums", level="tolerant")
class MergeConstantSums(NodePass):
    """Adds one constant where two are added in a row, and none where it is zero everywhere."""

    operators = ("Add",)

    def rewrite(self, node: ir.Node) -> bool:
        summand = _summand(node)
        if summand is None:
            return False
        return _drop_zeros(node, *summand, self.known) or _merge(self.graph, node, *summand)


def _summand(node: ir.Node | None) -> tuple[ir.Value, Array] | None:
    """The operands of an ``Add`` of a floating-point constant: the other value, and the constant."""
    if node is None or not is_standard(node, "Add"):
        return None
    for place in (1, 0):
        numbers, value = constant_array(node.inputs[place], _LARGEST), node.inputs[1 - place]
        if numbers is not None and numbers.dtype.kind == "f" and value is not None:
            return value, numbers
    return None


def _drop_zeros(node: ir.Node, value: ir.Value, numbers: Array, known: Symbolic) -> bool:
    shape = known.shape(value)
    if numbers.any() or shape is None or shape != known.shape(node.outputs[0]):
        return False
    return stand_in(node.outputs[0], value)


def _merge(graph: ir.Graph, node: ir.Node, between: ir.Value, numbers: Array) -> bool:
    inner = _summand(between.producer())
    if inner is None or only_consumer(between) is None or is_boundary(between):
        return False
    value, others = inner
    if others.dtype != numbers.dtype:
        return False
    with np.errstate(all="ignore"):
        joint = np.asarray(others + numbers)
        larger = np.maximum(np.abs(others), np.abs(numbers))
        cancelling = np.abs(joint) < larger / 2
    if joint.size > max(others.size, numbers.size) or (larger[cancelling] > _CANCELLING).any():
        return False
    if np.isnan(joint).any() or (np.isinf(joint) & np.isfinite(larger)).any():  # the sum of two large numbers overflows
        return False
    constant = add_constant(graph, joint, f"{node.outputs[0].name}_summand")
    replace(node, [ir.node("Add", [value, constant])])
    return True
