"""Numbers of one file among those of another: equal, in another layout, joined, cut out, scaled or rounded.

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
"""Relative error of float32 kernels that sum in other orders."""

_LARGEST = 0.3
"""Relative error beyond which a tensor is another one: four bits for 32 weights give 0.12, random tensors have 1.4."""

_MARGIN = 3.0
"""How many times farther away the next original has to be."""

_AMPLIFIED = 4.0
"""How many times larger the error of a tensor may be than that of the outputs."""

_FEWEST = 4  # different numbers; tensors with fewer, such as masks, are equal by chance
# elements of a sample; the error of two random tensors in a sample is 1.4, and never below 0.9
_PLACES = 128
_SAMPLED = 1.5  # error in a sample, per error of the whole
_MOST_PARTS = 8  # projections that are joined are three, gates of an LSTM four
# relative error of sorted numbers: those of two tensors with one distribution differ by more
_SORTED = 1e-3
_MOST_AXES = 5  # whose permutations are tried
# a fit may bring few numbers near others by chance, and has to be closer for these
_FEW, _FITTED = 256, 0.05


@dataclass(frozen=True)
class Part:
    """A slice of a tensor that is a slice of an original."""

    original: int  # the original
    axis: int  # the axis along which both are cut
    place: tuple[int, int]  # first and last index in the tensor
    of: tuple[int, int]  # the same in the original, or in its transpose if ``transposed``
    transposed: bool = False  # whether the slice is one of the transpose
    error: float = 0.0  # the relative error


@dataclass(frozen=True)
class NumericMatch:
    """The originals that have the numbers of one tensor."""

    # they are all equal to it; or, if it is ``joined``, its parts, in order
    originals: tuple[int, ...]
    same_shape: bool = True  # whether they have its shape and its order of elements
    parts: tuple[Part, ...] = ()  # what it is made of, if it is not the whole of an original
    scale: float = 1.0  # what the original was multiplied with
    offset: float = 0.0  # what was added to that
    error: float = 0.0  # the relative error

    @property
    def joined(self) -> bool:
        """Whether it is the concatenation of several."""
        return len(self.parts) > 1


def relative_error(array: Array, original: Array) -> float:
    """The norm of a difference over that of the original without its mean; infinite where one is not finite."""
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
    return (
        difference / scale
        if scale and math.isfinite(difference)
        else (0.0 if not difference else math.inf)
    )


def is_distinctive(array: Array) -> bool:
    """Whether an array has so many different numbers that another one is not equal by chance."""
    if array.size < _FEWEST or array.dtype.kind in "OUScb":
        return False
    flat = array.reshape(-1)
    return (
        len(np.unique(flat[:: max(1, flat.size // _PLACES)])) >= _FEWEST
        or len(np.unique(flat)) >= _FEWEST
    )


def largest_error(
    outputs: Iterable[tuple[Array, Sequence[Array]]], find: Callable[[Array], NumericMatch | None]
) -> float:
    """The tolerance for tensors of two files, by the errors of their outputs; infinite if no output is recognised.

    ``outputs``: Output, and the outputs of the original. ``find``: Recognises a tensor with the
    largest tolerance.
    """
    errors = []
    for array, originals in outputs:
        if is_distinctive(array):
            like = find(array)
            errors += [] if like is None else [like.error]
        else:  # outputs with few numbers are compared with outputs only
            same = [each for each in originals if each.shape == array.shape and array.size > 1]
            errors += [min((relative_error(array, each) for each in same), default=math.inf)]
    errors = [error for error in errors if error <= _LARGEST]
    return min(max(EXACT, _AMPLIFIED * max(errors)), _LARGEST) if errors else math.inf


def transposed(array: Array, transpose: bool) -> Array:
    """An array, or its transpose."""
    return array.T if transpose else array


class _Original:
    """One original: what is kept of it in memory, and how its numbers are read."""

    def __init__(self, index: int, array: Array, load: Callable[[], Array]) -> None:
        self.index, self.load, self.shape = index, load, array.shape
        self.facts = _facts(array)
        self.std = (
            math.sqrt(max(self.facts[1] ** 2 - self.facts[0] ** 2, 0.0))
            if np.isfinite(self.facts).all()
            else 0
        )
        flat = array.reshape(-1)
        places = np.linspace(0, flat.size - 1, min(_PLACES, flat.size)).astype(np.int64)
        self.places = np.unravel_index(places, self.shape)
        self.sample = flat[places].astype(np.float64)

    def sampled(self, numbers: Array) -> float:
        """The relative error, estimated from what another tensor has in the places of the sample."""
        difference = float(np.linalg.norm(numbers.astype(np.float64) - self.sample))
        scale = self.std * math.sqrt(self.sample.size)
        if not math.isfinite(difference) or not scale:
            return 0.0  # infinities: only the whole tells
        return difference / scale


class Originals:
    """The tensors of an original model that can be recognised by their numbers, up to a relative error.

    ``weights``: Whether they are weights: which may be scaled, and whose parts may be transposed.
    """

    def __init__(self, tolerance: float = _LARGEST, *, weights: bool = False) -> None:
        self.tolerance = tolerance
        self._weights = weights
        self._by_hash: dict[Hashable, list[_Original]] = {}
        self._by_size: dict[tuple[bool, int], list[_Original]] = {}
        self._by_rank: dict[int, list[_Original]] = {}

    def add(self, index: int, array: Array, load: Callable[[], Array]) -> tuple[int, ...]:
        """Add a distinctive tensor, which ``load`` reads again; return earlier ones with its shape and numbers."""
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
        """The originals with the numbers of an array; None if there are none, or it is not clear which."""
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
        scaled = self._scaled(array) if self._weights else None
        return scaled or self._joined(array) or self._cut_out(array)

    def _near(self, array: Array, limit: float) -> Iterator[tuple[float, _Original, bool]]:
        """Originals near an array in any layout: their errors, and whether the layout is the same."""
        entries = self._by_size.get((_is_whole(array), array.size), [])
        mine, scale = _facts(array), max(limit, 1e-3) * 4
        for entry in entries:
            if (np.abs(entry.facts - mine) <= scale * max(entry.facts[1], 1e-30)).all():
                error, same = _error_in_any_layout(array, entry, limit)
                if error <= limit:
                    yield error, entry, same and entry.shape == array.shape

    def _nearest(
        self, array: Array, near: list[tuple[float, _Original, bool]], best: float
    ) -> NumericMatch | None:
        if best > self.tolerance:
            return None
        limit = max(EXACT, best * _MARGIN)
        close = [(entry, same) for error, entry, same in near if error <= limit]
        same_shape = [entry for entry, same in close if same]
        chosen = same_shape or [entry for entry, _ in close]
        # rounded: others that are nearly as close must be the same tensor
        if best > EXACT and len(close) > 1:
            first = chosen[0].load()
            if any(_error_in_any_layout(first, entry, EXACT)[0] > EXACT for entry, _ in close):
                return None
        return NumericMatch(tuple(entry.index for entry in chosen), bool(same_shape), error=best)

    def _scaled(self, array: Array) -> NumericMatch | None:
        """An original of the same shape, or its transpose, times one number, plus another."""
        found = []
        limit = _FITTED if array.size < _FEW else _LARGEST
        for entry in self._by_rank.get(array.ndim, []):
            for transpose in (False, True) if array.ndim == 2 else (False,):
                if entry.shape != (array.shape[::-1] if transpose else array.shape):
                    continue
                numbers = array[entry.places[::-1] if transpose else entry.places]
                if _fitted(numbers, entry.sample)[2] <= limit * _SAMPLED * _MARGIN:
                    scale, offset, error = _fitted(array, transposed(entry.load(), transpose))
                    found.append((error, entry.index, not transpose, scale, offset))
        found.sort(key=lambda fit: fit[0])
        if not found or found[0][0] > limit:
            return None
        error, index, same_shape, scale, offset = found[0]
        if any(
            other <= max(EXACT, error * _MARGIN) and further != index
            for other, further, *_ in found[1:]
        ):
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
        """Whole originals that the array holds from one place on."""
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
        """The one original that the array is a part of."""
        found: dict[int, Part] = {}
        for axis in range(array.ndim):
            size = array.shape[axis]
            for entry, transpose, length in self._fitting(array.shape, axis):
                original = transposed(entry.load(), transpose) if length > size else array
                for start in (
                    _starts(original, array, axis, self.tolerance) if length > size else ()
                ):
                    error = relative_error(array, _cut(original, axis, start, start + size))
                    if error <= min(
                        self.tolerance,
                        found[entry.index].error if entry.index in found else math.inf,
                    ):
                        place, of = (0, size), (start, start + size)
                        found[entry.index] = Part(entry.index, axis, place, of, transpose, error)
        if len(found) != 1:
            return None
        [part] = found.values()
        return NumericMatch((part.original,), False, (part,), error=part.error)

    def _fitting(self, shape: Sequence[int], axis: int) -> Iterator[tuple[_Original, bool, int]]:
        """Originals that have a shape but for one axis: whether transposed, and their size along that axis."""
        for entry in self._by_rank.get(len(shape), []):
            for transpose in (False, True) if self._weights and len(shape) == 2 else (False,):
                theirs = entry.shape[::-1] if transpose else entry.shape
                if all(
                    one == two
                    for k, (one, two) in enumerate(zip(shape, theirs, strict=True))
                    if k != axis
                ):
                    yield entry, transpose, theirs[axis]


def _is_whole(array: Array) -> bool:
    return array.dtype.kind in "iu"


def _facts(array: Array) -> Array:
    """Numbers that are the same in every layout: mean, root mean square and largest of what is finite, and no mask."""
    numbers = array.reshape(-1).astype(np.float64)
    numbers = numbers[np.abs(numbers) < 1e30]  # masks hold the lowest number of a type
    if not numbers.size:
        return np.full(3, math.inf)
    return np.array([numbers.mean(), math.sqrt(np.square(numbers).mean()), np.abs(numbers).max()])


def _error_in_any_layout(array: Array, entry: _Original, limit: float) -> tuple[float, bool]:
    """The least relative error in any layout, and whether the elements are in the same order."""
    flat, sampled = array.reshape(-1), min(limit * _SAMPLED, 1.0)
    if entry.sampled(flat[np.ravel_multi_index(entry.places, entry.shape)]) <= sampled:
        error = relative_error(flat, entry.load().reshape(-1))
        if error <= limit:
            return error, True
    if array.ndim < 2 or len(entry.shape) < 2:
        return math.inf, False
    axes = range(len(entry.shape)) if len(entry.shape) <= _MOST_AXES else ()
    best = math.inf
    for order in itertools.islice(itertools.permutations(axes), 1, None):
        places = np.ravel_multi_index(
            [entry.places[k] for k in order], [entry.shape[k] for k in order]
        )
        if entry.sampled(flat[places]) <= sampled:
            best = min(best, relative_error(flat, entry.load().transpose(order).reshape(-1)))
    if best <= limit or array.shape == entry.shape or (array.ndim == len(entry.shape) == 2):
        return best, False
    error = relative_error(np.sort(flat), np.sort(entry.load(), axis=None))
    return (error if error <= min(limit, _SORTED) else math.inf), False


def _fitted(array: Array, original: Array) -> tuple[float, float, float]:
    """The scale and offset with which an original is nearest to an array, and the error that is left."""
    mine, theirs = array.astype(np.float64).reshape(-1), original.astype(np.float64).reshape(-1)
    centred, theirs_centred = mine - mine.mean(), theirs - theirs.mean()
    power, both = float(theirs_centred @ theirs_centred), float(centred @ theirs_centred)
    if not power or both <= 0:
        return 1.0, 0.0, math.inf
    scale = both / power
    offset = float(mine.mean() - scale * theirs.mean())
    return scale, offset, relative_error((mine - offset) / scale, theirs)


def _cut(array: Array, axis: int, start: int, stop: int) -> Array:
    return array[(slice(None),) * axis + (slice(start, stop),)]


def _starts(whole: Array, part: Array, axis: int, tolerance: float) -> Iterator[int]:
    """Where a part may begin: its first element there is near."""
    first = _cut(part, axis, 0, 1).astype(np.float64).reshape(-1)
    lines = np.moveaxis(whole, axis, 0).reshape(whole.shape[axis], -1).astype(np.float64)
    distance = np.linalg.norm(lines - first, axis=1)
    limit = max(tolerance, 1e-6) * 4 * max(float(np.linalg.norm(first)), 1e-12)
    yield from (
        int(at)
        for at in np.flatnonzero(distance <= limit)
        if at + part.shape[axis] <= whole.shape[axis]
    )
