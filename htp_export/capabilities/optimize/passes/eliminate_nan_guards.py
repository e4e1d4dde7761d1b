"""Guards against NaN in attention whose rows are never masked completely."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.attention_matching import guarded
from htp_export.capabilities.optimize.registry import NodePass, register
from htp_export.editing.editing import Array, constant_array, is_boundary, replace_with
from htp_export.model.neighbours import producer_of
from htp_export.shapes.known import normalized

_LARGEST = 1 << 22
"""Elements: masks of 2,048 tokens squared; reading larger constants costs more than the guard."""


@register("eliminate_nan_guards", level="tolerant")
class EliminateNanGuards(NodePass):
    """Removes the replacement of NaN by zero after a softmax, if no mask can cause a NaN.

    PyTorch writes it after the softmax of each masked attention, for rows that are masked
    completely. Finite results stay the same; a NaN in the activations stays a NaN. Products of
    float16 may overflow, which is a NaN after the softmax, too: their guards stay.
    """

    operators = ("Where",)

    def rewrite(self, node: ir.Node) -> bool:
        weights = guarded(node)
        softmax, rank = producer_of(weights, "Softmax"), self.known.rank(weights)
        if weights is None or softmax is None or rank is None or is_boundary(node.outputs[0]):
            return False
        is_over_keys = normalized(softmax.attributes.get_int("axis", -1), rank) == rank - 1
        if not is_over_keys or self.known.dtype(weights) in (None, ir.DataType.FLOAT16):
            return False
        return _has_finite_rows(softmax.inputs[0]) and replace_with(node.outputs[0], weights)


def _has_finite_rows(value: ir.Value | None, *, masked: bool = True) -> bool:
    """Whether each row of a scaled product has a finite element, after at most one mask."""
    node = producer_of(value, "Div", "MatMul", "Mul", *(["Add"] if masked else []))
    if node is None or node.op_type == "MatMul":
        return node is not None
    for position in (1, 0) if node.op_type != "Div" else (1,):
        numbers = constant_array(node.inputs[position], _LARGEST)
        operand = node.inputs[1 - position]
        if numbers is None:
            continue
        if np.isfinite(numbers).all():
            return _has_finite_rows(operand, masked=masked)
        is_mask = node.op_type == "Add" and _leaves_a_number_in_rows(numbers)
        return is_mask and _has_finite_rows(operand, masked=False)
    return False


def _leaves_a_number_in_rows(mask: Array) -> bool:
    """Whether the only infinite summands of a mask are -inf, and each row has a finite one."""
    if not mask.ndim or np.isnan(mask).any() or (mask == np.inf).any():
        return False
    return bool(np.isfinite(mask).any(axis=-1).all())
