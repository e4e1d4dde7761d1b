"""Operators that sum: products of matrices and reductions; and those over space, such as convolutions and padding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from htp_export.shapes.known import (
    Contents,
    Dims,
    Known,
    Operation,
    axes_of,
    normalized,
    objects,
    shape_of,
)
from htp_export.shapes.operators import content_rule, shape_rule
from htp_export.shapes.operators.elementwise import broadcast
from htp_export.shapes.sizes import Dim, divide, product

_LARGEST_DENOMINATOR = 64
"""Of a factor by which an open size is multiplied: others are numbers that were rounded, such as 1/3."""


@shape_rule("MatMul")
def _matmul(node: Operation, known: Known) -> Sequence[Dims | None]:
    a, b = shape_of(node, known), shape_of(node, known, 1)
    left = a if len(a) > 1 else (1, *a)
    right = b if len(b) > 1 else (*b, 1)
    ends = [*([left[-2]] if len(a) > 1 else []), *([right[-1]] if len(b) > 1 else [])]
    return [[*broadcast([left[:-2], right[:-2]]), *ends]]


@content_rule("ReduceProd")
def _product_contents(node: Operation, known: Known) -> Contents | None:
    contents = known.contents(node.inputs[0])
    axes = axes_of(node, known)
    if (
        contents is None
        or contents.ndim != 1
        or (axes is not None and [normalized(axis, 1) for axis in axes] != [0])
    ):
        return None
    return objects(product(contents), [1] if node.attributes.get_int("keepdims", 1) else [])


@shape_rule("Conv", "MaxPool", "AveragePool", "LpPool")
@shape_rule("FusedConv", domain="com.microsoft")
def _window(node: Operation, known: Known) -> Sequence[Dims | None]:
    """Convolutions and poolings; output sizes are those of the operators' definitions."""
    data = shape_of(node, known)
    if node.op_type in ("Conv", "FusedConv"):
        weight = shape_of(node, known, 1)
        channels, kernel = weight[0], node.attributes.get_ints("kernel_shape") or weight[2:]
    else:
        channels, kernel = data[1], node.attributes["kernel_shape"].as_ints()
    spatial = len(data) - 2
    strides = node.attributes.get_ints("strides") or [1] * spatial
    dilations = node.attributes.get_ints("dilations") or [1] * spatial
    pads = node.attributes.get_ints("pads") or [0] * (2 * spatial)
    auto = node.attributes.get_string("auto_pad", "NOTSET")
    result: list[Dim | None] = [data[0], channels]
    for k, dim in enumerate(data[2:]):
        reach = (kernel[k] - 1) * dilations[k] + 1
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            result.append(divide(dim + strides[k] - 1, strides[k]))
            continue
        room = dim - reach + (0 if auto == "VALID" else pads[k] + pads[k + spatial])
        is_even = isinstance(room, int) and room % strides[k] == 0
        result.append(
            None
            if node.attributes.get_int("ceil_mode", 0) and not is_even
            else divide(room, strides[k]) + 1
        )
    return [result] * len(node.outputs)


@shape_rule("Pad")
def _pad(node: Operation, known: Known) -> Sequence[Dims | None]:
    shape = shape_of(node, known)
    pads = known.contents(node.inputs[1]) if len(node.inputs) > 1 else None
    if pads is None or (len(node.inputs) > 3 and node.inputs[3] is not None):
        return [[None] * len(shape)]
    return [[dim + pads[k] + pads[k + len(shape)] for k, dim in enumerate(shape)]]


@shape_rule("Resize")
def _resize(node: Operation, known: Known) -> Sequence[Dims | None]:
    """The sizes that are asked for, or the old ones times factors, rounded down."""
    shape = shape_of(node, known)
    if node.attributes.get_string("keep_aspect_ratio_policy", "stretch") != "stretch":
        return [[None] * len(shape)]
    axes = [axis % len(shape) for axis in node.attributes.get_ints("axes") or range(len(shape))]
    result: list[Dim | None] = list(shape)
    sizes = node.inputs[3] if len(node.inputs) > 3 else None
    wanted = known.contents(sizes)
    factors = known.array(node.inputs[2]) if len(node.inputs) > 2 else None
    for place, axis in enumerate(axes):
        size = shape[axis]
        if sizes is not None:
            result[axis] = None if wanted is None else wanted[place]
        elif factors is None:
            result[axis] = None
        elif isinstance(size, int):
            result[axis] = math.floor(size * float(factors[place]))
        else:
            factor = Fraction(float(factors[place]))
            # others are rounded, and sizes with them
            exact = factor.denominator <= _LARGEST_DENOMINATOR
            result[axis] = divide(size * factor.numerator, factor.denominator) if exact else None
    return [result]
