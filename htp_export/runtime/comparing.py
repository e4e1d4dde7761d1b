"""Differences between two arrays, and whether they are within a tolerance for rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_BLOCK = 1 << 20  # elements that are converted to double precision at a time: 8 MB
# the minimum of a tensor's scale: the error of a sum that cancels is that of its terms
_SMALLEST_SCALE = 0.1


@dataclass(frozen=True)
class Tolerance:
    """A tolerance: elements agree within ``absolute * scale + relative * abs(expected)``.

    ``scale`` is the root mean square of the expected tensor, at least 0.1: kernels sum in other
    orders, and where large terms cancel, the error is that of the terms and not of the sum.
    """

    absolute: float
    relative: float


TOLERANCES: Mapping[str, Tolerance] = {
    "float64": Tolerance(1e-9, 1e-8),
    "float32": Tolerance(1e-4, 1e-4),
    "float16": Tolerance(1e-2, 1e-2),
    "bfloat16": Tolerance(5e-2, 5e-2),
    "complex64": Tolerance(1e-4, 1e-4),
    "complex128": Tolerance(1e-9, 1e-8),
}
"""Dtype → default tolerance. Tensors of other dtypes must be equal."""

# bits of the significand
_DIGITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}


@dataclass(frozen=True)
class Difference:
    """The difference between a tensor and its expected values.

    If no element is finite in both tensors, and they agree, nothing can be compared: the numbers
    are NaN.

    Attributes:
        max_abs: The largest difference of two elements; NaN if shapes or dtypes differ, or if one
            element is NaN and the other is not; infinite if one of them is.
        mean_abs: The mean of the differences.
        max_rel: The largest relative difference, over expected elements that are not zero.
        mean_rel: The mean relative difference.
        cosine: Cosine of the angle between the tensors, over elements that are finite in both; NaN
            if one tensor is zero, or there are no such elements.
        problem: A description of the difference for users; ``""`` if the tensors agree.
        note: A conversion before the comparison, for users; usually ``""``.
        excess: The largest difference of two elements in units of its tolerance: up to 1, they
            agree.
        comparable: Whether the tensors have the same shape, and dtypes that can be compared.
        nan: The number of elements that are NaN in both tensors, which cannot be compared.
        infinite: The number of elements that are the same infinity in both tensors.
        nan_sides: The number of elements that are NaN in the expected tensor only, and in the other
            one only.
        infinite_sides: The number of elements that are infinite in the expected tensor and finite
            in the other one, and the other way around.
        size: The number of elements of each tensor.
    """

    max_abs: float
    mean_abs: float
    max_rel: float
    mean_rel: float
    cosine: float
    problem: str = ""
    note: str = ""
    excess: float = 0.0
    comparable: bool = True
    nan: int = 0
    infinite: int = 0
    nan_sides: tuple[int, int] = (0, 0)
    infinite_sides: tuple[int, int] = (0, 0)
    size: int = 0

    @property
    def agrees(self) -> bool:
        """Whether all elements are within the tolerance."""
        return not self.problem

    @property
    def has_numbers(self) -> bool:
        """Whether elements were compared; False, too, if the tensors agree and none is finite."""
        return bool(self.problem) or not math.isnan(self.max_abs)


_NAN = float("nan")


def difference(
    expected: Array,
    actual: Array,
    tolerance: Tolerance | None = None,
    computed_in: Iterable[str] = (),
) -> Difference:
    """Compare two arrays, element by element, without broadcasting.

    NaN only agrees with NaN, and an infinity with the same infinity. Floats of different precisions
    are compared in double precision, with the tolerance of the lowest precision, and with a note.
    ``computed_in``: further dtypes in which one of the arrays was computed. The default tolerance
    is that of ``TOLERANCES`` for the dtype.

    Examples:
        >>> difference(np.float32([1, np.nan, np.inf]), np.float32([1, np.nan, np.inf])).agrees
        True
        >>> difference(np.float32([1, np.nan]), np.float32([1, 2])).problem
        '1 of 2 elements are NaN on one side only'
        >>> difference(np.float32([np.inf]), np.float32([np.inf])).cosine
        nan
    """
    if expected.shape != actual.shape:
        return _incomparable(f"shape {list(actual.shape)}, not {list(expected.shape)}")
    note, dtype = "", str(expected.dtype)
    if dtype in _DIGITS and str(actual.dtype) in _DIGITS:
        dtype = min(dtype, str(actual.dtype), *computed_in, key=_DIGITS.__getitem__)
        # with equal dtypes, it was computed in another one and cast
        other = dtype if expected.dtype == actual.dtype else str(actual.dtype)
        if other != str(expected.dtype):
            note = f"{other} against {expected.dtype}, with the tolerance of {dtype}"
    elif expected.dtype != actual.dtype:
        return _incomparable(f"dtype {actual.dtype}, not {expected.dtype}")
    if expected.dtype.kind not in "biufcV":  # strings
        unequal = int(np.count_nonzero(expected != actual))
        if not unequal:
            return _EQUAL
        problem = f"{unequal} of {expected.size} elements differ"
        return replace(_incomparable(problem), comparable=True)
    allowed = tolerance or TOLERANCES.get(dtype, Tolerance(0.0, 0.0))
    sums = _Sums(allowed, _scale(expected))
    expected_flat, actual_flat = expected.reshape(-1), actual.reshape(-1)
    for start in range(0, expected_flat.size, _BLOCK):
        sums.add(expected_flat[start : start + _BLOCK], actual_flat[start : start + _BLOCK])
    return sums.result(note)


def _incomparable(problem: str) -> Difference:
    return Difference(_NAN, _NAN, _NAN, _NAN, _NAN, problem, excess=float("inf"), comparable=False)


_EQUAL = Difference(0.0, 0.0, 0.0, 0.0, 1.0)


def _wide(array: Array) -> Array:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _scale(expected: Array) -> float:
    """Return the root mean square of the finite elements, but at least `_SMALLEST_SCALE`."""
    total, count, flat = 0.0, 0, expected.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        block = np.abs(_wide(flat[start : start + _BLOCK]))
        finite = np.isfinite(block)
        if not finite.all():
            block = block[finite]
        total += float(np.square(block).sum())
        count += block.size
    return max(_SMALLEST_SCALE, (total / count) ** 0.5) if count else 1.0


class _Sums:
    """Sums over the blocks of two arrays; without BLAS, whose threads would compete with those of torch."""

    def __init__(self, tolerance: Tolerance, scale: float) -> None:
        self._tolerance, self._scale = tolerance, scale
        # numbers of elements: all, finite on both sides, outside the tolerance, not zero
        self._count = self._finite = self._outside = self._nonzero = 0
        # NaN on both sides, the same infinity on both sides
        self._nan = self._infinite = 0
        # on the expected side only, and on the other side only
        self._nan_sides = [0, 0]
        self._infinite_sides = [0, 0]
        self._max_abs = self._sum_abs = self._max_rel = self._sum_rel = self._excess = 0.0
        # the dot product of the tensors, and their squared lengths
        self._dot = self._one = self._other = 0.0

    def add(self, expected: Array, actual: Array) -> None:
        expected_wide, actual_wide = _wide(expected), _wide(actual)
        finite = np.isfinite(expected_wide) & np.isfinite(actual_wide)
        self._count += expected_wide.size
        if not finite.all():
            self._add_not_finite(expected_wide[~finite], actual_wide[~finite])
            expected_wide, actual_wide = expected_wide[finite], actual_wide[finite]
            expected, actual = expected[finite], actual[finite]
        if not expected_wide.size:
            return
        self._finite += expected_wide.size
        distance, size = np.abs(expected_wide - actual_wide), np.abs(expected_wide)
        # integers are compared as they are: double precision has only 53 bits
        if self._tolerance == Tolerance(0.0, 0.0):
            self._outside += int(np.count_nonzero(expected != actual))
        else:
            limit = self._tolerance.absolute * self._scale + self._tolerance.relative * size
            self._outside += int(np.count_nonzero(distance > limit))
            without_limit = np.where(distance > 0, np.inf, 0.0)
            excess = np.divide(distance, limit, out=without_limit, where=limit > 0)
            self._excess = max(self._excess, float(excess.max()))
        self._max_abs = max(self._max_abs, float(distance.max()))
        self._sum_abs += float(distance.sum())
        nonzero = size > 0
        relative = distance[nonzero] / size[nonzero]
        self._nonzero += relative.size
        self._max_rel = max(self._max_rel, float(relative.max(initial=0.0)))
        self._sum_rel += float(relative.sum())
        self._dot += float(np.real(expected_wide * actual_wide.conj()).sum())
        self._one += float(np.square(size).sum())
        self._other += float(np.square(np.abs(actual_wide)).sum())

    def _add_not_finite(self, expected: Array, actual: Array) -> None:
        """Add elements that are not finite in at least one array."""
        expected_nan, actual_nan = np.isnan(expected), np.isnan(actual)
        self._nan += int(np.count_nonzero(expected_nan & actual_nan))
        self._nan_sides[0] += int(np.count_nonzero(expected_nan & ~actual_nan))
        self._nan_sides[1] += int(np.count_nonzero(actual_nan & ~expected_nan))
        numbers = ~expected_nan & ~actual_nan
        expected, actual = expected[numbers], actual[numbers]
        equal = expected == actual
        self._infinite += int(np.count_nonzero(equal))
        self._infinite_sides[0] += int(np.count_nonzero(np.isfinite(actual)))
        self._infinite_sides[1] += int(np.count_nonzero(np.isfinite(expected)))
        if not equal.all():
            self._outside += int(np.count_nonzero(~equal))
            self._max_abs = self._sum_abs = self._max_rel = self._sum_rel = float("inf")

    def result(self, note: str) -> Difference:
        problem = ""
        strays, infinite = sum(self._nan_sides), sum(self._infinite_sides)
        if strays:
            problem = f"{strays} of {self._count} elements are NaN on one side only"
        elif infinite:
            problem = f"{infinite} of {self._count} elements are infinite on one side only"
        elif self._outside:
            problem = f"{self._outside} of {self._count} elements differ"
        nothing_compared = self._count and not self._finite and not problem
        if strays or nothing_compared:
            self._max_abs = self._sum_abs = self._max_rel = self._sum_rel = _NAN
        excess = self._excess
        # elements that are not finite have no excess of their own
        if strays or infinite or (problem and excess <= 1):
            excess = float("inf")
        return Difference(
            self._max_abs,
            self._sum_abs / max(self._count, 1),
            self._max_rel,
            self._sum_rel / max(self._nonzero, 1),
            self._cosine(),
            problem,
            note,
            excess,
            nan=self._nan,
            infinite=self._infinite,
            nan_sides=(self._nan_sides[0], self._nan_sides[1]),
            infinite_sides=(self._infinite_sides[0], self._infinite_sides[1]),
            size=self._count,
        )

    def _cosine(self) -> float:
        if self._count and not self._finite:
            return _NAN
        lengths = (self._one * self._other) ** 0.5
        if lengths:
            cosine = float(self._dot / lengths)
            return min(1.0, cosine) if not math.isnan(cosine) else cosine
        both_are_zero = not (self._one or self._other)
        return 1.0 if both_are_zero else _NAN
