"""Axes that a Reshape puts together or takes apart, and labels of channels on the way."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from htp_export.runtime.arrays import Array
from htp_export.shapes.sizes import Dim, Size, product


def spread_labels(labels: Array, place: int, sizes: Sequence[int]) -> Array:
    """Labels of one axis, for each element of a tensor."""
    shape = [-1 if axis == place else 1 for axis in range(len(sizes))]
    return np.broadcast_to(labels.reshape(shape), sizes)


def rows_at(array: Array, place: int) -> Array:
    """The elements at each index of an axis."""
    return np.moveaxis(array, place, 0).reshape(array.shape[place], -1)


def period_of(size: Dim) -> int | None:
    """The factor of an open dimension: its labels repeat after so many indices; None for a sum."""
    return size.terms[0][1] if isinstance(size, Size) and len(size.terms) == 1 else None


def periods_of(sizes: Iterable[Dim]) -> list[int] | None:
    """Sizes of axes that are reshaped together, without the open dimension that counts repetitions of them all.

    None if another axis than the outermost one is open.

    Examples:
        >>> from htp_export.shapes.sizes import symbol
        >>> batch = symbol("batch")
        >>> periods_of([batch, 4]), periods_of([4 * batch]), periods_of([4, batch])
        ([1, 4], [4], None)
    """
    found: list[int] = []
    for size in sizes:
        period = period_of(size)
        if not isinstance(size, int) and (period is None or period < 1 or math.prod(found) > 1):
            return None
        found.append(size if isinstance(size, int) else period)  # type: ignore[arg-type]
    return found


def blocks(first: Sequence[Dim], second: Sequence[Dim]) -> Iterator[tuple[list[int], list[int]]]:
    """The axes of two shapes of the same elements that have the same product, as few as possible in each block.

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
    """How many axes of each shape are in a block, from the left, as long as they can be compared."""
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
