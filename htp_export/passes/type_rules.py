"""Element types of what operators make, for files that do not say them."""

from __future__ import annotations

import onnx_ir as ir

from htp_export.model.operators import RANDOM, SIZES_ONLY
from htp_export.passes.known import Known
from htp_export.passes.shape_rules import ELEMENTWISE, LIKE_FIRST, REDUCE

__all__ = ["result_type"]

_LIKE_FIRST_TOO = """
AveragePool Concat Conv Expand Flatten Gather GatherElements GatherND Gemm GlobalAveragePool MatMul MaxPool Pad Range
Reshape Slice Split Squeeze Tile Transpose Unsqueeze
""".split()  # noqa: SIM905 - as a list of strings it would fill the screen
_OTHERWISE = RANDOM | {"CastLike", "DequantizeLinear", "QuantizeLinear"}
_LIKE_FIRST = frozenset((*LIKE_FIRST, *ELEMENTWISE, *REDUCE, *_LIKE_FIRST_TOO)) - _OTHERWISE
_TRUTH = {"And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not", "Or", "Xor"}


def result_type(node: ir.Node, known: Known) -> ir.DataType | None:
    """The type of a node's first output."""
    if node.domain != "":
        return None
    if node.op_type in _TRUTH:
        return ir.DataType.BOOL
    if node.op_type in SIZES_ONLY | {"ArgMax", "ArgMin"}:
        return ir.DataType.INT64
    if node.op_type == "Cast":
        return ir.DataType(node.attributes["to"].as_int())
    if node.op_type == "ConstantOfShape":
        fill = node.attributes.get_tensor("value")
        return ir.DataType.FLOAT if fill is None else fill.dtype
    if node.op_type == "Where":
        return known.dtype(node.inputs[1])
    return known.dtype(node.inputs[0]) if node.op_type in _LIKE_FIRST and node.inputs else None
