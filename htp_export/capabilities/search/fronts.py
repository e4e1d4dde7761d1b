"""Pareto fronts: of measured points, and the exact one of a problem whose objectives are sums over modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["AdditiveFront", "Choice", "additive_front", "pareto", "spread_over"]

MOST_POINTS = 20_000
"""Points of the front that are kept after each module; beyond that, they are thinned, and the front is not exact."""


@dataclass(frozen=True)
class Choice:
    """One precision that a module may have.

    Attributes:
        name: The precision.
        size: What it adds to the size, in bytes or in any other unit.
        error: What it adds to the error.
    """

    name: str
    size: float
    error: float


@dataclass(frozen=True)
class AdditiveFront:
    """The Pareto front of the sums.

    Attributes:
        points: For each point its size, its error, and module → name of the choice; sizes increase, errors decrease.
        exact: Whether every point of the front is there.
    """

    points: tuple[tuple[float, float, Mapping[str, str]], ...]
    exact: bool


def additive_front(modules: Mapping[str, Sequence[Choice]], most: int = MOST_POINTS) -> AdditiveFront:
    """The Pareto front of choosing one precision for each module, where sizes and errors add up.

    This is the multiple-choice knapsack problem for all capacities at once. The list of non-dominated sums grows module
    by module (Nemhauser and Ullmann, "Discrete dynamic programming and capital allocation", 1969): a sum that is
    dominated stays so, whatever is added to it, so that no point of the front is lost.

    Args:
        modules: Module → what it may be.
        most: Sums that are kept after each module.

    Examples:
        >>> wide, narrow = Choice("int8", 8, 0.0), Choice("int4", 4, 1.0)
        >>> front = additive_front({"a": [wide, narrow], "b": [wide, Choice("int4", 4, 3.0)]})
        >>> [(size, error, dict(chosen)) for size, error, chosen in front.points]
        [(8.0, 4.0, {'a': 'int4', 'b': 'int4'}), (12.0, 1.0, {'a': 'int4', 'b': 'int8'}),
         (16.0, 0.0, {'a': 'int8', 'b': 'int8'})]
    """
    sizes, errors = np.zeros(1), np.zeros(1)
    steps: list[tuple[np.ndarray, np.ndarray]] = []  # for each module: the point before, and the choice
    exact = True
    for choices in modules.values():
        all_sizes = (sizes[:, None] + np.array([choice.size for choice in choices])).ravel()
        all_errors = (errors[:, None] + np.array([choice.error for choice in choices])).ravel()
        kept = _non_dominated(all_sizes, all_errors)
        if len(kept) > most:
            exact = False
            kept = kept[np.unique(np.linspace(0, len(kept) - 1, most).round().astype(int))]
        sizes, errors = all_sizes[kept], all_errors[kept]
        steps.append((kept // len(choices), kept % len(choices)))
    points = [
        (float(sizes[place]), float(errors[place]), _chosen(modules, steps, place)) for place in range(len(sizes))
    ]
    return AdditiveFront(tuple(points), exact)


def _chosen(
    modules: Mapping[str, Sequence[Choice]], steps: Sequence[tuple[np.ndarray, np.ndarray]], place: int
) -> dict[str, str]:
    found: dict[str, str] = {}
    for (path, choices), (before, choice) in zip(reversed(list(modules.items())), reversed(steps), strict=True):
        found[path] = choices[int(choice[place])].name
        place = int(before[place])
    return dict(reversed(found.items()))


def _non_dominated(sizes: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """The places of points that no other one dominates, by size; of equal points, the first."""
    order = np.lexsort((errors, sizes))
    best = np.minimum.accumulate(errors[order])
    better = np.concatenate([[True], errors[order][1:] < best[:-1]])
    return np.asarray(order[better])


def pareto(points: Sequence[Sequence[float]]) -> list[int]:
    """The places of points that no other point dominates; smaller is better. Of equal points, the first one.

    Examples:
        >>> pareto([(1, 5), (2, 2), (3, 3), (2, 2), (4, 1)])
        [0, 1, 4]
    """
    kept = []
    for place, point in enumerate(points):
        if any(value != value for value in point):
            continue
        dominated = any(
            all(a <= b for a, b in zip(other, point, strict=True)) and (tuple(other) != tuple(point) or at < place)
            for at, other in enumerate(points)
            if at != place
        )
        if not dominated:
            kept.append(place)
    return kept


def spread_over(points: Sequence[tuple[float, float]], count: int) -> list[int]:
    """At most ``count`` places of a front that are spread along it: both ends, and points between.

    Distances are those in a picture with a logarithmic axis for the errors.

    Args:
        points: Size and error of each point; sizes increase, errors decrease.
        count: How many.

    Examples:
        >>> spread_over([(1, 1.0), (2, 1e-3), (3, 1e-6), (50, 0.9e-6), (98, 0.8e-6), (100, 0.7e-6)], 4)
        [0, 1, 3, 5]
    """
    if len(points) <= count:
        return list(range(len(points)))
    sizes, errors = np.array(points, dtype=float).T
    positive = errors[errors > 0]
    heights = np.log(np.maximum(errors, positive.min() / 10)) if positive.size else np.zeros(len(points))
    steps = np.hypot(np.diff(sizes) / (np.ptp(sizes) or 1), np.diff(heights) / (np.ptp(heights) or 1))
    along = np.concatenate([[0], np.cumsum(steps)])
    wanted = np.linspace(0, along[-1], max(count, 1))
    return sorted({int(np.abs(along - place).argmin()) for place in wanted})
