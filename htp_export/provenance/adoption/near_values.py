"""Tensors of two files of one model with the same numbers: in another layout, joined, cut out, or rounded.

How much rounding there is, is measured: by the outputs of the files. A tensor matches only if no other original is
nearly as close.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from htp_export.runtime.arrays import Array, ArrayStore, StoredArray

__all__ = ["Likeness", "OriginalTensors", "relative_error"]

_FEWEST = 4  # different numbers; tensors with fewer, such as masks, are equal by chance
_EXACT = 2e-4
"""Relative error of float32 kernels that sum in other orders."""

_LARGEST = 0.3
"""Relative error beyond which a tensor is another one: two random tensors have 1.4."""

_MARGIN = 3.0
"""How many times farther away the next original has to be."""

_AMPLIFIED = 4.0
"""How many times larger the error of a tensor may be than that of the outputs."""

_PLACES = 64  # elements of a sample
_MOST_PARTS = 8


@dataclass(frozen=True)
class Likeness:
    """The original tensors that have the numbers of one tensor.

    Attributes:
        originals: They are all equal to it; or, if it is ``joined``, its parts, in order.
        same_shape: Whether they have its shape.
        joined: Whether it is their concatenation.
        error: The relative error.
    """

    originals: tuple[int, ...]
    same_shape: bool = True
    joined: bool = False
    error: float = 0.0


def relative_error(array: Array, original: Array) -> float:
    """The norm of a difference over that of the original without its mean; infinite where one is not finite.

    Examples:
        >>> relative_error(np.array([1.0, 2.0]), np.array([1.0, 2.0]))
        0.0
    """
    mine, theirs = array.astype(np.float64), original.astype(np.float64)
    finite = np.isfinite(theirs)
    if not finite.all():  # masks hold infinities, which have to be in the same places
        if not np.array_equal(mine[~finite], theirs[~finite]):
            return math.inf
        mine, theirs = mine[finite], theirs[finite]
    if not theirs.size:
        return math.inf
    scale = float(np.linalg.norm(theirs - theirs.mean()))
    difference = float(np.linalg.norm(mine - theirs))
    return difference / scale if scale and math.isfinite(difference) else (0.0 if not difference else math.inf)


def is_distinctive(array: Array) -> bool:
    """Whether an array has so many different numbers that another one is not equal by chance."""
    if array.size < _FEWEST or array.dtype.kind in "OUScb":
        return False
    flat = array.reshape(-1)
    return len(np.unique(flat[:: max(1, flat.size // _PLACES)])) >= _FEWEST or len(np.unique(flat)) >= _FEWEST


@dataclass
class _Entry:
    index: int
    held: StoredArray
    facts: Array

    @property
    def array(self) -> Array:
        return self.held.array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.held.array.shape


@dataclass
class OriginalTensors:
    """The tensors of the original model that can be recognised by their numbers.

    Attributes:
        store: Where the arrays are kept.
        tolerance: The relative error up to which a tensor is recognised.
    """

    store: ArrayStore
    tolerance: float = _EXACT
    _by_size: dict[tuple[bool, int], list[_Entry]] = field(default_factory=dict)
    _by_rank: dict[tuple[bool, int], list[_Entry]] = field(default_factory=dict)

    def add(self, index: int, array: Array) -> None:
        """Keep a tensor, if it is distinctive."""
        if not is_distinctive(array):
            return
        entry, whole = _Entry(index, self.store.keep(array), _facts(array)), _is_whole(array)
        self._by_size.setdefault((whole, array.size), []).append(entry)
        self._by_rank.setdefault((whole, array.ndim), []).append(entry)

    def measure(self, outputs: Iterable[Array], originals: Sequence[Array]) -> bool:
        """Set the tolerance by tensors that both files have: their outputs; return whether one was recognised.

        Args:
            outputs: The outputs of the other model.
            originals: Those of the original: outputs with few numbers are compared with these only.
        """
        self.tolerance, errors = _LARGEST, list[float]()
        for array in outputs:
            if is_distinctive(array):
                like = self.find(array)
                errors += [] if like is None else [like.error]
            else:
                same = [each for each in originals if each.shape == array.shape and array.size > 1]
                errors += [min((relative_error(array, each) for each in same), default=math.inf)]
        errors = [error for error in errors if error <= _LARGEST]
        self.tolerance = min(max(_EXACT, _AMPLIFIED * max(errors, default=0.0)), _LARGEST)
        return bool(errors)

    def find(self, array: Array) -> Likeness | None:
        """The originals with the numbers of an array; None if there are none, or it is not clear which."""
        if not is_distinctive(array):
            return None
        near = self._near(array, self.tolerance * _MARGIN)
        if near:
            return self._nearest(array, near)
        if not _is_whole(array):
            return self._joined(array) or self._cut_out(array)
        return None

    def _near(self, array: Array, limit: float) -> list[tuple[float, _Entry]]:
        """Originals of the same size that are near an array, whatever their shape, with their errors."""
        whole = _is_whole(array)
        entries = self._by_size.get((whole, array.size), [])
        if not entries:
            return []
        if whole:
            same = [e for e in entries if np.array_equal(array.reshape(-1), e.array.reshape(-1))]
            return [(0.0, entry) for entry in same]
        facts = np.stack([entry.facts for entry in entries])
        mine = _facts(array)
        scale = np.maximum(facts[:, 1:2], 1e-30)
        passing = (np.abs(facts - mine) <= scale * max(limit, 1e-3) * 4).all(axis=1)
        near = []
        for place in np.flatnonzero(passing):
            error = _error_in_any_layout(array, entries[place].array, limit)
            if error <= limit:
                near.append((error, entries[place]))
        return near

    def _nearest(self, array: Array, near: list[tuple[float, _Entry]]) -> Likeness | None:
        best = min(error for error, _ in near)
        if best > self.tolerance:
            return None
        close = [entry for error, entry in near if error <= max(_EXACT, best * _MARGIN)]
        same_shape = [entry for entry in close if entry.shape == array.shape]
        limit = max(_EXACT, best * _MARGIN)
        same_order = [e for e in close if relative_error(array.reshape(-1), e.array.reshape(-1)) <= limit]
        chosen = same_shape or same_order or close
        if best > _EXACT:  # rounded: others that are nearly as close must be the same tensor
            first = chosen[0].array
            if any(_error_in_any_layout(entry.array, first, _EXACT) > _EXACT for entry in close):
                return None
        return Likeness(tuple(entry.index for entry in chosen), bool(same_shape), error=best)

    def _joined(self, array: Array) -> Likeness | None:
        """Originals whose concatenation along one axis is the array."""
        entries = self._by_rank.get((False, array.ndim), [])
        for axis in reversed(range(array.ndim)):
            fitting = [
                e for e in entries if _fits_except(e.shape, array.shape, axis) and e.shape[axis] < array.shape[axis]
            ]
            parts, at = list[int](), 0
            while fitting and at < array.shape[axis] and len(parts) < _MOST_PARTS:
                found = self._part(array, axis, at, fitting)
                if found is None:
                    break
                parts.append(found.index)
                at += found.shape[axis]
            if parts and at == array.shape[axis]:
                return Likeness(tuple(parts), same_shape=False, joined=True)
        return None

    def _part(self, array: Array, axis: int, at: int, entries: list[_Entry]) -> _Entry | None:
        best: tuple[float, _Entry] | None = None
        for entry in entries:
            stop = at + entry.shape[axis]
            if stop > array.shape[axis]:
                continue
            error = relative_error(_cut(array, axis, at, stop), entry.array)
            if error <= self.tolerance and (best is None or error < best[0]):
                best = error, entry
        return None if best is None else best[1]

    def _cut_out(self, array: Array) -> Likeness | None:
        """The one original that the array is a part of."""
        found: dict[int, float] = {}
        for entry in self._by_rank.get((False, array.ndim), []):
            for axis in range(array.ndim):
                if not _fits_except(entry.shape, array.shape, axis) or entry.shape[axis] <= array.shape[axis]:
                    continue
                size = array.shape[axis]
                for start in _starts(entry.array, array, axis, self.tolerance):
                    error = relative_error(array, _cut(entry.array, axis, start, start + size))
                    if error <= self.tolerance:
                        found[entry.index] = min(error, found.get(entry.index, math.inf))
        if len(found) != 1:
            return None
        [(index, error)] = found.items()
        return Likeness((index,), same_shape=False, error=error)


def _is_whole(array: Array) -> bool:
    return array.dtype.kind in "iu"


def _facts(array: Array) -> Array:
    """Numbers that are the same in every layout: mean, root mean square and largest of what is finite."""
    if _is_whole(array):
        return np.zeros(3)
    numbers = array.astype(np.float64).reshape(-1)
    numbers = numbers[np.isfinite(numbers) & (np.abs(numbers) < 1e30)]
    if not numbers.size:
        return np.full(3, math.inf)
    return np.array([numbers.mean(), math.sqrt(np.square(numbers).mean()), np.abs(numbers).max()])


def _error_in_any_layout(array: Array, original: Array, limit: float) -> float:
    flat, theirs = array.reshape(-1), original.reshape(-1)
    step = max(1, flat.size // _PLACES)
    error = math.inf
    if relative_error(flat[::step], theirs[::step]) <= 4 * limit:
        error = relative_error(flat, theirs)
    if error <= limit or array.shape == original.shape or array.ndim < 2 or original.ndim < 2:
        return error
    return min(error, relative_error(np.sort(flat, kind="stable"), np.sort(theirs, kind="stable")))


def _fits_except(shape: tuple[int, ...], other: tuple[int, ...], axis: int) -> bool:
    return all(one == two for place, (one, two) in enumerate(zip(shape, other, strict=True)) if place != axis)


def _cut(array: Array, axis: int, start: int, stop: int) -> Array:
    return array[(slice(None),) * axis + (slice(start, stop),)]


def _starts(whole: Array, part: Array, axis: int, tolerance: float) -> Iterator[int]:
    """Where a part may begin: its first element there is near."""
    first = _cut(part, axis, 0, 1).astype(np.float64).reshape(-1)
    lines = np.moveaxis(whole, axis, 0).reshape(whole.shape[axis], -1).astype(np.float64)
    distance = np.linalg.norm(lines - first, axis=1)
    limit = max(tolerance, 1e-6) * 4 * max(float(np.linalg.norm(first)), 1e-12)
    yield from (int(at) for at in np.flatnonzero(distance <= limit) if at + part.shape[axis] <= whole.shape[axis])
