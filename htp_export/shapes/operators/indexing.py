"""Operators that index, slice, split or concatenate tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from htp_export.format.bounds import MOST_DIMENSIONS
from htp_export.shapes.known import (
    Contents,
    Dims,
    Known,
    Operation,
    axes_of,
    is_entry,
    normalized,
    shape_of,
)
from htp_export.shapes.operators import content_rule, shape_rule
from htp_export.shapes.sizes import Dim, Size, divide, is_natural, not_negative, smaller_of


@shape_rule("Concat")
def _concat(node: Operation, known: Known) -> Sequence[Dims | None]:
    shapes = [shape_of(node, known, place) for place in range(len(node.inputs))]
    axis = normalized(node.attributes["axis"].as_int(), len(shapes[0]))
    result: list[Dim | None] = []
    for index, first_dim in enumerate(shapes[0]):
        # Off the axis, all inputs agree: a number is more precise than a name.
        numbers = (shape[index] for shape in shapes if isinstance(shape[index], int))
        result.append(next(numbers, first_dim))
    result[axis] = sum(shape[axis] for shape in shapes)
    return [result]


@shape_rule("Split")
def _split(node: Operation, known: Known) -> Sequence[Dims | None]:
    shape = shape_of(node, known)
    axis = normalized(node.attributes.get_int("axis", 0), len(shape))
    count = len(node.outputs)
    sizes: Sequence[Dim | None] | None = axes_of(node, known, "split")
    if sizes is None:
        total = shape[axis]
        is_even = isinstance(total, int) and total % count == 0
        if is_even and len(node.inputs) < 2:
            sizes = [divide(total, count)] * count
    if sizes is None:
        sizes = [None] * count
    return [[*shape[:axis], size, *shape[axis + 1 :]] for size in sizes]


@shape_rule("Slice")
def _slice(node: Operation, known: Known) -> Sequence[Dims | None]:
    shape = shape_of(node, known)
    starts = known.contents(node.inputs[1])
    ends = known.contents(node.inputs[2])
    axes = sliced_axes(node, known)
    steps = axes_of(node, known, "steps", place=4)
    if axes is None:
        return [[None] * len(shape)]
    result: list[Dim | None] = list(shape)
    for k, place in enumerate(axes):
        if starts is None or ends is None or (steps is None and len(node.inputs) > 4):
            result[place] = None
        else:
            result[place] = _slice_length(
                shape[place], starts[k], ends[k], steps[k] if steps else 1
            )
    return [result]


def sliced_axes(node: Operation, known: Known) -> list[int] | None:
    """The axes that a ``Slice`` cuts, counted from the front; None if they are not constant."""
    axes = axes_of(node, known, place=3)
    rank = known.rank(node.inputs[0])
    if axes is None and len(node.inputs) > 1 and not any(node.inputs[3:4]):
        # Without axes, the first ones are sliced, as many as there are starts.
        starts = known.shape(node.inputs[1])
        count = starts[0] if starts else None
        if isinstance(count, int) and count <= MOST_DIMENSIONS:
            axes = list(range(count))
    if axes is None or rank is None:
        return None
    return [normalized(axis, rank) for axis in axes]


def slice_bounds(node: Operation, known: Known) -> dict[int, tuple[int, int, int]] | None:
    """Sliced axis → start, end and step of the node; None if they are not constant."""
    axes = sliced_axes(node, known)
    starts = axes_of(node, known, "starts", 1)
    ends = axes_of(node, known, "ends", 2)
    steps = axes_of(node, known, "steps", 4)
    if axes is None or starts is None or ends is None:
        return None
    has_steps = any(node.inputs[4:5])
    if steps is None and has_steps:
        return None
    steps = steps or [1] * len(axes)
    bounds = zip(starts, ends, steps, strict=True)
    return dict(zip(axes, bounds, strict=True))


def _slice_length(dim: Dim, start: Dim, end: Dim, step: int) -> Dim | None:
    """The length of a slice along one axis; None if it depends on unknown sizes."""
    if step == 1:
        first = _clamped(start, dim)
        last = _clamped(end, dim)
        if first is None or last is None:
            return None
        return not_negative(last - first)
    if isinstance(dim, int) and isinstance(start, int) and isinstance(end, int):
        return len(range(dim)[max(start, -dim) : end : step])
    return None


def _clamped(bound: Dim, dim: Dim) -> Dim | None:
    """A bound of a slice, counted from the front and limited to the dimension."""
    if isinstance(bound, int):
        if bound >= 2**31 - 1:  # exporters write the largest integer for "to the end"
            return dim
        if bound < 0:
            bound = dim + bound
            return bound if isinstance(bound, Size) else max(bound, 0)
    beyond = bound - dim
    if isinstance(beyond, int):
        return dim if beyond > 0 else bound
    if bound == 0 or is_natural(dim - bound):
        return bound
    if isinstance(bound, int) or is_natural(bound):
        return smaller_of(dim, bound)
    return None


@shape_rule("Gather")
def _gather(node: Operation, known: Known) -> Sequence[Dims | None]:
    data = shape_of(node, known)
    indices = shape_of(node, known, 1)
    axis = normalized(node.attributes.get_int("axis", 0), len(data))
    return [[*data[:axis], *indices, *data[axis + 1 :]]]


@content_rule("Gather")
def _gathered_contents(node: Operation, known: Known) -> Contents | None:
    contents = _table(node, known)
    places = known.contents(node.inputs[1])
    if contents is None or places is None:
        return None
    axis = node.attributes.get_int("axis", 0)
    return np.asarray(np.take(contents, places.astype(np.int64), axis), dtype=object)


@content_rule("GatherElements")
def _gathered_elements(node: Operation, known: Known) -> Contents | None:
    contents, places = _table(node, known), known.contents(node.inputs[1])
    if contents is None or places is None:
        return None
    axis = node.attributes.get_int("axis", 0)
    return np.asarray(np.take_along_axis(contents, places.astype(np.int64), axis), dtype=object)


_LARGEST_TABLE = 1 << 16
"""Elements of a stored table that are looked up: positions and token types are a few thousand."""


def _table(node: Operation, known: Known) -> Contents | None:
    """The first input of a node: small contents, or a stored table of integers."""
    value = node.inputs[0]
    contents = known.contents(value)
    if contents is not None or value is None or value.is_graph_input():
        return contents
    array = known.array(value)
    if array is not None and array.dtype.kind in "iu":
        return array
    tensor = value.const_value
    if tensor is None or not tensor.dtype.is_integer() or tensor.size > _LARGEST_TABLE:
        return None
    if is_entry(tensor):
        return None
    return np.asarray(tensor.numpy())


@content_rule("Slice")
def _sliced_contents(node: Operation, known: Known) -> Contents | None:
    contents = known.contents(node.inputs[0])
    bounds = slice_bounds(node, known)
    if contents is None or bounds is None:
        return None
    index = [slice(None)] * contents.ndim
    for axis, (start, end, step) in bounds.items():
        index[axis] = slice(max(start, -contents.shape[axis]), end, step)
    return contents[tuple(index)]


@content_rule("Concat")
def _concatenated_contents(node: Operation, known: Known) -> Contents | None:
    parts = [known.contents(value) for value in node.inputs]
    if any(part is None for part in parts):
        return None
    return np.concatenate(
        [part for part in parts if part is not None], node.attributes["axis"].as_int()
    )
