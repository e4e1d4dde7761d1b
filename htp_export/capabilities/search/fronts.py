"""Pareto fronts: of sums over independent choices, of measured plans, and plans next to these."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

MOST_POINTS = 20_000
"""Points of the front that are kept after each module: with 10 choices, numpy sorts 200,000 sums in
some hundredths of a second. Beyond, points are thinned, and the front is not exact."""


@dataclass(frozen=True)
class Choice:
    """A choice for a module, and its contributions to the size, in any unit, and the error."""

    name: str
    size: float
    error: float


@dataclass(frozen=True)
class AdditiveFront:
    """The Pareto front of the sums.

    Attributes:
        points: Size, error, and module → choice; sizes increase, errors decrease.
        exact: Whether no points were thinned.
    """

    points: tuple[tuple[float, float, Mapping[str, str]], ...]
    exact: bool


def additive_front(
    modules: Mapping[str, Sequence[Choice]], most: int = MOST_POINTS
) -> AdditiveFront:
    """The Pareto front over all selections of one choice for each module, by their sums.

    This is the multiple-choice knapsack problem for all capacities at once. The list of
    non-dominated sums grows module by module (Nemhauser and Ullmann, "Discrete dynamic programming
    and capital allocation", 1969): a dominated sum stays dominated after any addition, so that no
    point of the front is lost.

    Examples:
        >>> wide, narrow = Choice("int8", 8, 0.0), Choice("int4", 4, 1.0)
        >>> front = additive_front({"a": [wide, narrow], "b": [wide, Choice("int4", 4, 3.0)]})
        >>> [(size, error, dict(chosen)) for size, error, chosen in front.points]
        [(8.0, 4.0, {'a': 'int4', 'b': 'int4'}), (12.0, 1.0, {'a': 'int4', 'b': 'int8'}),
         (16.0, 0.0, {'a': 'int8', 'b': 'int8'})]
    """
    sizes, errors = np.zeros(1), np.zeros(1)
    # For each module: for each kept sum, the place of the sum that it extends, and its choice.
    steps: list[tuple[np.ndarray, np.ndarray]] = []
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
        (float(sizes[place]), float(errors[place]), _chosen(modules, steps, place))
        for place in range(len(sizes))
    ]
    return AdditiveFront(tuple(points), exact)


def _chosen(
    modules: Mapping[str, Sequence[Choice]],
    steps: Sequence[tuple[np.ndarray, np.ndarray]],
    place: int,
) -> dict[str, str]:
    """The choices of the sum at a place, followed back from the last module to the first one."""
    chosen: dict[str, str] = {}
    last_first = reversed(list(modules.items()))
    for (path, choices), (before, choice) in zip(last_first, reversed(steps), strict=True):
        chosen[path] = choices[int(choice[place])].name
        place = int(before[place])
    return dict(reversed(chosen.items()))


def _non_dominated(sizes: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """The places of points that no other point dominates, by size; of equal points, the first."""
    order = np.lexsort((errors, sizes))
    best = np.minimum.accumulate(errors[order])
    better = np.concatenate([[True], errors[order][1:] < best[:-1]])
    return np.asarray(order[better])


def pareto(points: Sequence[Sequence[float]], spreads: Sequence[Sequence[float]] = ()) -> list[int]:
    """The places of points that no other point dominates; smaller is better.

    Of equal points, the first is kept.

    Args:
        points: The coordinates of each point.
        spreads: The uncertainty of each coordinate. A point stays if another one dominates it only
            by differences up to the larger of their spreads.

    Examples:
        >>> pareto([(1, 5), (2, 2), (3, 3), (2, 2), (4, 1)])
        [0, 1, 4]
        >>> pareto([(1, 5), (1, 6), (1, 9)], [(0, 2), (0, 2), (0, 0)])
        [0, 1]
    """
    exact = [0.0] * max(map(len, points), default=0)
    measured = [
        _Point(place, tuple(values), spreads[place] if spreads else exact)
        for place, values in enumerate(points)
    ]
    kept = []
    for point in measured:
        has_nan = any(value != value for value in point.values)
        if not has_nan and not any(other.dominates(point) for other in measured):
            kept.append(point.place)
    return kept


@dataclass(frozen=True)
class _Point:
    place: int
    values: tuple[float, ...]
    spread: Sequence[float]

    def dominates(self, other: _Point) -> bool:
        """Whether this point is as good in all values, and better in one by more than the spreads.

        Of two equal points without spreads, the first one dominates.
        """
        if self.place == other.place:
            return False
        if self.values == other.values and self.place > other.place:
            return False
        if not all(own <= its for own, its in zip(self.values, other.values, strict=True)):
            return False
        limits = [max(pair) for pair in zip(self.spread, other.spread, strict=True)]
        if not any(limits):
            return True
        pairs = zip(self.values, other.values, limits, strict=True)
        return any(its - own > limit for own, its, limit in pairs)


def spread_over(points: Sequence[tuple[float, float]], count: int) -> list[int]:
    """At most ``count`` places spread along a front: both ends, and points between.

    Points are a size and an error; sizes increase, errors decrease. Distances are measured as in a
    picture with a logarithmic axis of errors.

    Examples:
        >>> spread_over([(1, 1.0), (2, 1e-3), (3, 1e-6), (50, 0.9e-6), (98, 0.8e-6), (100, 0.7e-6)], 4)
        [0, 1, 3, 5]
    """
    if len(points) <= count:
        return list(range(len(points)))
    sizes, errors = np.array(points, dtype=float).T
    positive = errors[errors > 0]
    heights = (
        np.log(np.maximum(errors, positive.min() / 10)) if positive.size else np.zeros(len(points))
    )
    steps = np.hypot(
        np.diff(sizes) / (np.ptp(sizes) or 1), np.diff(heights) / (np.ptp(heights) or 1)
    )
    along = np.concatenate([[0], np.cumsum(steps)])
    wanted = np.linspace(0, along[-1], max(count, 1))
    return sorted({int(np.abs(along - place).argmin()) for place in wanted})


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan, module → name of its choice, with its measured size and error."""

    choices: Mapping[str, str]
    size: float
    error: float


def refined_plans(
    measured: Sequence[MeasuredPlan], modules: Mapping[str, Sequence[Choice]], count: int
) -> list[dict[str, str]]:
    """Plans that differ from a measured plan of the front in one module, the most promising first.

    The predicted error of such a plan is the measured error times the ratio of the sums of the
    errors of single modules: the deviation from additivity is assumed to be the same. Plans are
    chosen one by one: the plan that divides the smallest error of all plans up to its size by the
    largest factor.

    Examples:
        >>> wide = Choice("int8", 8, 0.0)
        >>> modules = {"a": [wide, Choice("int4", 4, 1.0)], "b": [wide, Choice("int4", 4, 3.0)]}
        >>> smallest = MeasuredPlan({"a": "int4", "b": "int4"}, 8, 5.0)
        >>> refined_plans([smallest, MeasuredPlan({"a": "int8", "b": "int8"}, 16, 0.0)], modules, 2)
        [{'a': 'int4', 'b': 'int8'}]
    """
    points = [(plan.size, plan.error) for plan in measured]
    front = [measured[place] for place in pareto(points)]
    candidates = _candidates(front, measured, modules)
    steps = sorted((plan.size, plan.error) for plan in front)
    plans: list[dict[str, str]] = []
    while candidates and len(plans) < count:
        best = max(candidates, key=lambda key: _factor(candidates[key], steps))
        chosen = candidates.pop(best)
        if _factor(chosen, steps) <= 1:
            break
        plans.append(dict(chosen.choices))
        # as if it was measured: the next plan must be better than this one, too
        better = [step for step in steps if step[0] < chosen.size or step[1] < chosen.error]
        steps = sorted([*better, (chosen.size, chosen.error)])
    return plans


_Choices: TypeAlias = tuple[tuple[str, str], ...]
"""The choices of a plan as a key."""


def _candidates(
    front: Sequence[MeasuredPlan],
    measured: Sequence[MeasuredPlan],
    modules: Mapping[str, Sequence[Choice]],
) -> dict[_Choices, MeasuredPlan]:
    """The unmeasured neighbours of a front; of several predictions, the largest error."""
    known = {tuple(sorted(plan.choices.items())) for plan in measured}
    candidates: dict[_Choices, MeasuredPlan] = {}
    for plan in front:
        for neighbour in _neighbours(plan, modules):
            key = tuple(sorted(neighbour.choices.items()))
            if key in known:
                continue
            if key not in candidates or candidates[key].error < neighbour.error:
                candidates[key] = neighbour
    return candidates


def _neighbours(
    plan: MeasuredPlan, modules: Mapping[str, Sequence[Choice]]
) -> Iterator[MeasuredPlan]:
    """The plans in which one module differs, with their predicted size and error."""
    current: dict[str, Choice] = {}
    for path, name in plan.choices.items():
        current[path] = next(choice for choice in modules[path] if choice.name == name)
    total = math.fsum(choice.error for choice in current.values())
    if not total:
        return
    for path, choices in modules.items():
        before = current[path]
        for choice in choices:
            if choice.name != before.name:
                size = plan.size + choice.size - before.size
                error = plan.error * max(total + choice.error - before.error, 0.0) / total
                yield MeasuredPlan({**plan.choices, path: choice.name}, size, error)


def _factor(plan: MeasuredPlan, steps: Sequence[tuple[float, float]]) -> float:
    """The smallest error of the plans up to the size of a plan, divided by its own error."""
    place = bisect_right(steps, (plan.size, math.inf))
    if not place:
        return 1.0  # smaller than all measured plans: nothing to compare with
    smallest = steps[place - 1][1]
    if not plan.error:
        return math.inf if smallest else 1.0
    return smallest / plan.error
