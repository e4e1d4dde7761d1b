"""Operators that sum: matrix products and reductions; and spatial ones: convolutions, padding."""

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
"""The largest denominator of a factor that scales an open size: others are rounded, such as 1/3."""


@shape_rule("MatMul")
def _matmul(node: Operation, known: Known) -> Sequence[Dims | None]:
    a = shape_of(node, known)
    b = shape_of(node, known, 1)
    left = a if len(a) > 1 else (1, *a)
    right = b if len(b) > 1 else (*b, 1)
    result = [*broadcast([left[:-2], right[:-2]])]
    if len(a) > 1:
        result.append(left[-2])
    if len(b) > 1:
        result.append(right[-1])
    return [result]


@content_rule("ReduceProd")
def _product_contents(node: Operation, known: Known) -> Contents | None:
    contents = known.contents(node.inputs[0])
    axes = axes_of(node, known)
    if contents is None or contents.ndim != 1:
        return None
    if axes is not None and [normalized(axis, 1) for axis in axes] != [0]:
        return None
    return objects(product(contents), [1] if node.attributes.get_int("keepdims", 1) else [])


@shape_rule("Conv", "MaxPool", "AveragePool", "LpPool")
@shape_rule("FusedConv", domain="com.microsoft")
def _window(node: Operation, known: Known) -> Sequence[Dims | None]:
    """Output sizes of convolutions and poolings, by the formulas of their definitions."""
    data = shape_of(node, known)
    if node.op_type in ("Conv", "FusedConv"):
        weight = shape_of(node, known, 1)
        channels = weight[0]
        kernel = node.attributes.get_ints("kernel_shape") or weight[2:]
    else:
        channels = data[1]
        kernel = node.attributes["kernel_shape"].as_ints()
    spatial = len(data) - 2
    strides = node.attributes.get_ints("strides") or [1] * spatial
    dilations = node.attributes.get_ints("dilations") or [1] * spatial
    pads = node.attributes.get_ints("pads") or [0] * (2 * spatial)
    auto_pad = node.attributes.get_string("auto_pad", "NOTSET")
    rounds_up = bool(node.attributes.get_int("ceil_mode", 0))
    result: list[Dim | None] = [data[0], channels]
    for axis, dim in enumerate(data[2:]):
        stride = strides[axis]
        if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            result.append(divide(dim + stride - 1, stride))
            continue
        window = (kernel[axis] - 1) * dilations[axis] + 1
        padding = 0 if auto_pad == "VALID" else pads[axis] + pads[axis + spatial]
        room = dim - window + padding
        is_even = isinstance(room, int) and room % stride == 0
        if rounds_up and not is_even:
            result.append(None)
        else:
            result.append(divide(room, stride) + 1)
    return [result] * len(node.outputs)


@shape_rule("Pad")
def _pad(node: Operation, known: Known) -> Sequence[Dims | None]:
    shape = shape_of(node, known)
    rank = len(shape)
    pads = known.contents(node.inputs[1]) if len(node.inputs) > 1 else None
    has_axes = len(node.inputs) > 3 and node.inputs[3] is not None
    if pads is None or has_axes:
        return [[None] * rank]
    result = []
    for axis, dim in enumerate(shape):
        before = pads[axis]
        after = pads[axis + rank]
        result.append(dim + before + after)
    return [result]


@shape_rule("Resize")
def _resize(node: Operation, known: Known) -> Sequence[Dims | None]:
    """The requested sizes, or the sizes times the scales, rounded down."""
    shape = shape_of(node, known)
    if node.attributes.get_string("keep_aspect_ratio_policy", "stretch") != "stretch":
        return [[None] * len(shape)]
    axes = [axis % len(shape) for axis in node.attributes.get_ints("axes") or range(len(shape))]
    result: list[Dim | None] = list(shape)
    sizes = node.inputs[3] if len(node.inputs) > 3 else None
    wanted = known.contents(sizes)
    scales = known.array(node.inputs[2]) if len(node.inputs) > 2 else None
    for index, axis in enumerate(axes):
        if sizes is not None:
            result[axis] = None if wanted is None else wanted[index]
        elif scales is None:
            result[axis] = None
        else:
            result[axis] = _scaled(shape[axis], float(scales[index]))
    return [result]


def _scaled(size: Dim, scale: float) -> Dim | None:
    """A size times a scale, rounded down; None for an open size and a scale that was rounded."""
    if isinstance(size, int):
        return math.floor(size * scale)
    factor = Fraction(scale)
    if factor.denominator > _LARGEST_DENOMINATOR:
        return None
    return divide(size * factor.numerator, factor.denominator)
