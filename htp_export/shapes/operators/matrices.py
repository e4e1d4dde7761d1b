"""Matrix products, and attention, which is made of them."""

from __future__ import annotations

from collections.abc import Sequence

from htp_export.shapes.known import Dims, Known, Operation
from htp_export.shapes.operators.elementwise import broadcast
from htp_export.shapes.registry import shape_rule
from htp_export.shapes.sizes import divide


@shape_rule("MatMul")
def _matmul(node: Operation, known: Known) -> Sequence[Dims | None] | None:
    a, b = (known.shape(value) for value in node.inputs[:2])
    if a is None or b is None or not a or not b:
        return None
    left = a if len(a) > 1 else (1, *a)
    right = b if len(b) > 1 else (*b, 1)
    ends = [*([left[-2]] if len(a) > 1 else []), *([right[-1]] if len(b) > 1 else [])]
    return [[*broadcast([left[:-2], right[:-2]]), *ends]]


@shape_rule("Gemm")
def _gemm(node: Operation, known: Known) -> Sequence[Dims | None] | None:
    a, b = known.shape(node.inputs[0]), known.shape(node.inputs[1])
    if a is None or b is None:
        return None
    rows = a[1 if node.attributes.get_int("transA", 0) else 0]
    return [[rows, b[0 if node.attributes.get_int("transB", 0) else 1]]]


@shape_rule("Attention")
def _attention(node: Operation, known: Known) -> Sequence[Dims | None] | None:
    """The first result; with heads apart, or side by side in three dimensions."""
    queries, values = known.shape(node.inputs[0]), known.shape(node.inputs[2])
    if queries is None or values is None or len(queries) != len(values):
        return None
    if len(queries) == 4:
        return [[*queries[:3], values[3]]]
    heads, groups = (node.attributes.get_int(f"{side}_num_heads", 0) for side in ("q", "kv"))
    return [[*queries[:2], divide(values[2], groups) * heads]] if len(queries) == 3 and groups else None
