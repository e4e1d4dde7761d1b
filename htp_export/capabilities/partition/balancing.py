"""Where to cut a chain of weights, so that its heaviest part is light and little is carried from part to part."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["balanced_cuts"]


def balanced_cuts(
    weights: Sequence[float], places: Sequence[int], charges: Sequence[float], count: int, slack: float
) -> list[int]:
    """Choose cuts of a chain into consecutive parts.

    First the smallest possible weight of the heaviest part is found. Then, of all choices of cuts whose heaviest part
    is heavier than that by no more than ``slack``, the one is taken with the least sum of the squared weights of all
    parts, in units of equal parts, and of the charges of its cuts. Both are dynamic programs over the places: linear
    partitioning, as in Skiena, *The Algorithm Design Manual*, section 10.7.

    Args:
        weights: What each link of the chain weighs, none of it negative.
        places: The places where it can be cut, increasing: ``k`` lies before link ``k``.
        charges: For each place, what cutting there costs.
        count: How many parts; at most one more than there are places.
        slack: How much heavier the heaviest part may be than it could be, as a fraction.

    Returns:
        The chosen places, in order.

    Examples:
        >>> balanced_cuts([5, 1, 1, 1, 5], [1, 2, 3, 4], [0.0, 0.0, 0.0, 0.0], 3, 0.0)
        [1, 4]
        >>> balanced_cuts([9, 1, 10], [1, 2], [0.0, 0.5], 2, 0.0), balanced_cuts([9, 1, 10], [1, 2], [0.0, 0.5], 2, 0.1)
        ([2], [1])
    """
    if count == 1:
        return []
    before = np.concatenate(([0.0], np.cumsum(np.asarray(weights, dtype=np.float64))))
    ends = np.array([0.0, *before[list(places)], before[-1]])  # weight of the chain up to each place, and to its end
    lightest = _smallest_heaviest(ends, count)
    limit = lightest * (1 + slack) + 1e-9 * ends[-1]
    chosen = _cheapest(ends, [0.0, *charges, 0.0], count, limit)
    return [places[number - 1] for number in chosen]


def _smallest_heaviest(ends: npt.NDArray[np.float64], count: int) -> float:
    """The weight of the heaviest part, at best."""
    heaviest = ends.copy()  # of the chain up to each place, in as many parts as there were rounds
    for parts in range(2, count + 1):
        shorter = heaviest
        heaviest = np.full_like(ends, math.inf)
        for end in range(parts, len(ends)):
            heaviest[end] = np.maximum(shorter[parts - 1 : end], ends[end] - ends[parts - 1 : end]).min()
    return float(heaviest[-1])


def _cheapest(ends: npt.NDArray[np.float64], charges: Sequence[float], count: int, limit: float) -> list[int]:
    """The numbers of the places where the parts begin, but for the first one."""
    equal = max(float(ends[-1]) / count, 1e-300)
    last = len(ends) - 1
    cost = np.full(len(ends), math.inf)
    cost[0] = 0.0
    chosen: list[list[int]] = []
    for parts in range(1, count + 1):
        shorter, cost = cost, np.full(len(ends), math.inf)
        came_from = [0] * len(ends)
        for end in range(parts, last + 1 - (count - parts)):
            start = max(bisect_left(ends, ends[end] - limit), parts - 1)
            costs = shorter[start:end] + ((ends[end] - ends[start:end]) / equal) ** 2
            if costs.size:
                best = costs.size - 1 - int(np.argmin(costs[::-1]))  # what weighs nothing stays with what is before it
                came_from[end], cost[end] = start + best, float(costs[best]) + charges[end]
        chosen.append(came_from)
    cuts = list(itertools.accumulate(reversed(chosen[1:]), lambda end, came_from: came_from[end], initial=last))
    return cuts[:0:-1]
