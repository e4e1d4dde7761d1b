"""Axes that a Reshape merges or splits, and the labels of their channels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from htp_export.runtime.arrays import Array
from htp_export.shapes.sizes import Dim, Size, product


def spread_labels(labels: Array, place: int, sizes: Sequence[int]) -> Array:
    """The labels of one axis, broadcast to each element of a tensor."""
    shape = [-1 if axis == place else 1 for axis in range(len(sizes))]
    return np.broadcast_to(labels.reshape(shape), sizes)


def rows_at(array: Array, place: int) -> Array:
    """The elements at each index of an axis, a row for each index."""
    return np.moveaxis(array, place, 0).reshape(array.shape[place], -1)


def period_of(size: Dim) -> int | None:
    """The factor of an open dimension, after which its labels repeat.

    None for a number or a sum.
    """
    if isinstance(size, Size) and len(size.terms) == 1:
        return size.terms[0][1]
    return None


def periods_of(sizes: Iterable[Dim]) -> list[int] | None:
    """Sizes of axes that are reshaped together, without the open dimension that repeats them.

    None if another axis than the outermost one is open.

    Examples:
        >>> from htp_export.shapes.sizes import symbol
        >>> batch = symbol("batch")
        >>> periods_of([batch, 4]), periods_of([4 * batch]), periods_of([4, batch])
        ([1, 4], [4], None)
    """
    periods: list[int] = []
    for size in sizes:
        period = size if isinstance(size, int) else period_of(size)
        if period is None:
            return None
        if not isinstance(size, int) and (period < 1 or math.prod(periods) > 1):
            return None
        periods.append(period)
    return periods


def blocks(first: Sequence[Dim], second: Sequence[Dim]) -> Iterator[tuple[list[int], list[int]]]:
    """The axes of two shapes of the same elements, in the smallest blocks of equal products.

    Examples:
        >>> list(blocks([1, 16, 768], [16, 12, 64]))
        [([0], []), ([1], [0]), ([2], [1, 2])]
        >>> from htp_export.shapes.sizes import symbol
        >>> list(blocks([symbol("n"), 4, 9], [symbol("m"), 2, 36]))
        [([1, 2], [2])]
    """
    i = j = 0
    for p, q in _sizes_of_blocks(first, second):
        yield list(range(i, i + p)), list(range(j, j + q))
        i, j = i + p, j + q
    m, n = len(first), len(second)
    if i < m and j < n:  # from the right, where open dimensions on the left cannot be compared
        for p, q in _sizes_of_blocks(first[i:][::-1], second[j:][::-1]):
            yield list(range(m - p, m)), list(range(n - q, n))
            m, n = m - p, n - q


def _sizes_of_blocks(first: Sequence[Dim], second: Sequence[Dim]) -> Iterator[tuple[int, int]]:
    """The number of axes of each shape in a block, from the left, while they can be compared."""
    i = j = 0
    while (block := _next_block(first[i:], second[j:])) != (0, 0):
        yield block
        i, j = i + block[0], j + block[1]


def _next_block(first: Sequence[Dim], second: Sequence[Dim]) -> tuple[int, int]:
    if first and second and first[0] == second[0]:
        return 1, 1
    if first and first[0] == 1:
        return 1, 0
    if second and second[0] == 1:
        return 0, 1
    counts = itertools.product(range(1, len(first) + 1), range(1, len(second) + 1))
    for p, q in sorted(counts, key=sum):
        if product(first[:p]) == product(second[:q]):
            return p, q
    return 0, 0
