"""The smallest elements of many arrays that are never held together.

The order of floating-point numbers of one sign is that of their bits. So the element at a place of the sorted order is
found digit by digit, as a radix sort does, with a histogram of 16 bits in each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from htp_export.runtime.arrays import Array

__all__ = ["CHUNK", "Cutoff", "find_cutoff", "keys_of"]


CHUNK = 1 << 20
"""Elements that are looked at together."""

_DIGIT = 16


@dataclass(frozen=True)
class Cutoff:
    """Where the smallest elements end.

    Attributes:
        key: The key of the last of them; those with smaller keys are all among them.
        ties: How many of the elements with this key are among them, the first ones.
    """

    key: int
    ties: int


def keys_of(array: Array, wide: bool = False) -> Array:
    """Unsigned integers in the order of the absolute values; NaN comes last.

    Args:
        array: Floating-point numbers.
        wide: Whether 64 bits are compared, which float64 needs.

    Examples:
        >>> keys = keys_of(np.array([-2.0, 0.5, 0.0, 1.0], np.float32))
        >>> np.argsort(keys).tolist()
        [2, 1, 3, 0]
    """
    if wide:
        return np.abs(array.astype(np.float64)).view(np.uint64)
    return np.abs(array.astype(np.float32)).view(np.uint32)


def find_cutoff(parts: Callable[[], Iterable[Array]], count: int, *, wide: bool = False) -> Cutoff | None:
    """Where the ``count`` smallest elements end.

    Args:
        parts: Gives the keys of all elements, part by part, the same in every call.
        count: How many elements; at most as many as there are.
        wide: Whether keys have 64 bits.

    Returns:
        The cutoff; None for no elements.

    Examples:
        >>> find_cutoff(lambda: [np.array([5, 1, 3], np.uint32), np.array([3, 3], np.uint32)], 3)
        Cutoff(key=3, ties=2)
    """
    if count <= 0:
        return None
    key, left = 0, count
    bits = 64 if wide else 32
    for shift in range(bits - _DIGIT, -1, -_DIGIT):
        histogram = np.zeros(1 << _DIGIT, np.int64)
        for keys in parts():
            for chunk in _chunks(keys):
                same = chunk if shift + _DIGIT == bits else chunk[(chunk >> (shift + _DIGIT)) == key]
                digits = (same >> shift) & ((1 << _DIGIT) - 1)
                histogram += np.bincount(digits.astype(np.int64), minlength=1 << _DIGIT)
        below = np.cumsum(histogram)
        digit = int(np.searchsorted(below, left))
        left -= int(below[digit - 1]) if digit else 0
        key = (key << _DIGIT) | digit
    return Cutoff(key, left)


def _chunks(keys: Array) -> Iterator[Array]:
    flat = keys.reshape(-1)
    for start in range(0, len(flat), CHUNK):
        yield flat[start : start + CHUNK]
