"""Masks: the elements of weights with the smallest scores, alone or in groups, become zero.

The arrays of several weights are not in memory at the same time: numbers of one sign have the order
of their bits, so that the element at a position of the sorted order is found digit by digit, as in
a radix sort.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from htp_export.runtime.arrays import Array
from htp_export.weights.products import Weight

Mask = Callable[[Array], Array]
"""Accepts the elements of a weight and returns them with zeros."""

_CHUNK = 1 << 20
"""Elements that are processed together: 4 MB of keys, which fit a cache."""

_DIGIT = 16
"""Bits of a digit: 65,536 counters, two rounds for single precision."""


def keys_of(array: Array, wide: bool = False) -> Array:
    """Unsigned integers in the order of the absolute values; NaN comes last.

    They have 64 bits for float64 (``wide``), and 32 otherwise.

    Examples:
        >>> keys = keys_of(np.array([-2.0, 0.5, 0.0, 1.0], np.float32))
        >>> np.argsort(keys).tolist()
        [2, 1, 3, 0]
    """
    if wide:
        return np.abs(array.astype(np.float64)).view(np.uint64)
    return np.abs(array.astype(np.float32)).view(np.uint32)


@dataclass(frozen=True)
class Scores:
    """The order in which elements are pruned: by size, the smallest first, or random by a seed."""

    seed: int | None = None

    def generator(self, name: str) -> np.random.Generator | None:
        """Random numbers for a tensor, by its name; None for absolute values."""
        if self.seed is None:
            return None
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def keys(self, weight: Weight, array: Array, wide: bool = False) -> Iterator[Array]:
        """Keys in the order of the scores of a weight's elements, part by part."""
        flat, random = array.reshape(-1), self.generator(weight.name)
        for start in range(0, flat.size, _CHUNK):
            part = flat[start : start + _CHUNK]
            yield keys_of(part if random is None else random.random(part.size, np.float32), wide)


class CutoffSearch:
    """Finds the largest of the smallest keys, digit by digit: all keys are added once for each digit.

    Args:
        wide: Whether keys have 64 bits.

    Attributes:
        rounds: The number of digits.
        added: The number of keys.
    """

    def __init__(self, *, wide: bool = False) -> None:
        self._bits = 64 if wide else 32
        self.rounds = self._bits // _DIGIT
        self.added = 0
        self._key = self._left = 0
        self._shift = self._bits - _DIGIT
        self._histogram = np.zeros(1 << _DIGIT, np.int64)

    def add(self, keys: Array) -> None:
        """Count keys for the present digit."""
        candidates = keys  # all in the first round, then the keys that begin with the digits so far
        if self._shift + _DIGIT < self._bits:
            candidates = keys[(keys >> (self._shift + _DIGIT)) == self._key]
        else:
            self.added += keys.size
        digits = (candidates >> self._shift) & ((1 << _DIGIT) - 1)
        self._histogram += np.bincount(digits.astype(np.int64), minlength=1 << _DIGIT)

    def finish_round(self, count: int) -> tuple[int, int]:
        """Find the present digit of the largest of the ``count`` smallest keys.

        Returns:
            The digits so far, and how many of these keys begin with them: after the last round, the
            key, and how many are equal to it.
        """
        if self._shift + _DIGIT == self._bits:
            self._left = count
        below = np.cumsum(self._histogram)
        digit = int(np.searchsorted(below, self._left))
        self._left -= int(below[digit - 1]) if digit else 0
        self._key = (self._key << _DIGIT) | digit
        self._shift -= _DIGIT
        self._histogram[:] = 0
        return self._key, self._left


def find_cutoff(
    parts: Callable[[], Iterable[Array]], count: int, *, wide: bool = False
) -> tuple[int, int]:
    """The largest of the ``count`` smallest keys, and how many of these are equal to it.

    ``parts`` yields all keys, part by part, the same in every call; ``wide``: keys have 64 bits.

    Examples:
        >>> find_cutoff(lambda: [np.array([5, 1, 3], np.uint32), np.array([3, 3], np.uint32)], 3)
        (3, 2)
    """
    search = CutoffSearch(wide=wide)
    found = 0, 0
    for _ in range(search.rounds):
        for keys in parts():
            search.add(keys)
        found = search.finish_round(count)
    return found


def element_masks(weights: Sequence[Weight], amount: float, scores: Scores) -> list[Mask]:
    """Masks of the elements with the smallest scores of several weights together.

    The number of elements is rounded as ``torch.nn.utils.prune`` rounds it for
    ``global_unstructured``. Of elements with equal scores, the first ones become zero.
    """
    wide = any(weight.tensor.dtype == ir.DataType.DOUBLE for weight in weights)

    def parts() -> Iterator[Array]:
        for weight in weights:
            yield from scores.keys(weight, weight.tensor.numpy(), wide)

    count = round(amount * sum(weight.tensor.size for weight in weights))
    if not count:
        return [lambda array: array for _ in weights]
    key, left = find_cutoff(parts, count, wide=wide)
    masks: list[Mask] = []
    for weight in weights:
        ties = left
        if len(weights) > 1:
            keys = scores.keys(weight, weight.tensor.numpy(), wide)
            ties = min(left, sum(int(np.count_nonzero(part == key)) for part in keys))
            left -= ties
        masks.append(_element_mask(weight, scores, key, ties, wide))
    return masks


def _element_mask(weight: Weight, scores: Scores, key: int, ties: int, wide: bool) -> Mask:
    def mask(array: Array) -> Array:
        pruned = np.array(array).reshape(-1)
        left, start = ties, 0
        for keys in scores.keys(weight, array, wide):
            part = pruned[start : start + keys.size]
            part[keys < key] = 0
            equal = np.flatnonzero(keys == key)[:left]
            part[equal] = 0
            left, start = left - equal.size, start + keys.size
        return pruned.reshape(array.shape)

    return mask


def group_mask(weight: Weight, kept: int, group: int, scores: Scores) -> Mask:
    """The mask that keeps ``kept`` elements of each group, with the largest scores: n:m sparsity.

    Groups lie along the axis over which the product sums, as the sparse matrix units of NVIDIA
    require it. A shorter last group is padded with zeros, which are the first to be pruned.
    """

    def mask(array: Array) -> Array:
        parts = list(scores.keys(weight, array, array.dtype == np.float64))
        keys = np.concatenate(parts).reshape(array.shape)
        moved = np.moveaxis(np.array(array), weight.reduced, -1)
        size = moved.shape[-1]
        rows = np.ascontiguousarray(moved).reshape(-1, size)
        row_keys = np.moveaxis(keys, weight.reduced, -1).reshape(-1, size)
        step = max(1, _CHUNK // max(size, 1))
        for start in range(0, len(rows), step):
            _prune_groups(rows[start : start + step], row_keys[start : start + step], kept, group)
        return np.ascontiguousarray(np.moveaxis(rows.reshape(moved.shape), -1, weight.reduced))

    return mask


def _prune_groups(rows: Array, keys: Array, kept: int, group: int) -> None:
    """Set elements of rows to zero in place."""
    # a plan may state any size of a group
    kept, group = (min(number, rows.shape[1]) for number in (kept, group))
    if not group:
        return
    missing = -rows.shape[1] % group
    # keys of the padding are 0, and come before the keys of zeros, which are 1
    filled = np.pad(keys.astype(np.uint64) + 1, ((0, 0), (0, missing)))
    order = np.argsort(filled.reshape(len(rows), -1, group), axis=-1, kind="stable")
    gone = np.zeros(order.shape, bool)
    np.put_along_axis(gone, order[..., : group - kept], values=True, axis=-1)
    rows[gone.reshape(len(rows), -1)[:, : rows.shape[1]]] = 0
