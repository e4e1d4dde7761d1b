"""Operators that create tensors from sizes and constants."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from htp_export.shapes.known import (
    Contents,
    Dims,
    Known,
    Operation,
    Shape,
    objects,
    shape_of,
    unknown_dims,
)
from htp_export.shapes.operators import content_rule, shape_rule, type_rule
from htp_export.shapes.sizes import is_natural, product


@shape_rule("Shape")
def _shape(node: Operation, known: Known) -> Sequence[Dims | None]:
    return [[len(_dimensions(node, known))]]


def _dimensions(node: Operation, known: Known) -> Shape:
    """The dimensions that ``Shape`` returns."""
    start = node.attributes.get_int("start", 0)
    end = node.attributes.get_int("end", None)
    return shape_of(node, known)[start:end]


@shape_rule("Size")
def _size(node: Operation, known: Known) -> Sequence[Dims | None]:
    return [[]]


@shape_rule("ConstantOfShape")
def _constant_of_shape(node: Operation, known: Known) -> Sequence[Dims | None]:
    contents = known.contents(node.inputs[0])
    if contents is None:
        return [unknown_dims(shape_of(node, known)[0])]
    return [contents.tolist()]


@shape_rule("Range")
def _range(node: Operation, known: Known) -> Sequence[Dims | None]:
    bounds = [known.contents(value) for value in node.inputs]
    if any(bound is None for bound in bounds):
        return [[None]]
    start, limit, step = (bound.reshape(-1)[0] for bound in bounds if bound is not None)
    if all(isinstance(bound, int) for bound in (start, limit, step)):
        return [[len(range(start, limit, step))]]
    length = limit - start
    if step == 1 and is_natural(length):
        return [[length]]
    return [[None]]


@content_rule("Shape")
def _shape_contents(node: Operation, known: Known) -> Contents:
    return objects(list(_dimensions(node, known)))


@content_rule("Size")
def _size_contents(node: Operation, known: Known) -> Contents:
    return objects(product(shape_of(node, known)))


@type_rule("ConstantOfShape")
def _fill_type(node: Operation, known: Known) -> ir.DataType:
    written = node.attributes.get("value")
    if written is None or written.type != ir.AttributeType.TENSOR:
        return ir.DataType.FLOAT
    # as_tensor() looks at every method of the protocol, which takes longer.
    fill: ir.TensorProtocol = written.value
    return fill.dtype
