"""Differences between two arrays, and whether they are within a tolerance for rounding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_BLOCK = 1 << 20  # elements that are held in double precision at a time
# of a tensor: sums that cancel are as far off as the numbers that they were made of
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
"""Dtype → what may differ where nothing else is asked for. Tensors of other dtypes have to be equal."""

_DIGITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}


@dataclass(frozen=True)
class Difference:
    """The difference between a tensor and its expected values.

    Attributes:
        max_abs: The largest difference of two elements; NaN where shapes or dtypes differ, or where
            one element is NaN and the other is not; infinite where one of them is.
        mean_abs: The mean of the differences.
        max_rel: The largest relative difference, over expected elements that are not zero.
        mean_rel: The mean relative difference.
        cosine: Cosine of the angle between the tensors, over elements that are finite in both; NaN
            where one is zero.
        problem: What is wrong, for a person; ``""`` where the tensors agree.
        note: What was done to be able to compare; ``""`` as a rule.
        excess: The largest difference of two elements in units of what may differ: up to 1, they
            agree.
        comparable: Whether the tensors have the same shape, and dtypes that can be compared.
        nan: Elements that are NaN on both sides; nothing is known of them.
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

    @property
    def agrees(self) -> bool:
        """Whether all elements are within the tolerance."""
        return not self.problem


_NAN = float("nan")


def difference(
    expected: Array,
    actual: Array,
    tolerance: Tolerance | None = None,
    computed_in: Iterable[str] = (),
) -> Difference:
    """Compare two arrays, element by element, without broadcasting.

    NaN only agrees with NaN, and an infinity with the same infinity. Floats of different widths are
    compared in double precision, with the tolerance of the narrowest one, also of those that one of
    the arrays was computed in, and with a note. Without a tolerance, that of ``TOLERANCES`` for the
    dtype counts.

    Examples:
        >>> difference(np.float32([1, np.nan, np.inf]), np.float32([1, np.nan, np.inf])).agrees
        True
        >>> difference(np.float32([1, np.nan]), np.float32([1, 2])).problem
        '1 of 2 elements are NaN on one side only'
    """
    if expected.shape != actual.shape:
        return _incomparable(f"shape {list(actual.shape)}, not {list(expected.shape)}")
    note, dtype = "", str(expected.dtype)
    if dtype in _DIGITS and str(actual.dtype) in _DIGITS:
        dtype = min(dtype, str(actual.dtype), *computed_in, key=_DIGITS.__getitem__)
        # computed in it, and cast
        other = dtype if expected.dtype == actual.dtype else str(actual.dtype)
        if other != str(expected.dtype):
            note = f"{other} against {expected.dtype}, with the tolerance of {dtype}"
    elif expected.dtype != actual.dtype:
        return _incomparable(f"dtype {actual.dtype}, not {expected.dtype}")
    allowed = tolerance or TOLERANCES.get(dtype, Tolerance(0.0, 0.0))
    if expected.dtype.kind not in "biufcV":  # text: equal or not
        unequal = int(np.count_nonzero(expected != actual))
        problem = f"{unequal} of {expected.size} elements differ"
        return replace(_incomparable(problem), comparable=True) if unequal else _EQUAL
    sums = _Sums(allowed, _scale(expected))
    expected_flat, found_flat = expected.reshape(-1), actual.reshape(-1)
    for start in range(0, expected_flat.size, _BLOCK):
        sums.add(expected_flat[start : start + _BLOCK], found_flat[start : start + _BLOCK])
    return sums.result(note)


def _incomparable(problem: str) -> Difference:
    return Difference(_NAN, _NAN, _NAN, _NAN, _NAN, problem, excess=float("inf"), comparable=False)


_EQUAL = Difference(0.0, 0.0, 0.0, 0.0, 1.0)


def _wide(array: Array) -> Array:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _scale(expected: Array) -> float:
    total, count, flat = 0.0, 0, expected.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        block = np.abs(_wide(flat[start : start + _BLOCK]))
        finite = np.isfinite(block)
        if not finite.all():
            block = block[finite]
        total, count = total + float(np.square(block).sum()), count + block.size
    return max(_SMALLEST_SCALE, (total / count) ** 0.5) if count else 1.0


class _Sums:
    """Sums over the blocks of two arrays; without BLAS, whose threads would compete with those of torch."""

    def __init__(self, tolerance: Tolerance, scale: float) -> None:
        self._tolerance, self._scale = tolerance, scale
        self._count = self._strays = self._outside = self._nonzero = self._nan = 0
        self._max_abs = self._sum_abs = self._max_rel = self._sum_rel = self._excess = 0.0
        self._dot = self._one = self._other = 0.0

    def add(self, expected: Array, actual: Array) -> None:
        expected_wide, actual_wide = _wide(expected), _wide(actual)
        finite = np.isfinite(expected_wide) & np.isfinite(actual_wide)
        self._count += expected_wide.size
        if not finite.all():
            self._add_unusual(expected_wide[~finite], actual_wide[~finite])
            expected_wide, actual_wide, expected, actual = (
                expected_wide[finite],
                actual_wide[finite],
                expected[finite],
                actual[finite],
            )
        if not expected_wide.size:
            return
        apart, size = np.abs(expected_wide - actual_wide), np.abs(expected_wide)
        # also where double precision holds no more of whole numbers
        if self._tolerance == Tolerance(0.0, 0.0):
            self._outside += int(np.count_nonzero(expected != actual))
        else:
            limit = self._tolerance.absolute * self._scale + self._tolerance.relative * size
            self._outside += int(np.count_nonzero(apart > limit))
            most = np.divide(apart, limit, out=np.where(apart > 0, np.inf, 0.0), where=limit > 0)
            self._excess = max(self._excess, float(most.max()))
        self._max_abs = max(self._max_abs, float(apart.max()))
        self._sum_abs += float(apart.sum())
        nonzero = size > 0
        relative = apart[nonzero] / size[nonzero]
        self._nonzero += relative.size
        self._max_rel = max(self._max_rel, float(relative.max(initial=0.0)))
        self._sum_rel += float(relative.sum())
        self._dot += float(np.real(expected_wide * actual_wide.conj()).sum())
        self._one += float(np.square(size).sum())
        self._other += float(np.square(np.abs(actual_wide)).sum())

    def _add_unusual(self, expected: Array, actual: Array) -> None:
        one_is_nan = np.isnan(expected) != np.isnan(actual)
        unequal = ~one_is_nan & ~np.isnan(expected) & (expected != actual)
        self._strays += int(np.count_nonzero(one_is_nan))
        self._nan += int(np.count_nonzero(np.isnan(expected) & np.isnan(actual)))
        if unequal.any():
            self._outside += int(np.count_nonzero(unequal))
            self._max_abs = self._sum_abs = self._max_rel = self._sum_rel = float("inf")

    def result(self, note: str) -> Difference:
        problem = ""
        if self._strays:
            problem = f"{self._strays} of {self._count} elements are NaN on one side only"
            self._max_abs = self._sum_abs = self._max_rel = self._sum_rel = _NAN
        elif self._outside:
            problem = f"{self._outside} of {self._count} elements differ"
        lengths = (self._one * self._other) ** 0.5
        cosine = (
            self._dot / lengths if lengths else (1.0 if not (self._one or self._other) else _NAN)
        )
        return Difference(
            self._max_abs,
            self._sum_abs / max(self._count, 1),
            self._max_rel,
            self._sum_rel / max(self._nonzero, 1),
            min(1.0, cosine) if cosine == cosine else cosine,
            problem,
            note,
            max(self._excess, float("inf"))
            if self._strays or (problem and self._excess <= 1)
            else self._excess,
            nan=self._nan,
        )
