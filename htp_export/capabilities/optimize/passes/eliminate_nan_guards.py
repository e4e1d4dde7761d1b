"""Guards against NaN in attention whose rows are never masked completely."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.node_pass import NodePass
from htp_export.capabilities.optimize.registry import register
from htp_export.editing.editing import constant_array, is_boundary, stand_in
from htp_export.model.neighbours import producer_of

_LARGEST = 1 << 22
"""Elements; larger masks are not read."""


@register("eliminate_nan_guards", level="tolerant")
class EliminateNanGuards(NodePass):
    """Removes the replacement of NaN by zero after a softmax, if no mask can cause a NaN.

    PyTorch writes it after the softmax of each masked attention, for rows that are masked completely. Finite results
    stay the same; a NaN in the activations stays a NaN. Products of float16 may overflow, which is a NaN after the
    softmax, too: their guards stay.
    """

    operators = ("Where",)

    def rewrite(self, node: ir.Node) -> bool:
        softmax = _guarded(node)
        if softmax is None or is_boundary(node.outputs[0]) or not _has_finite_rows(softmax.inputs[0]):
            return False
        if self.known.dtype(softmax.outputs[0]) in (None, ir.DataType.FLOAT16):
            return False
        return stand_in(node.outputs[0], softmax.outputs[0])


def _guarded(node: ir.Node) -> ir.Node | None:
    """The softmax whose NaN a ``Where`` replaces."""
    weights = node.inputs[2]
    test, softmax = producer_of(node.inputs[0], "IsNaN"), producer_of(weights, "Softmax")
    if test is None or softmax is None or weights is None:
        return None
    last = softmax.attributes.get_int("axis", -1)
    rank = len(weights.shape) if weights.shape is not None else None
    same = test.inputs[0] is weights and (last == -1 or (rank is not None and last == rank - 1))
    return softmax if same else None


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
        only_masks = node.op_type == "Add" and not np.isnan(numbers).any() and not (numbers == np.inf).any()
        return only_masks and bool(rows.all()) and _has_finite_rows(operand, masked=False)
    return False
