"""Layout operators: the same elements in another shape or order, or repeated."""

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
    perm = node.attributes.get_ints("perm") or reversed(range(len(shape)))
    return [[shape[axis] for axis in perm]]


@shape_rule("Reshape")
def _reshape(node: Operation, known: Known) -> Sequence[Dims | None]:
    shape = known.shape(node.inputs[0])
    wanted = known.contents(node.inputs[1])
    if wanted is None:
        return [unknown_dims(shape_of(node, known, 1)[0])]
    keeps_zero = bool(node.attributes.get_int("allowzero", 0))
    result: list[Dim | None] = []
    for index, dim in enumerate(wanted.tolist()):
        if dim != 0 or keeps_zero:
            result.append(dim)
        else:
            result.append(None if shape is None else shape[index])
    if -1 in result:
        result[result.index(-1)] = _inferred_dim(shape, [dim for dim in result if dim != -1])
    return [result]


def _inferred_dim(shape: Dims | None, others: Sequence[Dim | None]) -> Dim | None:
    """The dimension that ``Reshape`` infers for -1, from the other dimensions of its output."""
    if shape is None or None in others:
        return None
    elements = product(dim for dim in shape if dim is not None)
    return divide(elements, product(dim for dim in others if dim is not None))


@shape_rule("Unsqueeze")
def _unsqueeze(node: Operation, known: Known) -> Sequence[Dims | None] | None:
    shape = shape_of(node, known)
    axes = axes_of(node, known)
    if axes is None:
        return None
    rank = len(shape) + len(axes)
    inserted = {normalized(axis, rank) for axis in axes}
    left = iter(shape)
    return [[1 if axis in inserted else next(left) for axis in range(rank)]]


@shape_rule("Squeeze")
def _squeeze(node: Operation, known: Known) -> Sequence[Dims | None] | None:
    shape = shape_of(node, known)
    axes = axes_of(node, known)
    if axes is None:
        if len(node.inputs) > 1 or any(not isinstance(dim, int) for dim in shape):
            return None
        axes = [axis for axis, dim in enumerate(shape) if dim == 1]
    removed = {normalized(axis, len(shape)) for axis in axes}
    return [[dim for axis, dim in enumerate(shape) if axis not in removed]]


@shape_rule("Flatten")
def _flatten(node: Operation, known: Known) -> Sequence[Dims | None]:
    shape = shape_of(node, known)
    axis = normalized(node.attributes.get_int("axis", 1), len(shape))
    return [[product(shape[:axis]), product(shape[axis:])]]


@shape_rule("Expand")
def _expand(node: Operation, known: Known) -> Sequence[Dims | None] | None:
    wanted = known.contents(node.inputs[1])
    if wanted is None:
        return None
    return [broadcast([shape_of(node, known), tuple(wanted.tolist())])]


@shape_rule("Tile")
def _tile(node: Operation, known: Known) -> Sequence[Dims | None] | None:
    shape = shape_of(node, known)
    repeats = known.contents(node.inputs[1])
    if repeats is None:
        return None
    return [[dim * repeat for dim, repeat in zip(shape, repeats, strict=True)]]


@content_rule("Reshape", "Squeeze", "Unsqueeze")
def _reshaped_contents(node: Operation, known: Known) -> Contents | None:
    contents = known.contents(node.inputs[0])
    shape = known.shape(node.outputs[0])
    if contents is None or shape is None:
        return None
    sizes = [dim for dim in shape if isinstance(dim, int)]
    if len(sizes) == len(shape):
        return contents.reshape(sizes)
    return None


@content_rule("Expand")
def _expanded_contents(node: Operation, known: Known) -> Contents | None:
    contents = known.contents(node.inputs[0])
    shape = known.constant(node.inputs[1])
    if contents is None or shape is None:
        return None
    shape = list(np.broadcast_shapes(contents.shape, tuple(shape)))
    if math.prod(shape) > LARGEST_CONTENTS:
        return None
    return np.broadcast_to(contents, shape)


@content_rule("Transpose")
def _transposed_contents(node: Operation, known: Known) -> Contents | None:
    contents = known.contents(node.inputs[0])
    if contents is None:
        return None
    perm = node.attributes.get_ints("perm")
    return np.transpose(contents, None if perm is None else list(perm))
