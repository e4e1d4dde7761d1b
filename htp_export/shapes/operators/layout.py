"""Operators that give the same elements in another shape or order, or repeated."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from htp_export.shapes.known import (
    LARGEST_CONTENTS,
    Contents,
    Dims,
    Known,
    Operation,
    axes_of,
    normalized,
    shape_of,
    unknown_dims,
)
from htp_export.shapes.operators import content_rule, shape_rule
from htp_export.shapes.operators.elementwise import broadcast
from htp_export.shapes.sizes import Dim, divide, product


@shape_rule("Transpose")
def _transpose(node: Operation, known: Known) -> Sequence[Dims | None]:
    shape = shape_of(node, known)
    return [
        [shape[axis] for axis in node.attributes.get_ints("perm") or reversed(range(len(shape)))]
    ]


@shape_rule("Reshape")
def _reshape(node: Operation, known: Known) -> Sequence[Dims | None]:
    shape, wanted = known.shape(node.inputs[0]), known.contents(node.inputs[1])
    if wanted is None:
        return [unknown_dims(shape_of(node, known, 1)[0])]
    keeps_zero = bool(node.attributes.get_int("allowzero", 0))
    result: list[Dim | None] = []
    for place, dim in enumerate(wanted.tolist()):
        if dim == 0 and not keeps_zero:
            result.append(shape[place] if shape is not None else None)
        else:
            result.append(dim)
    if -1 in result:
        rest = [dim for dim in result if dim != -1]
        elements = None if shape is None or None in rest else product(shape)
        inferred = (
            None
            if elements is None
            else divide(elements, product(dim for dim in rest if dim is not None))
        )
        result[result.index(-1)] = inferred
    return [result]


@shape_rule("Unsqueeze")
def _unsqueeze(node: Operation, known: Known) -> Sequence[Dims | None] | None:
    shape, axes = shape_of(node, known), axes_of(node, known)
    if axes is None:
        return None
    rank = len(shape) + len(axes)
    inserted, left = {normalized(axis, rank) for axis in axes}, iter(shape)
    return [[1 if place in inserted else next(left) for place in range(rank)]]


@shape_rule("Squeeze")
def _squeeze(node: Operation, known: Known) -> Sequence[Dims | None] | None:
    shape, axes = shape_of(node, known), axes_of(node, known)
    if axes is None:
        if len(node.inputs) > 1 or any(not isinstance(dim, int) for dim in shape):
            return None
        axes = [place for place, dim in enumerate(shape) if dim == 1]
    gone = {normalized(axis, len(shape)) for axis in axes}
    return [[dim for place, dim in enumerate(shape) if place not in gone]]


@shape_rule("Flatten")
def _flatten(node: Operation, known: Known) -> Sequence[Dims | None]:
    shape = shape_of(node, known)
    axis = normalized(node.attributes.get_int("axis", 1), len(shape))
    return [[product(shape[:axis]), product(shape[axis:])]]


@shape_rule("Expand")
def _expand(node: Operation, known: Known) -> Sequence[Dims | None] | None:
    wanted = known.contents(node.inputs[1])
    return None if wanted is None else [broadcast([shape_of(node, known), tuple(wanted.tolist())])]


@shape_rule("Tile")
def _tile(node: Operation, known: Known) -> Sequence[Dims | None] | None:
    shape, repeats = shape_of(node, known), known.contents(node.inputs[1])
    return None if repeats is None else [[a * b for a, b in zip(shape, repeats, strict=True)]]


@content_rule("Reshape", "Squeeze", "Unsqueeze")
def _reshaped_contents(node: Operation, known: Known) -> Contents | None:
    contents, shape = known.contents(node.inputs[0]), known.shape(node.outputs[0])
    if contents is None or shape is None:
        return None
    sizes = [dim for dim in shape if isinstance(dim, int)]
    return contents.reshape(sizes) if len(sizes) == len(shape) else None


@content_rule("Expand")
def _expanded_contents(node: Operation, known: Known) -> Contents | None:
    contents, shape = known.contents(node.inputs[0]), known.constant(node.inputs[1])
    if contents is None or shape is None:
        return None
    shape = list(np.broadcast_shapes(contents.shape, tuple(shape)))
    return np.broadcast_to(contents, shape) if math.prod(shape) <= LARGEST_CONTENTS else None


@content_rule("Transpose")
def _transposed_contents(node: Operation, known: Known) -> Contents | None:
    contents = known.contents(node.inputs[0])
    perm = node.attributes.get_ints("perm")
    return (
        None if contents is None else np.transpose(contents, None if perm is None else list(perm))
    )
