"""Numbers of one file in another: equal, in another layout, joined, cut out, scaled or rounded.

Equal contents are found by hashes. For the rest, samples of the originals select candidates, which
are then compared in full. Nothing matches if another original is nearly as close.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from htp_export.model.hashes import array_hash
from htp_export.runtime.arrays import Array

EXACT = 2e-4
"""Relative error of float32 kernels that differ in the order of their sums."""

_LARGEST = 0.3
"""Largest relative error of a match: four bits for 32 weights cause 0.12, unequal tensors 1.4."""

_MARGIN = 3.0
"""Factor by which the error of the next original has to be larger, so that a match is unique."""

_LEAST_OF_FACTS, _MARGIN_OF_FACTS = 1e-3, 4
"""The least relative error for which facts of arrays are compared, and a factor: facts differ less than elements do."""

_SMALLEST = 1e-30
"""Root mean square of an array of zeros, so that errors can be relative to it."""

_AMPLIFIED = 4.0
"""Factor from the outputs' error to that of other tensors: later layers may reduce an error."""

_FEWEST = 4
"""Distinct numbers of a comparable tensor, at least: masks have fewer, and are equal by chance."""

_PLACES = 128
"""Elements of a sample: for two random tensors, its error is about 1.4, and never below 0.9."""

_BLOCK = 1 << 18
"""Elements that are converted to float64 at once: 2 MB, whatever the size of a weight."""

_SAMPLED = 1.5
"""Factor from the error of the whole tensor to that of a sample, which varies."""

_MOST_PARTS = 8
"""Parts of a concatenation, at most: attention joins three projections, an LSTM four gates."""

_SORTED = 1e-3
"""Relative error of sorted numbers: two tensors of one distribution differ by more."""

_MOST_AXES = 5
"""Axes of a tensor whose permutations are tried, at most: five have 120, six already 720."""

_FEW, _FITTED = 256, 0.05
"""Largest error after scaling for tensors of fewer elements: few numbers may fit by chance."""


@dataclass(frozen=True)
class Part:
    """A slice of a tensor that equals a slice of an original."""

    original: int  # the original
    axis: int  # the axis along which both are cut
    place: tuple[int, int]  # first index in the tensor, and the index after the last
    of: tuple[int, int]  # the same in the original, or in its transpose if ``transposed``
    transposed: bool = False  # whether it is a slice of the original's transpose
    error: float = 0.0  # the relative error


@dataclass(frozen=True)
class NumericMatch:
    """The originals that have the numbers of one tensor."""

    # tensors that all equal it; or, if it is ``joined``, its parts, in order
    originals: tuple[int, ...]
    same_shape: bool = True  # whether they have its shape and its order of elements
    parts: tuple[Part, ...] = ()  # its slices, if it is not the whole of an original
    scale: float = 1.0  # factor on the original
    offset: float = 0.0  # added after that
    error: float = 0.0  # the relative error

    @property
    def joined(self) -> bool:
        """Whether it is the concatenation of several originals."""
        return len(self.parts) > 1


def relative_error(array: Array, original: Array) -> float:
    """The norm of the difference over that of the original without its mean.

    Infinite if an infinity of the original is not in the same place, and for empty arrays.
    """
    if array.shape != original.shape:
        array, original = np.broadcast_arrays(array, original)
    count = 0
    total = 0.0
    difference = 0.0  # squared, as `spread`
    for mine, theirs in _finite_blocks(array, original):
        if mine is None:  # masks contain infinities, which must be in the same places
            return math.inf
        count += theirs.size
        total += float(theirs.sum())
        change = mine - theirs
        difference += float(change @ change)
    if not count:
        return math.inf
    mean = total / count
    spread = 0.0
    for _, theirs in _finite_blocks(original, original):
        theirs -= mean
        spread += float(theirs @ theirs)
    if spread and math.isfinite(difference):
        return math.sqrt(difference / spread)
    return math.inf if difference else 0.0


def _finite_blocks(array: Array, original: Array) -> Iterator[tuple[Array | None, Array]]:
    """The finite numbers of an original, and those of an array in their places, in blocks of float64.

    None in place of an array whose other numbers differ. In blocks, because each copy of a weight
    in float64 has twice its size.
    """
    for mine, theirs in zip(_blocks(array), _blocks(original), strict=True):
        finite = np.isfinite(theirs)
        if finite.all():
            yield mine, theirs
        elif np.array_equal(mine[~finite], theirs[~finite]):
            yield mine[finite], theirs[finite]
        else:
            yield None, theirs


def _blocks(array: Array) -> Iterator[Array]:
    """The numbers of an array in order, as new arrays of float64 of limited size."""
    if array.flags.c_contiguous:
        flat = array.reshape(-1)
        for start in range(0, flat.size, _BLOCK):
            yield flat[start : start + _BLOCK].astype(np.float64)
        return
    for start in range(0, array.size, _BLOCK):
        yield array.flat[start : start + _BLOCK].astype(np.float64)


def is_distinctive(array: Array) -> bool:
    """Whether an array has enough distinct numbers, so that no other equals it by chance."""
    if array.size < _FEWEST or array.dtype.kind in "OUScb":
        return False
    flat = array.reshape(-1)
    return (
        len(np.unique(flat[:: max(1, flat.size // _PLACES)])) >= _FEWEST
        or len(np.unique(flat)) >= _FEWEST
    )


def largest_error(
    outputs: Iterable[tuple[Array, Sequence[Array]]],
    find: Callable[[Array], NumericMatch | None],
) -> float:
    """The tolerance for tensors of two models, by the errors of their outputs.

    Infinite if no output has a counterpart.

    Args:
        outputs: Output, and all outputs of the original.
        find: Finds a tensor in the original with the largest tolerance.
    """
    errors = []
    for array, originals in outputs:
        if is_distinctive(array):
            match = find(array)
            if match is not None:
                errors.append(match.error)
            continue
        # Outputs with few distinct numbers are compared with outputs only.
        same_shape = [each for each in originals if each.shape == array.shape and array.size > 1]
        errors += [min((relative_error(array, each) for each in same_shape), default=math.inf)]
    errors = [error for error in errors if error <= _LARGEST]
    if not errors:
        return math.inf
    return min(max(EXACT, _AMPLIFIED * max(errors)), _LARGEST)


def transposed(array: Array, transpose: bool) -> Array:
    """An array, or its transpose."""
    return array.T if transpose else array


class _Original:
    """One original: the facts about it that are in memory, and the function that loads its numbers."""

    def __init__(self, index: int, array: Array, load: Callable[[], Array]) -> None:
        self.index, self.load, self.shape = index, load, array.shape
        self.facts = _facts(array)
        self.std = 0.0
        if np.isfinite(self.facts).all():
            mean, root_mean_square, _ = self.facts
            self.std = math.sqrt(max(root_mean_square**2 - mean**2, 0.0))
        flat = array.reshape(-1)
        places = np.linspace(0, flat.size - 1, min(_PLACES, flat.size)).astype(np.int64)
        self.places = np.unravel_index(places, self.shape)
        self.sample = flat[places].astype(np.float64)

    def sampled(self, numbers: Array) -> float:
        """The estimated relative error of another tensor, by its numbers in the places of the sample."""
        difference = float(np.linalg.norm(numbers.astype(np.float64) - self.sample))
        scale = self.std * math.sqrt(self.sample.size)
        if not math.isfinite(difference) or not scale:
            return 0.0  # infinities: only the whole tensor decides
        return difference / scale


class Originals:
    """Tensors of an original model that can be found by their numbers, up to a relative error.

    Args:
        tolerance: The largest relative error.
        weights: Whether they are weights, which may be scaled, and whose parts may be transposed.
    """

    def __init__(self, tolerance: float = _LARGEST, *, weights: bool = False) -> None:
        self.tolerance = tolerance
        self._weights = weights
        self._by_hash: dict[Hashable, list[_Original]] = {}
        self._by_size: dict[tuple[bool, int], list[_Original]] = {}
        self._by_rank: dict[int, list[_Original]] = {}

    def add(self, index: int, array: Array, load: Callable[[], Array]) -> tuple[int, ...]:
        """Add a distinctive tensor, and return earlier ones with its shape and numbers.

        ``load`` reads it again.
        """
        if not is_distinctive(array):
            return ()
        entry, whole = _Original(index, array, load), _is_whole(array)
        equal = self._by_hash.setdefault((whole, array_hash(array)), [])
        same = tuple(other.index for other in equal if other.shape == entry.shape)
        equal.append(entry)
        if self._weights and array.ndim == 2:
            self._by_hash.setdefault((whole, array_hash(array.T), "transposed"), []).append(entry)
        self._by_size.setdefault((whole, array.size), []).append(entry)
        if not whole or self._weights:
            self._by_rank.setdefault(array.ndim, []).append(entry)
        return same

    def find(self, array: Array) -> NumericMatch | None:
        """The originals with the numbers of an array; None if there is none, or no unique one."""
        if not is_distinctive(array):
            return None
        return self._equal(array) or self._unequal(array)

    # --- as a whole ---

    def _equal(self, array: Array) -> NumericMatch | None:
        """Originals with exactly the same numbers in the same order, or transposed."""
        key = _is_whole(array), array_hash(array)
        equal = self._by_hash.get(key) or self._by_hash.get((*key, "transposed"), [])
        same = [entry for entry in equal if entry.shape == array.shape and key in self._by_hash]
        chosen = tuple(entry.index for entry in same or equal)
        return NumericMatch(chosen, bool(same)) if chosen else None

    def _unequal(self, array: Array) -> NumericMatch | None:
        if _is_whole(array) and not self._weights:
            return None
        near = list(self._near(array, self.tolerance * _MARGIN))
        best = min((error for error, *_ in near), default=math.inf)
        if best <= self.tolerance or (near and not self._weights):
            return self._nearest(array, near, best)
        scaled = self._rescaled(array) if self._weights else None
        return scaled or self._joined(array) or self._cut_out(array)

    def _near(self, array: Array, limit: float) -> Iterator[tuple[float, _Original, bool]]:
        """Find the originals whose relative error is within a limit, in any layout.

        Yields the error, the original, and whether its layout is that of the array.
        """
        entries = self._by_size.get((_is_whole(array), array.size), [])
        mine = _facts(array)
        # Facts do not depend on the layout, and are compared first: this is cheap. The range is
        # much wider than the limit, so that sums in another order exclude no near original.
        tolerated = max(limit, _LEAST_OF_FACTS) * _MARGIN_OF_FACTS
        for entry in entries:
            _, root_mean_square, _ = entry.facts
            size = max(root_mean_square, _SMALLEST)
            if (np.abs(entry.facts - mine) <= tolerated * size).all():
                error, same = _error_in_any_layout(array, entry, limit)
                if error <= limit:
                    yield error, entry, same and entry.shape == array.shape

    def _nearest(
        self, array: Array, near: list[tuple[float, _Original, bool]], best: float
    ) -> NumericMatch | None:
        """The nearest of some originals; None if it is too far away, or another one is nearly as close."""
        if best > self.tolerance:
            return None
        limit = max(EXACT, best * _MARGIN)
        close = [(entry, same) for error, entry, same in near if error <= limit]
        same_shape = [entry for entry, same in close if same]
        chosen = same_shape or [entry for entry, _ in close]
        if best > EXACT and len(close) > 1:
            # The tensor is rounded. Others that are nearly as close must equal the chosen one.
            first = chosen[0].load()
            for entry, _ in close:
                if _error_in_any_layout(first, entry, EXACT)[0] > EXACT:
                    return None
        return NumericMatch(tuple(entry.index for entry in chosen), bool(same_shape), error=best)

    def _rescaled(self, array: Array) -> NumericMatch | None:
        """An original of the same shape, or its transpose, with a factor and an offset."""
        limit = _FITTED if array.size < _FEW else _LARGEST
        fits = []
        for entry in self._by_rank.get(array.ndim, []):
            for transpose in (False, True) if array.ndim == 2 else (False,):
                if entry.shape != (array.shape[::-1] if transpose else array.shape):
                    continue
                numbers = array[entry.places[::-1] if transpose else entry.places]
                sampled_error = _fitted(numbers, entry.sample)[2]
                if sampled_error <= limit * _SAMPLED * _MARGIN:
                    scale, offset, error = _fitted(array, transposed(entry.load(), transpose))
                    fits.append((error, entry.index, not transpose, scale, offset))
        fits.sort(key=lambda fit: fit[0])
        if not fits or fits[0][0] > limit:
            return None
        error, index, same_shape, scale, offset = fits[0]
        too_close = max(EXACT, error * _MARGIN)
        if any(other <= too_close and further != index for other, further, *_ in fits[1:]):
            return None
        return NumericMatch((index,), same_shape, scale=scale, offset=offset, error=error)

    # --- in parts ---

    def _joined(self, array: Array) -> NumericMatch | None:
        """Originals whose concatenation along one axis is the array."""
        for axis in reversed(range(array.ndim)):
            parts, at = list[Part](), 0
            while at < array.shape[axis] and len(parts) < _MOST_PARTS:
                found = min(
                    self._parts_at(array, axis, at), key=lambda part: part.error, default=None
                )
                if found is None:
                    break
                parts.append(found)
                at = found.place[1]
            if len(parts) > 1 and at == array.shape[axis]:
                error = max(part.error for part in parts)
                return NumericMatch(
                    tuple(part.original for part in parts), False, tuple(parts), error=error
                )
        return None

    def _parts_at(self, array: Array, axis: int, at: int) -> Iterator[Part]:
        """Whole originals that the array contains from one index of an axis on."""
        for entry, transpose, size in self._fitting(array.shape, axis):
            stop = at + size
            if size == array.shape[axis] or stop > array.shape[axis]:
                continue
            places = list(entry.places[::-1] if transpose else entry.places)
            places[axis] = places[axis] + at
            if entry.sampled(array[tuple(places)]) <= self.tolerance * _SAMPLED:
                error = relative_error(
                    _cut(array, axis, at, stop), transposed(entry.load(), transpose)
                )
                if error <= self.tolerance:
                    yield Part(entry.index, axis, (at, stop), (0, size), transpose, error)

    def _cut_out(self, array: Array) -> NumericMatch | None:
        """The only original that contains the array as a part."""
        best: dict[int, Part] = {}
        for axis in range(array.ndim):
            size = array.shape[axis]
            for entry, transpose, length in self._fitting(array.shape, axis):
                if length <= size:
                    continue
                original = transposed(entry.load(), transpose)
                for start in _starts(original, array, axis, self.tolerance):
                    error = relative_error(array, _cut(original, axis, start, start + size))
                    limit = self.tolerance
                    if entry.index in best:
                        limit = min(limit, best[entry.index].error)
                    if error <= limit:
                        place, of = (0, size), (start, start + size)
                        best[entry.index] = Part(entry.index, axis, place, of, transpose, error)
        if len(best) != 1:
            return None
        [part] = best.values()
        return NumericMatch((part.original,), False, (part,), error=part.error)

    def _fitting(self, shape: Sequence[int], axis: int) -> Iterator[tuple[_Original, bool, int]]:
        """Originals that have a shape except for one axis: whether transposed, and the size of this axis."""
        others = [k for k in range(len(shape)) if k != axis]
        may_be_transposed = self._weights and len(shape) == 2
        orders = (False, True) if may_be_transposed else (False,)
        for entry in self._by_rank.get(len(shape), []):
            for transpose in orders:
                theirs = entry.shape[::-1] if transpose else entry.shape
                if all(shape[k] == theirs[k] for k in others):
                    yield entry, transpose, theirs[axis]


def _is_whole(array: Array) -> bool:
    """Whether an array has integers."""
    return array.dtype.kind in "iu"


def _facts(array: Array) -> Array:
    """Mean, root mean square and largest absolute number: equal in every layout, without infinities."""
    count = 0
    total = 0.0
    squares = 0.0
    largest = 0.0
    for numbers in _blocks(array):
        sizes = np.abs(numbers)
        is_number = sizes < 1e30  # masks contain the lowest number of a type
        if not is_number.all():
            numbers, sizes = numbers[is_number], sizes[is_number]
        if not numbers.size:
            continue
        count += numbers.size
        total += float(numbers.sum())
        squares += float(numbers @ numbers)
        largest = max(largest, float(sizes.max()))
    if not count:
        return np.full(3, math.inf)
    return np.array([total / count, math.sqrt(squares / count), largest])


def _error_in_any_layout(array: Array, entry: _Original, limit: float) -> tuple[float, bool]:
    """The least relative error in any layout, and whether the elements are in the same order."""
    flat, sampled = array.reshape(-1), min(limit * _SAMPLED, 1.0)
    if entry.sampled(flat[np.ravel_multi_index(entry.places, entry.shape)]) <= sampled:
        error = relative_error(flat, entry.load().reshape(-1))
        if error <= limit:
            return error, True
    if array.ndim < 2 or len(entry.shape) < 2:
        return math.inf, False
    best = math.inf
    axes = range(len(entry.shape)) if len(entry.shape) <= _MOST_AXES else ()
    orders = itertools.permutations(axes)
    for order in itertools.islice(orders, 1, None):  # the first order is the original's own
        shape = [entry.shape[k] for k in order]
        places = np.ravel_multi_index([entry.places[k] for k in order], shape)
        if entry.sampled(flat[places]) <= sampled:
            best = min(best, relative_error(flat, entry.load().transpose(order).reshape(-1)))
    is_matrix = array.ndim == len(entry.shape) == 2
    if best <= limit or array.shape == entry.shape or is_matrix:
        return best, False
    # The layout may combine a transpose and a reshape: compare the sorted numbers.
    error = relative_error(np.sort(flat), np.sort(entry.load(), axis=None))
    is_close = error <= min(limit, _SORTED)
    return (error if is_close else math.inf), False


def _fitted(array: Array, original: Array) -> tuple[float, float, float]:
    """The scale and offset that bring an original closest to an array, and the remaining error."""
    mine = array.astype(np.float64).reshape(-1)
    theirs = original.astype(np.float64).reshape(-1)
    # least squares: covariance divided by variance, of numbers without their mean
    deviations = theirs - theirs.mean()
    variance = float(deviations @ deviations)
    covariance = float((mine - mine.mean()) @ deviations)
    if not variance or covariance <= 0:
        return 1.0, 0.0, math.inf
    scale = covariance / variance
    offset = float(mine.mean() - scale * theirs.mean())
    return scale, offset, relative_error((mine - offset) / scale, theirs)


def _cut(array: Array, axis: int, start: int, stop: int) -> Array:
    """A slice of an array along one axis."""
    return array[(slice(None),) * axis + (slice(start, stop),)]


def _starts(whole: Array, part: Array, axis: int, tolerance: float) -> Iterator[int]:
    """The indices along an axis where a part may begin: its first element is close there."""
    first = _cut(part, axis, 0, 1).astype(np.float64).reshape(-1)
    lines = np.moveaxis(whole, axis, 0).reshape(whole.shape[axis], -1).astype(np.float64)
    distance = np.linalg.norm(lines - first, axis=1)
    limit = max(tolerance, 1e-6) * 4 * max(float(np.linalg.norm(first)), 1e-12)
    for start in np.flatnonzero(distance <= limit):
        if start + part.shape[axis] <= whole.shape[axis]:
            yield int(start)
