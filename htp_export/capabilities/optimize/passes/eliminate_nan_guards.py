"""Guards against NaN in attention whose rows are never masked completely."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.attention_matching import guarded
from htp_export.capabilities.optimize.registry import NodePass, register
from htp_export.editing.editing import constant_array, is_boundary, replace_with
from htp_export.model.neighbours import producer_of
from htp_export.shapes.known import normalized

_LARGEST = 1 << 22
"""Elements; larger masks are not read."""


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
    """Whether each row of a product, scaled by finite numbers and masked at most once, has a finite element."""
    node = producer_of(value, "Div", "MatMul", "Mul", *(["Add"] if masked else []))
    if node is None or node.op_type == "MatMul":
        return node is not None
    for place in (1, 0) if node.op_type != "Div" else (1,):
        numbers, operand = constant_array(node.inputs[place], _LARGEST), node.inputs[1 - place]
        if numbers is None:
            continue
        if np.isfinite(numbers).all():
            return _has_finite_rows(operand, masked=masked)
        rows = np.isfinite(numbers).any(axis=-1) if numbers.ndim else np.zeros(1, bool)
        only_masks = (
            node.op_type == "Add" and not np.isnan(numbers).any() and not (numbers == np.inf).any()
        )
        return only_masks and bool(rows.all()) and _has_finite_rows(operand, masked=False)
    return False
