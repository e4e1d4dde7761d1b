"""Operators that pick, cut or put together parts of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from htp_export.format.bounds import MOST_DIMENSIONS
from htp_export.shapes.known import Contents, Dims, Known, Operation, axes_of, normalized, shape_of
from htp_export.shapes.operators import content_rule, shape_rule
from htp_export.shapes.sizes import Dim, Size, divide, is_natural, not_negative, smaller_of


@shape_rule("Concat")
def _concat(node: Operation, known: Known) -> Sequence[Dims | None]:
    shapes = [shape_of(node, known, place) for place in range(len(node.inputs))]
    axis = normalized(node.attributes["axis"].as_int(), len(shapes[0]))
    result: list[Dim | None] = [
        next((shape[k] for shape in shapes if isinstance(shape[k], int)), shapes[0][k])
        for k in range(len(shapes[0]))
    ]
    result[axis] = sum(shape[axis] for shape in shapes)
    return [result]


@shape_rule("Split")
def _split(node: Operation, known: Known) -> Sequence[Dims | None]:
    shape = shape_of(node, known)
    axis, count = normalized(node.attributes.get_int("axis", 0), len(shape)), len(node.outputs)
    sizes: Sequence[Dim | None] | None = axes_of(node, known, "split")
    if sizes is None:
        total = shape[axis]
        sizes = (
            [None] * count
            if len(node.inputs) > 1 or not isinstance(total, int) or total % count
            else None
        )
        sizes = sizes or [divide(total, count)] * count
    return [[*shape[:axis], size, *shape[axis + 1 :]] for size in sizes]


@shape_rule("Slice")
def _slice(node: Operation, known: Known) -> Sequence[Dims | None]:
    shape = shape_of(node, known)
    starts, ends = known.contents(node.inputs[1]), known.contents(node.inputs[2])
    axes, steps = sliced_axes(node, known), axes_of(node, known, "steps", place=4)
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
    """The axes that a ``Slice`` cuts, counted from the front; None where they are not known."""
    axes, rank = axes_of(node, known, place=3), known.rank(node.inputs[0])
    if axes is None and len(node.inputs) > 1 and not any(node.inputs[3:4]):
        starts = known.shape(node.inputs[1])
        count = starts[0] if starts else None
        axes = list(range(count)) if isinstance(count, int) and count <= MOST_DIMENSIONS else None
    return None if axes is None or rank is None else [normalized(axis, rank) for axis in axes]


def slice_bounds(node: Operation, known: Known) -> dict[int, tuple[int, int, int]] | None:
    """Axis that a ``Slice`` cuts → start, end and step, as they are written; None where they are not constant."""
    axes, starts, ends = (
        sliced_axes(node, known),
        axes_of(node, known, "starts", 1),
        axes_of(node, known, "ends", 2),
    )
    steps = axes_of(node, known, "steps", 4)
    if axes is None or starts is None or ends is None or (steps is None and any(node.inputs[4:5])):
        return None
    return dict(zip(axes, zip(starts, ends, steps or [1] * len(axes), strict=True), strict=True))


def _slice_length(dim: Dim, start: Dim, end: Dim, step: int) -> Dim | None:
    """How many elements a slice of one axis takes; None where that depends on sizes that are not known."""
    if step == 1:
        first, last = _clamped(start, dim), _clamped(end, dim)
        if first is None or last is None:
            return None
        return not_negative(last - first)
    if isinstance(dim, int) and isinstance(start, int) and isinstance(end, int):
        return len(range(dim)[max(start, -dim) : end : step])
    return None


def _clamped(bound: Dim, dim: Dim) -> Dim | None:
    """A bound of a slice, counted from the front and not past the end."""
    if isinstance(bound, int):
        if bound >= 2**31 - 1:
            return dim
        if bound < 0:
            bound = dim + bound
            return bound if isinstance(bound, Size) else max(bound, 0)
    beyond = bound - dim
    if isinstance(beyond, int):
        return dim if beyond > 0 else bound
    if bound == 0 or is_natural(dim - bound):
        return bound
    return smaller_of(dim, bound) if isinstance(bound, int) or is_natural(bound) else None


@shape_rule("Gather")
def _gather(node: Operation, known: Known) -> Sequence[Dims | None]:
    data, indices = shape_of(node, known), shape_of(node, known, 1)
    axis = normalized(node.attributes.get_int("axis", 0), len(data))
    return [[*data[:axis], *indices, *data[axis + 1 :]]]


@content_rule("Gather")
def _gathered_contents(node: Operation, known: Known) -> Contents | None:
    contents, places = _table(node, known), known.contents(node.inputs[1])
    if contents is None or places is None:
        return None
    return np.asarray(
        np.take(contents, places.astype(np.int64), node.attributes.get_int("axis", 0)), dtype=object
    )


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
    return np.asarray(tensor.numpy())


@content_rule("Slice")
def _sliced_contents(node: Operation, known: Known) -> Contents | None:
    contents, bounds = known.contents(node.inputs[0]), slice_bounds(node, known)
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
