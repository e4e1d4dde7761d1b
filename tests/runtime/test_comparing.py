"""How far two arrays are apart, and what is no agreement."""

import ml_dtypes
import numpy as np
import pytest

from htp_export.runtime import comparing
from htp_export.runtime.comparing import Tolerance, difference

NAN, INF = float("nan"), float("inf")


def test_numbers_are_those_of_the_definition():
    found = difference(np.float64([1, 2, 4, 0]), np.float64([1, 2.5, 3, 0]), Tolerance(1, 1))
    assert (found.max_abs, found.mean_abs) == (1.0, 0.375)
    assert (found.max_rel, found.mean_rel) == (0.25, pytest.approx(0.5 / 3))
    assert found.cosine == pytest.approx(18 / np.sqrt(21 * 16.25))


@pytest.mark.parametrize("size", [3, 10, 1000])
def test_blocks_give_what_the_whole_gives(monkeypatch, size):
    rng = np.random.default_rng(0)
    one = rng.standard_normal((7, 11)).astype(np.float32)
    other = one + rng.standard_normal((7, 11)).astype(np.float32) * 1e-3
    whole = difference(one, other)
    monkeypatch.setattr(comparing, "_BLOCK", size)
    assert difference(one, other).problem == whole.problem
    assert difference(one, other).mean_abs == pytest.approx(whole.mean_abs)
    assert difference(one, other).cosine == pytest.approx(whole.cosine)


@pytest.mark.parametrize(
    ("one", "other", "agrees"),
    [
        ([NAN, 1], [NAN, 1], True),
        ([NAN, 1], [0, 1], False),
        ([0, 1], [NAN, 1], False),
        ([INF, 1], [INF, 1], True),
        ([INF, 1], [-INF, 1], False),
        ([-INF, 1], [-3e38, 1], False),
        ([1, 1], [INF, 1], False),
    ],
)
def test_nan_and_infinity_agree_with_themselves_alone(one, other, agrees):
    assert difference(np.float32(one), np.float32(other)).agrees is agrees


def test_an_infinity_is_an_infinite_difference_and_nan_is_none_that_has_a_number():
    assert difference(np.float32([1, 1]), np.float32([INF, 1])).max_abs == INF
    assert np.isnan(difference(np.float32([1, 1]), np.float32([NAN, 1])).max_abs)


@pytest.mark.parametrize(
    ("one", "other", "problem"),
    [
        (np.ones((1, 3)), np.ones(3), "shape [3], not [1, 3]"),
        (np.ones((2, 1)), np.ones((2, 3)), "shape [2, 3], not [2, 1]"),
        (np.ones(3, np.float32), np.ones(3, np.int64), "dtype int64, not float32"),
        (np.ones(3, np.int64), np.ones(3, np.int32), "dtype int32, not int64"),
        (np.ones(0, np.float32), np.ones((0, 2), np.float32), "shape [0, 2], not [0]"),
    ],
)
def test_nothing_is_broadcast_or_cast(one, other, problem):
    assert difference(one, other).problem == problem


def test_whole_numbers_and_truth_values_have_to_be_equal():
    assert not difference(np.int64([2**60]), np.int64([2**60 + 1])).agrees
    assert not difference(np.array([True, False]), np.array([True, True])).agrees
    assert difference(np.array([True, False]), np.array([True, False])).agrees


def test_empty_arrays_of_one_shape_agree():
    assert difference(np.ones((0, 3), np.float32), np.ones((0, 3), np.float32)).agrees


@pytest.mark.parametrize(
    ("dtype", "within", "beyond"), [("float32", 5e-5, 1e-3), ("float16", 5e-3, 5e-2)]
)
def test_the_default_tolerance_is_that_of_the_dtype(dtype, within, beyond):
    one = np.ones(4, dtype)
    assert difference(one, (one + within).astype(dtype)).agrees
    assert not difference(one, (one + beyond).astype(dtype)).agrees


def test_the_absolute_tolerance_grows_with_the_tensor_and_shrinks_no_further_than_to_a_tenth():
    big, small = np.float32([1000, 0.0]), np.float32([1e-4, 0.0])
    off = np.float32([0, 1e-2])
    assert difference(big, big + off).agrees
    assert not difference(small, small + off).agrees
    assert difference(small, small + np.float32([0, 5e-6])).agrees


def test_floats_of_different_widths_are_compared_with_the_tolerance_of_the_narrower():
    one, other = np.float32([1, 2]), np.float16([1.005, 2])
    found = difference(one, other)
    assert found.agrees
    assert found.note == "float16 against float32, with the tolerance of float16"
    assert not difference(np.int64([1]), np.int32([1])).agrees


def test_bfloat16_has_a_tolerance_of_its_own():
    one = np.ones(4, ml_dtypes.bfloat16)
    assert difference(one, (np.ones(4) * 1.03).astype(ml_dtypes.bfloat16)).agrees
    assert not difference(one, (np.ones(4) * 1.3).astype(ml_dtypes.bfloat16)).agrees


def test_the_excess_says_how_far_beyond_the_tolerance_the_worst_element_is():
    tolerance = Tolerance(0.0, 0.1)
    assert difference(np.float64([1, 2]), np.float64([1, 2.1]), tolerance).excess == pytest.approx(
        0.5
    )
    assert difference(np.float64([1, 2]), np.float64([2, 2]), tolerance).excess == pytest.approx(10)
    assert difference(np.float64([0, 2]), np.float64([1, 2]), tolerance).excess == INF
    assert difference(np.float64([1, 2]), np.float64([NAN, 2]), tolerance).excess == INF
    assert difference(np.int64([1]), np.int64([2])).excess == INF
    assert difference(np.int64([1]), np.int64([1])).excess == 0
    assert difference(np.ones(2), np.ones(3)).excess == INF


@pytest.mark.parametrize("values", [[NAN, NAN], [INF, -INF], [NAN, INF]])
def test_where_no_element_is_finite_nothing_has_a_number(values):
    found = difference(np.float32(values), np.float32(values))
    assert found.agrees
    assert not found.has_numbers
    assert np.isnan(
        [found.max_abs, found.mean_abs, found.max_rel, found.mean_rel, found.cosine]
    ).all()


def test_elements_that_are_not_finite_are_counted_by_side():
    expected = np.float32([1, NAN, INF, NAN, INF, 2, 3, INF])
    actual = np.float32([1, NAN, INF, 4, 5, NAN, -INF, -INF])
    found = difference(expected, actual)
    assert (found.nan, found.infinite, found.size) == (1, 1, 8)
    assert (found.nan_sides, found.infinite_sides) == ((1, 1), (1, 1))


def test_an_infinity_on_one_side_is_told_as_one():
    found = difference(np.float32([1, 1]), np.float32([INF, 1]))
    assert found.problem == "1 of 2 elements are infinite on one side only"
    assert found.excess == INF
    assert difference(np.float32([]), np.float32([])).cosine == 1
