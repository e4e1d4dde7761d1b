"""Which elements of weights become zero: those with the smallest scores, alone, over a selection, or in groups."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.prune.cutoffs import CHUNK, Cutoff, find_cutoff, keys_of
from htp_export.runtime.arrays import Array
from htp_export.weights.products import Weight

__all__ = ["Mask", "Scores", "element_masks", "group_mask"]

Mask = Callable[[Array], Array]
"""Takes the numbers of a weight and returns them with zeros."""


@dataclass(frozen=True)
class Scores:
    """The order in which elements are pruned: the smallest first.

    Attributes:
        seed: For random scores; None for the absolute values of the elements.
    """

    seed: int | None = None

    def keys(self, weight: Weight, array: Array, wide: bool = False) -> Iterator[Array]:
        """Keys in the order of the scores of a weight's elements, part by part.

        Args:
            weight: The weight; random scores depend on its name.
            array: Its numbers.
            wide: Whether keys have 64 bits.
        """
        flat = array.reshape(-1)
        random = None if self.seed is None else np.random.default_rng([self.seed, zlib.crc32(weight.name.encode())])
        for start in range(0, flat.size, CHUNK):
            part = flat[start : start + CHUNK]
            yield keys_of(part if random is None else random.random(part.size, np.float32), wide)


def element_masks(weights: Sequence[Weight], amount: float, scores: Scores) -> list[Mask]:
    """Zeros in the elements with the smallest scores of several weights together, as torch's ``global_unstructured``.

    The number of elements is rounded as ``torch.nn.utils.prune`` rounds it. Of elements with equal scores, the first
    ones become zero. Weights are read one at a time.

    Args:
        weights: The weights; for each by itself, call this for each.
        amount: The share that becomes zero.
        scores: What to order by.

    Returns:
        For each weight, what sets its elements to zero.
    """
    wide = any(weight.tensor.dtype == ir.DataType.DOUBLE for weight in weights)

    def parts() -> Iterator[Array]:
        for weight in weights:
            yield from scores.keys(weight, weight.tensor.numpy(), wide)

    total = sum(weight.tensor.size for weight in weights)
    cutoff = find_cutoff(parts, round(amount * total), wide=wide)
    if cutoff is None:
        return [lambda array: array for _ in weights]
    masks: list[Mask] = []
    left = cutoff.ties
    for weight in weights:
        own = left
        if len(weights) > 1:
            every = scores.keys(weight, weight.tensor.numpy(), wide)
            equal = sum(int(np.count_nonzero(keys == cutoff.key)) for keys in every)
            own = min(left, equal)
            left -= own
        masks.append(_element_mask(weight, scores, Cutoff(cutoff.key, own), wide))
    return masks


def _element_mask(weight: Weight, scores: Scores, cutoff: Cutoff, wide: bool) -> Mask:
    def mask(array: Array) -> Array:
        pruned = np.array(array).reshape(-1)
        left, start = cutoff.ties, 0
        for keys in scores.keys(weight, array, wide):
            part = pruned[start : start + keys.size]
            part[keys < cutoff.key] = 0
            equal = np.flatnonzero(keys == cutoff.key)[:left]
            part[equal] = 0
            left, start = left - equal.size, start + keys.size
        return pruned.reshape(array.shape)

    return mask


def group_mask(weight: Weight, kept: int, group: int, scores: Scores) -> Mask:
    """All but the ``kept`` elements with the largest scores of each group of neighbours become zero: n:m sparsity.

    Groups lie along the axis over which the product sums, as the sparse matrix units of NVIDIA need it. A last group
    that is shorter is filled with zeros, which are the first to be pruned.

    Args:
        weight: The weight.
        kept: How many elements of a group stay.
        group: The size of a group.
        scores: What to order by.
    """

    def mask(array: Array) -> Array:
        keys = np.concatenate(list(scores.keys(weight, array, array.dtype == np.float64))).reshape(array.shape)
        moved, moved_keys = (np.moveaxis(each, weight.reduced, -1) for each in (np.array(array), keys))
        rows, size = np.ascontiguousarray(moved).reshape(-1, moved.shape[-1]), moved.shape[-1]
        row_keys = moved_keys.reshape(-1, size)
        step = max(1, CHUNK // max(size, 1))
        for start in range(0, len(rows), step):
            _prune_groups(rows[start : start + step], row_keys[start : start + step], kept, group)
        return np.ascontiguousarray(np.moveaxis(rows.reshape(moved.shape), -1, weight.reduced))

    return mask


def _prune_groups(rows: Array, keys: Array, kept: int, group: int) -> None:
    """Set elements of rows to zero in place."""
    missing = -rows.shape[1] % group
    filled = np.pad(keys.astype(np.uint64) + 1, ((0, 0), (0, missing)))  # zeros that fill come before zeros that are
    order = np.argsort(filled.reshape(len(rows), -1, group), axis=-1, kind="stable")
    gone = np.zeros(order.shape, bool)
    np.put_along_axis(gone, order[..., : group - kept], values=True, axis=-1)
    rows[gone.reshape(len(rows), -1)[:, : rows.shape[1]]] = 0
