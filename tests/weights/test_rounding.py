"""Weights rounded to integers, part by part."""

import itertools
import math

import numpy as np
import pytest

from htp_export.weights.rounding import Rounding, Roundings, rounding

WEIGHT = np.random.default_rng(0).standard_normal((6, 32)).astype(np.float32)
SCHEMES = [
    ["linear", "uint8", -1, 0, 0],
    ["linear", "int8", 0, 1, 0],
    ["channels", 1],
    ["rows", 8, 16, 0],
    ["rows", 4, 16, 1],
    ["rows", 4, 16, 0],
]


@pytest.mark.parametrize("order", [*itertools.permutations(("levels", "scales", "zero_points"))])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_parts_of_a_weight_are_those_of_one_rounding_in_any_order(scheme, order):
    rounded, roundings = 0, Roundings()

    def compute() -> Rounding:
        nonlocal rounded
        rounded += 1
        return rounding(WEIGHT, scheme)

    expected = rounding(WEIGHT, scheme)
    for part in order:
        np.testing.assert_array_equal(
            roundings.part("w", part, compute), expected.part(part), strict=True
        )
    assert rounded == 1


def test_levels_are_close_to_the_weight_by_their_scales_and_zero_points():
    for kind, bits, size, symmetric in (["rows", 8, 16, 0], ["rows", 8, 16, 1]):
        made = rounding(WEIGHT, [kind, bits, size, symmetric])
        scales = np.repeat(made.scales, size, axis=1)
        points = np.repeat(made.zero_points, size, axis=1).astype(np.float32)
        again = (made.part("levels").astype(np.float32) - points) * scales
        assert (np.abs(again - WEIGHT) <= scales).all()


def test_two_weights_are_not_confused():
    roundings = Roundings()
    other = rounding(2 * WEIGHT, ["channels", 0])
    first = rounding(WEIGHT, ["channels", 0])
    roundings.part("a", "scales", lambda: first)
    roundings.part("b", "scales", lambda: other)
    np.testing.assert_array_equal(
        roundings.part("a", "levels", lambda: first), first.part("levels")
    )
    np.testing.assert_array_equal(roundings.part("b", "scales", lambda: first), other.scales)


@pytest.mark.parametrize(("shape", "axis"), [((), -1), ((5,), -1), ((5,), 0), ((2, 3), 1)])
def test_numbers_and_vectors_have_levels_too(shape, axis):
    weight = np.linspace(0.5, 2, math.prod(shape)).reshape(shape).astype(np.float32)
    made = rounding(weight, ["linear", "int8", axis, 1, 0])
    levels = made.part("levels").astype(np.float32)
    assert levels.shape == shape
    sizes = [size if place == axis else 1 for place, size in enumerate(shape)]
    scales = made.scales.reshape(sizes if axis >= 0 else ())
    np.testing.assert_allclose(levels * scales, weight, atol=float(scales.max()))
