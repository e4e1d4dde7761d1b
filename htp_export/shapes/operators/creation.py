"""Operators that make tensors of sizes and constants."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from htp_export.shapes.known import LARGEST_CONTENTS, WHOLE, Contents, Dims, Known, Operation, objects, unknown_dims
from htp_export.shapes.registry import content_rule, shape_rule, type_rule
from htp_export.shapes.sizes import is_natural, product


@shape_rule("Shape")
def _shape(node: Operation, known: Known) -> Sequence[Dims | None] | None:
    contents = known.shape(node.inputs[0])
    start, end = (node.attributes.get_int(key, default) for key, default in (("start", 0), ("end", None)))
    return None if contents is None else [[len(contents[start:end])]]


@shape_rule("Size")
def _size(node: Operation, known: Known) -> Sequence[Dims | None]:
    return [[]]


@shape_rule("ConstantOfShape")
def _constant_of_shape(node: Operation, known: Known) -> Sequence[Dims | None] | None:
    contents = known.contents(node.inputs[0])
    if contents is not None:
        return [contents.tolist()]
    rank = known.shape(node.inputs[0])
    return None if rank is None else [unknown_dims(rank[0])]


@shape_rule("Range")
def _range(node: Operation, known: Known) -> Sequence[Dims | None]:
    bounds = [known.contents(value) for value in node.inputs]
    if any(bound is None for bound in bounds):
        return [[None]]
    start, limit, step = (bound.reshape(-1)[0] for bound in bounds if bound is not None)
    if all(isinstance(bound, int) for bound in (start, limit, step)):
        return [[len(range(start, limit, step))]]
    return [[limit - start if step == 1 and is_natural(limit - start) else None]]


@content_rule("Shape")
def _shape_contents(node: Operation, known: Known) -> Contents | None:
    shape = known.shape(node.inputs[0])
    start, end = (node.attributes.get_int(key, default) for key, default in (("start", 0), ("end", None)))
    return None if shape is None else objects(list(shape[start:end]))


@content_rule("Size")
def _size_contents(node: Operation, known: Known) -> Contents | None:
    shape = known.shape(node.inputs[0])
    return None if shape is None else objects(product(shape))


@content_rule("ConstantOfShape")
def _constant_contents(node: Operation, known: Known) -> Contents | None:
    shape = known.constant(node.inputs[0])
    fill = _fill(node)
    if shape is None or fill is None or fill.dtype not in WHOLE or math.prod(shape) > LARGEST_CONTENTS:
        return None
    return np.full(shape, fill.numpy().reshape(-1)[0].item(), dtype=object)


@content_rule("Range")
def _range_contents(node: Operation, known: Known) -> Contents | None:
    bounds = [known.constant(value) for value in node.inputs]
    if any(bound is None for bound in bounds):
        return None
    start, limit, step = (bound[0] for bound in bounds if bound is not None)
    return objects(list(range(start, limit, step))) if abs(limit - start) <= LARGEST_CONTENTS * abs(step) else None


def _fill(node: Operation) -> ir.TensorProtocol | None:
    written = node.attributes.get("value")
    if written is None or written.type != ir.AttributeType.TENSOR:
        return None
    fill: ir.TensorProtocol = written.value  # as_tensor() looks at every method of it, which takes longer
    return fill


@type_rule("ConstantOfShape")
def _fill_type(node: Operation, known: Known) -> ir.DataType:
    fill = _fill(node)
    return ir.DataType.FLOAT if fill is None else fill.dtype
