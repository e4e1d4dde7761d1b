"""Weights of a file that are those of the original: cast, transposed, reshaped, joined, cut, scaled or quantized.

One weight is loaded at a time. What is kept of the others is a sketch: a few numbers, and the means of rows and
columns, by which candidates are found; these are then compared in full.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from htp_export.provenance.adoption.near_values import is_distinctive, relative_error
from htp_export.runtime.arrays import Array

__all__ = ["Block", "OriginalWeights", "SameWeight", "replaced"]

_LARGEST = 0.3
"""Relative error of a quantized weight at most: four bits for 32 numbers give 0.12, other weights 1.4."""

_FITTED = 0.05  # relative error of a few numbers after a fit, which may bring any two near each other
_MANY = 256
_MARGIN = 3.0
_EQUAL = 1e-6
_SKETCHED = 0.6  # relative error of the means of rows and columns, before weights are compared in full
_WINDOW = 16  # rows by which the place of a part is found
_MOST_PARTS = 8

Load = Callable[[], Array]


@dataclass(frozen=True)
class Block:
    """Rows of a weight that are rows of an original one.

    Attributes:
        original: The original weight.
        rows: The first and last row in the weight, or in its transpose if ``turned``.
        of: The same rows in the original, or in its transpose if ``of_turned``.
        turned: Whether rows are columns in the weight.
        of_turned: Whether rows are columns in the original.
        error: The relative error.
    """

    original: int
    rows: tuple[int, int]
    of: tuple[int, int]
    turned: bool
    of_turned: bool
    error: float


@dataclass(frozen=True)
class SameWeight:
    """The original weights that a weight stands for.

    Attributes:
        originals: They are all equal to it; or, if there are several ``blocks``, its parts.
        same_shape: Whether they have its shape.
        blocks: Its rows, in order; empty if it is the whole of each original.
        scale: What the original was multiplied with.
        offset: What was added to that.
        error: The relative error.
    """

    originals: tuple[int, ...]
    same_shape: bool
    blocks: tuple[Block, ...] = ()
    scale: float = 1.0
    offset: float = 0.0
    error: float = 0.0


@dataclass(frozen=True)
class _Sketch:
    shape: tuple[int, ...]
    facts: Array
    means: tuple[Array, ...]  # of rows and of columns


@dataclass
class OriginalWeights:
    """The weights of the original model.

    Attributes:
        load: Original weight → its numbers.
    """

    load: Mapping[int, Load]
    _sketches: dict[int, _Sketch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index, load in self.load.items():
            array = load()
            if is_distinctive(array):
                self._sketches[index] = _sketch(array)

    def find(self, array: Array) -> SameWeight | None:
        """The originals that a weight stands for; None if there are none, or it is not clear which."""
        if not is_distinctive(array):
            return None
        mine = _sketch(array)
        return self._whole(array, mine) or self._scaled(array) or self._in_rows(array, mine)

    # --- as a whole ---

    def _whole(self, array: Array, mine: _Sketch) -> SameWeight | None:
        near = []
        for index, sketch in self._sketches.items():
            if math.prod(sketch.shape) != array.size or not _alike(mine.facts, sketch.facts):
                continue
            error, same_shape = _error_of_whole(array, self.load[index]())
            if error <= _LARGEST * _MARGIN:
                near.append((error, index, same_shape))
        return _unambiguous(near)

    def _scaled(self, array: Array) -> SameWeight | None:
        """An original of the same shape, or its transpose, times one number, plus another."""
        found = []
        for index, sketch in self._sketches.items():
            if sketch.shape not in (array.shape, array.shape[::-1]):
                continue
            original = self.load[index]()
            for same_shape, turned in ((True, original), (False, original.T)):
                if turned.shape == array.shape and (same_shape or array.ndim == 2):
                    scale, offset, error = _fitted(array, turned)
                    if scale > 0 and error <= (_FITTED if array.size < _MANY else _LARGEST):
                        found.append((error, index, same_shape, scale, offset))
        if not found:
            return None
        found.sort(key=lambda entry: entry[0])
        error, index, same_shape, scale, offset = found[0]
        if any(other <= max(_EQUAL, error * _MARGIN) and further != index for other, further, *_ in found[1:]):
            return None
        return SameWeight((index,), same_shape, scale=scale, offset=offset, error=error)

    # --- in parts ---

    def _in_rows(self, array: Array, mine: _Sketch) -> SameWeight | None:
        if array.ndim > 2:
            return None
        matrix = array.reshape(array.shape[0], -1)
        for turned in (False, True) if array.ndim == 2 else (False,):
            rows = matrix.T if turned else matrix
            means = mine.means[1 if turned else 0]
            blocks = self._blocks(rows, means, turned)
            if blocks:
                originals = tuple(dict.fromkeys(block.original for block in blocks))
                return SameWeight(originals, False, blocks, error=max(block.error for block in blocks))
        return None

    def _blocks(self, rows: Array, means: Array, turned: bool) -> tuple[Block, ...]:
        """Originals that follow each other in the rows of a weight; or the part of one that they all are."""
        blocks, at = list[Block](), 0
        while at < len(rows) and len(blocks) < _MOST_PARTS:
            best: Block | None = None
            for candidate in self._candidates(rows, means, at, turned):
                if best is None or candidate.error < best.error:
                    best = candidate
            if best is None:
                break
            blocks.append(best)
            at = best.rows[1]
        if at == len(rows) and len(blocks) > 1:
            return tuple(blocks)
        part = list(self._inside(rows, means, turned))
        return (part[0],) if len(part) == 1 else ()

    def _candidates(self, rows: Array, means: Array, at: int, turned: bool) -> Iterator[Block]:
        for index, of_turned, length, theirs in self._with_rows_of(rows.shape[1]):
            stop = at + length
            if stop > len(rows) or relative_error(means[at:stop], theirs) > _SKETCHED:
                continue
            original = _rows(self.load[index](), of_turned)
            error = relative_error(rows[at:stop], original)
            if error <= _LARGEST:
                yield Block(index, (at, stop), (0, length), turned, of_turned, error)

    def _inside(self, rows: Array, means: Array, turned: bool) -> Iterator[Block]:
        count = len(rows)
        for index, of_turned, length, theirs in self._with_rows_of(rows.shape[1]):
            if length <= count:
                continue
            width = min(_WINDOW, count)
            windows = np.lib.stride_tricks.sliding_window_view(theirs, width)[: length - count + 1]
            distance = np.linalg.norm(windows - means[:width], axis=1)
            start = int(distance.argmin())
            original = _rows(self.load[index](), of_turned)[start : start + count]
            error = relative_error(rows, original)
            if error <= _LARGEST:
                yield Block(index, (0, count), (start, start + count), turned, of_turned, error)

    def _with_rows_of(self, columns: int) -> Iterator[tuple[int, bool, int, Array]]:
        for index, sketch in self._sketches.items():
            if len(sketch.shape) == 1 and columns == 1:
                yield index, False, sketch.shape[0], sketch.means[0]
            elif len(sketch.shape) == 2:
                if sketch.shape[1] == columns:
                    yield index, False, sketch.shape[0], sketch.means[0]
                if sketch.shape[0] == columns:
                    yield index, True, sketch.shape[1], sketch.means[1]


def replaced(original: Array, index: int, uses: list[tuple[SameWeight, Array]]) -> Array | None:
    """An original weight with the numbers that the other file has in its place; None if it has not all of them.

    Args:
        original: The original weight.
        index: What it is called in blocks.
        uses: Weights that stand for it, each with its numbers.
    """
    for same, array in uses:
        if not same.blocks:
            numbers = (array.astype(np.float32) - same.offset) / same.scale
            if array.shape == original.shape and same.same_shape:
                return numbers.astype(original.dtype)
            if array.ndim == 2 and array.shape == original.shape[::-1]:
                turned = np.ascontiguousarray(numbers.T.astype(original.dtype))
                if relative_error(turned, original) <= _LARGEST:
                    return turned
            return numbers.reshape(original.shape).astype(original.dtype)
    rows: dict[bool, Array] = {}
    for same, array in uses:
        for block in same.blocks:
            if block.original != index:
                continue
            filled = rows.setdefault(
                block.of_turned, np.full(_rows(original, block.of_turned).shape, np.nan, np.float32)
            )
            source = _rows(array, block.turned)
            filled[slice(*block.of)] = source[slice(*block.rows)]
    for of_turned, filled in rows.items():
        if not np.isnan(filled).any():
            turned = filled.T if of_turned else filled
            return np.ascontiguousarray(turned.reshape(original.shape).astype(original.dtype))
    return None


def _rows(array: Array, turned: bool) -> Array:
    matrix = array.reshape(array.shape[0], -1)
    return matrix.T if turned else matrix


def _sketch(array: Array) -> _Sketch:
    numbers = array.astype(np.float32) if array.dtype.itemsize < 4 or array.dtype.kind in "iu" else array
    mean, rms = float(numbers.mean(dtype=np.float64)), math.sqrt(float(np.square(numbers).mean(dtype=np.float64)))
    facts = np.array([mean, rms, float(np.abs(numbers).max())])
    means: tuple[Array, ...] = ()
    if array.ndim == 1:
        means = (numbers.astype(np.float64),)
    elif array.ndim == 2:
        means = (numbers.mean(axis=1, dtype=np.float64), numbers.mean(axis=0, dtype=np.float64))
    return _Sketch(array.shape, facts, means)


def _alike(facts: Array, others: Array) -> bool:
    return bool((np.abs(facts - others) <= 0.5 * max(float(others[1]), 1e-30) + 0.25 * np.abs(others)).all())


def _error_of_whole(array: Array, original: Array) -> tuple[float, bool]:
    """The least relative error in any layout, and whether it is in the original one."""
    if array.shape == original.shape:
        error = relative_error(array, original)
        if error <= _LARGEST:
            return error, True
    if array.ndim == 2 and array.shape == original.shape[::-1]:
        error = relative_error(array.T, original)
        if error <= _LARGEST:
            return error, False
    error = relative_error(array.reshape(-1), original.reshape(-1))
    if error > _LARGEST and array.ndim > 2 and array.ndim == original.ndim:
        error = relative_error(np.sort(array, axis=None), np.sort(original, axis=None))
        error = error if error <= 1e-3 else math.inf  # sorted numbers of one distribution are similar
    return error, False


def _unambiguous(near: list[tuple[float, int, bool]]) -> SameWeight | None:
    if not near:
        return None
    best = min(error for error, *_ in near)
    if best > _LARGEST:
        return None
    close = [entry for entry in near if entry[0] <= max(_EQUAL, best * _MARGIN)]
    if best > _EQUAL and any(error - best > _EQUAL for error, *_ in close):
        return None  # others are nearly as close, and not equal to it
    same_shape = [entry for entry in close if entry[2]]
    others = [entry for entry in close if not entry[2]]
    return SameWeight(tuple(index for _, index, _ in same_shape + others), bool(same_shape), error=best)


def _fitted(array: Array, original: Array) -> tuple[float, float, float]:
    """The scale and offset with which an original is nearest to an array, and the error that is left."""
    mine, theirs = array.astype(np.float64).reshape(-1), original.astype(np.float64).reshape(-1)
    centred, theirs_centred = mine - mine.mean(), theirs - theirs.mean()
    power = float(theirs_centred @ theirs_centred)
    if not power or not float(centred @ centred):
        return 0.0, 0.0, math.inf
    scale = float(centred @ theirs_centred) / power
    if scale <= 0:
        return scale, 0.0, math.inf
    offset = float(mine.mean() - scale * theirs.mean())
    return scale, offset, relative_error((mine - offset) / scale, theirs)
