"""Consecutive additions of constants, and additions of zeros."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.registry import NodePass, absorbed, register
from htp_export.editing.editing import (
    Array,
    add_constant,
    constant_array,
    is_constant,
    replace,
    replace_with,
)
from htp_export.format.recipes import step
from htp_export.model.recipes import recipe_of

_LARGEST = 1 << 22
"""Elements: masks of 2,048 tokens squared; reading larger constants costs more than the sum."""

_CANCELLING = 10
"""Constants that cancel are added only if neither is larger: the rounding error stays below
1e-6."""


@register("merge_constant_sums", level="tolerant")
class MergeConstantSums(NodePass):
    """Merges two consecutive additions of constants, and removes additions of zeros."""

    operators = ("Add",)

    def rewrite(self, node: ir.Node) -> bool:
        value, numbers = _summand(node)
        if value is None or numbers is None:
            return False
        shape = self.known.shape(value)
        is_zero = (
            not numbers.any() and shape is not None and shape == self.known.shape(node.outputs[0])
        )
        if is_zero and replace_with(node.outputs[0], value):
            return True
        inner = absorbed(value, "Add")
        source, others = _summand(inner)
        joint = None if others is None else _sum(others, numbers)
        if joint is None:
            return False
        assert inner is not None
        values = [arg for arg in (*inner.inputs, *node.inputs) if arg is not None]
        recipe = step("add", *map(recipe_of, filter(is_constant, values)))
        summand = add_constant(self.graph, joint, f"{node.outputs[0].name}_summand", recipe)
        replace(node, [ir.node("Add", [source, summand])])
        return True


def _summand(node: ir.Node | None) -> tuple[ir.Value | None, Array | None]:
    """The operands of an ``Add`` of a constant of floats: the other value, and the constant."""
    if node is None:
        return None, None
    for constant, value in (reversed(node.inputs), node.inputs):
        numbers = constant_array(constant, _LARGEST)
        if numbers is not None and numbers.dtype.kind == "f" and value is not None:
            return value, numbers
    return None, None


def _sum(one: Array, other: Array) -> Array | None:
    """The sum of two constants.

    None if it is larger than both, or less exact than two additions.
    """
    if one.dtype != other.dtype:
        return None
    with np.errstate(all="ignore"):
        joint = np.asarray(one + other)
        larger = np.maximum(np.abs(one), np.abs(other))
        cancelling = np.abs(joint) < larger / 2
    if joint.size > max(one.size, other.size) or (larger[cancelling] > _CANCELLING).any():
        return None
    overflows = np.isinf(joint) & np.isfinite(larger)  # the sum of two large numbers
    return None if np.isnan(joint).any() or overflows.any() else joint
