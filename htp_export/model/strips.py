"""Functions of large arrays, evaluated on a few rows at a time, so that intermediate results stay small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from htp_export.model.graph_facts import Array

STRIP_BYTES = 4 << 20
"""Bytes of the rows that are evaluated at a time, about."""

_EVEN = 2
"""Rows of numbers of 4 bits, of which a byte contains two, can be divided in pairs."""


def strips(array: Array, part_bytes: int = STRIP_BYTES) -> Iterator[slice]:
    """Yield ranges of the first axis of an array, in order, each from an even place on, of about ``part_bytes``.

    Examples:
        >>> list(strips(np.zeros((3, 2))))
        [slice(0, 3, None)]
    """
    count = len(array)
    step = max(_EVEN, part_bytes * count // max(1, array.nbytes) // _EVEN * _EVEN)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def in_strips(function: Callable[..., Array], dtype: Any, array: Array, *others: Array) -> Array:
    """Evaluate a function that treats each row of an array by itself.

    Args:
        function: Returns the rows of the result for rows of the arrays.
        dtype: The numpy type of the result, whose shape is that of ``array``.
        array: The array.
        others: Arrays of the same rank, with the same number of rows, or with a single row that
            belongs to all rows of ``array``.

    Examples:
        >>> in_strips(np.add, np.int64, np.array([[1], [2]]), np.array([[10]]))
        array([[11],
               [12]])
    """
    if array.ndim == 0 or array.nbytes <= STRIP_BYTES:
        return np.asarray(function(array, *others)).astype(dtype, copy=False)
    result: Array = np.empty(array.shape, dtype)
    for rows in strips(array):
        parts = [other if len(other) == 1 else other[rows] for other in others]
        result[rows] = function(array[rows], *parts)
    return result
