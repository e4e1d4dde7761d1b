"""Cuts of a chain against all cuts that there are."""

from __future__ import annotations

import itertools
import random

import pytest

from htp_export.capabilities.partition.balancing import balanced_cuts


def parts(weights: list[float], cuts: tuple[int, ...] | list[int]) -> list[float]:
    return [sum(weights[a:b]) for a, b in itertools.pairwise((0, *cuts, len(weights)))]


@pytest.mark.parametrize("slack", [0.0, 0.05, 0.5])
def test_cuts_are_the_cheapest_of_those_whose_heaviest_part_is_light_enough(slack: float) -> None:
    draw = random.Random(int(slack * 100))
    for _ in range(300):
        weights = [draw.choice([0, 0, 1, 2, 5, draw.random() * 10]) for _ in range(draw.randint(2, 8))]
        places = sorted(draw.sample(range(1, len(weights)), draw.randint(1, len(weights) - 1)))
        charges = [draw.random() / 10 for _ in places]
        count = draw.randint(2, len(places) + 1)
        equal = max(sum(weights) / count, 1e-300)

        def cost(cuts: tuple[int, ...] | list[int]) -> float:
            squares = sum((part / equal) ** 2 for part in parts(weights, cuts))  # noqa: B023 - called in this round
            return squares + sum(charges[places.index(cut)] for cut in cuts)  # noqa: B023

        choices = list(itertools.combinations(places, count - 1))
        lightest = min(max(parts(weights, cuts)) for cuts in choices)
        allowed = [cuts for cuts in choices if max(parts(weights, cuts)) <= lightest * (1 + slack) + 1e-9]
        found = balanced_cuts(weights, places, charges, count, slack)
        assert len(found) == count - 1
        assert max(parts(weights, found)) <= lightest * (1 + slack) + 1e-6
        assert cost(found) == pytest.approx(min(map(cost, allowed)))


def test_what_weighs_nothing_stays_with_what_is_before_it() -> None:
    assert balanced_cuts([1, 0, 1, 0], [1, 2, 3], [0.0] * 3, 2, 0.0) == [2]
