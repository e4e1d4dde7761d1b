"""Pareto fronts of plans, computed from choices that add up, and plans next to measured ones that may be better."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

MOST_POINTS = 20_000
"""Points of the front that are kept after each module; beyond that, they are thinned, and the front is not exact."""


@dataclass(frozen=True)
class Choice:
    """One precision that a module may have: what it adds to the size, in any unit, and to the error."""

    name: str
    size: float
    error: float


@dataclass(frozen=True)
class AdditiveFront:
    """The Pareto front of the sums: size, error, and module → choice; sizes increase, errors decrease."""

    points: tuple[tuple[float, float, Mapping[str, str]], ...]
    exact: bool


def additive_front(
    modules: Mapping[str, Sequence[Choice]], most: int = MOST_POINTS
) -> AdditiveFront:
    """The Pareto front of choosing one precision for each module, where sizes and errors add up.

    This is the multiple-choice knapsack problem for all capacities at once. The list of
    non-dominated sums grows module by module (Nemhauser and Ullmann, "Discrete dynamic programming
    and capital allocation", 1969): a sum that is dominated stays so, whatever is added to it, so
    that no point of the front is lost.

    Examples:
        >>> wide, narrow = Choice("int8", 8, 0.0), Choice("int4", 4, 1.0)
        >>> front = additive_front({"a": [wide, narrow], "b": [wide, Choice("int4", 4, 3.0)]})
        >>> [(size, error, dict(chosen)) for size, error, chosen in front.points]
        [(8.0, 4.0, {'a': 'int4', 'b': 'int4'}), (12.0, 1.0, {'a': 'int4', 'b': 'int8'}),
         (16.0, 0.0, {'a': 'int8', 'b': 'int8'})]
    """
    sizes, errors = np.zeros(1), np.zeros(1)
    # for each module: the point before, and the choice
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
    found: dict[str, str] = {}
    for (path, choices), (before, choice) in zip(
        reversed(list(modules.items())), reversed(steps), strict=True
    ):
        found[path] = choices[int(choice[place])].name
        place = int(before[place])
    return dict(reversed(found.items()))


def _non_dominated(sizes: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """The places of points that no other one dominates, by size; of equal points, the first."""
    order = np.lexsort((errors, sizes))
    best = np.minimum.accumulate(errors[order])
    better = np.concatenate([[True], errors[order][1:] < best[:-1]])
    return np.asarray(order[better])


def pareto(points: Sequence[Sequence[float]], spreads: Sequence[Sequence[float]] = ()) -> list[int]:
    """The places of points that no other point dominates; smaller is better. Of equal points, the first one.

    With the spreads of the numbers of each point, numbers that differ by no more than the larger of
    two are as good as equal: no point that another one dominates only by such numbers is left out.

    Examples:
        >>> pareto([(1, 5), (2, 2), (3, 3), (2, 2), (4, 1)])
        [0, 1, 4]
        >>> pareto([(1, 5), (1, 6), (1, 9)], [(0, 2), (0, 2), (0, 0)])
        [0, 1]
    """
    kept = []
    none = [0.0] * max(map(len, points), default=0)
    for place, point in enumerate(points):
        if any(value != value for value in point):
            continue
        dominated = any(
            all(a <= b for a, b in zip(other, point, strict=True))
            and (tuple(other) != tuple(point) or at < place)
            and _exceeds(
                point, other, spreads[place] if spreads else none, spreads[at] if spreads else none
            )
            for at, other in enumerate(points)
            if at != place
        )
        if not dominated:
            kept.append(place)
    return kept


def _exceeds(
    point: Sequence[float],
    other: Sequence[float],
    spread: Sequence[float],
    of_other: Sequence[float],
) -> bool:
    """Whether a point is behind another one by more than their spreads in a number, or they have none."""
    limits = [max(pair) for pair in zip(spread, of_other, strict=True)]
    return not any(limits) or any(
        a - b > limit for a, b, limit in zip(point, other, limits, strict=True)
    )


def spread_over(points: Sequence[tuple[float, float]], count: int) -> list[int]:
    """At most ``count`` places of a front that are spread along it: both ends, and points between.

    Points are a size and an error; sizes increase, errors decrease. Distances are those in a
    picture with a logarithmic axis for the errors.

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
    """Module → name of its choice, and the size and error that were measured."""

    choices: Mapping[str, str]
    size: float
    error: float


def refined_plans(
    measured: Sequence[MeasuredPlan], modules: Mapping[str, Sequence[Choice]], count: int
) -> list[dict[str, str]]:
    """Plans in which one module differs from a measured plan of the front, the most promising first.

    The error of such a plan is predicted as the measured one times the ratio of the sums of the
    errors that modules make alone: what does not add up in the measured plan does not in its
    neighbour either. Plans are chosen one after another, each time the one whose error is below
    that of the plans that are no larger by the largest factor.

    Examples:
        >>> wide = Choice("int8", 8, 0.0)
        >>> modules = {"a": [wide, Choice("int4", 4, 1.0)], "b": [wide, Choice("int4", 4, 3.0)]}
        >>> smallest = MeasuredPlan({"a": "int4", "b": "int4"}, 8, 5.0)
        >>> refined_plans([smallest, MeasuredPlan({"a": "int8", "b": "int8"}, 16, 0.0)], modules, 2)
        [{'a': 'int4', 'b': 'int8'}]
    """
    front = [measured[place] for place in pareto([(plan.size, plan.error) for plan in measured])]
    steps = sorted((plan.size, plan.error) for plan in front)
    known = {tuple(sorted(plan.choices.items())) for plan in measured}
    candidates: dict[tuple[tuple[str, str], ...], MeasuredPlan] = {}
    for each in (neighbour for plan in front for neighbour in _neighbours(plan, modules)):
        key = tuple(sorted(each.choices.items()))
        if key not in known and (key not in candidates or candidates[key].error < each.error):
            candidates[key] = each  # of several predictions, the worst
    found: list[dict[str, str]] = []
    while candidates and len(found) < count:
        best = max(candidates, key=lambda key: _factor(candidates[key], steps))
        chosen = candidates.pop(best)
        if _factor(chosen, steps) <= 1:
            break
        found.append(dict(chosen.choices))
        steps = sorted(
            [(size, error) for size, error in steps if size < chosen.size or error < chosen.error]
            + [(chosen.size, chosen.error)]
        )
    return found


def _neighbours(
    plan: MeasuredPlan, modules: Mapping[str, Sequence[Choice]]
) -> Iterator[MeasuredPlan]:
    """The plans in which one module differs, as they are predicted to be."""
    now = {
        path: next(choice for choice in modules[path] if choice.name == name)
        for path, name in plan.choices.items()
    }
    whole = math.fsum(choice.error for choice in now.values())
    if not whole:
        return
    for path, choices in modules.items():
        for choice in choices:
            if choice.name != now[path].name:
                size = plan.size + choice.size - now[path].size
                error = plan.error * max(whole + choice.error - now[path].error, 0.0) / whole
                yield MeasuredPlan({**plan.choices, path: choice.name}, size, error)


def _factor(plan: MeasuredPlan, steps: Sequence[tuple[float, float]]) -> float:
    """The error of the best plan that is no larger, divided by that of a plan."""
    place = bisect_right(steps, (plan.size, math.inf))
    if not place:
        return 1.0  # smaller than all that are measured, and worse: no size is asked for
    if not plan.error:
        return math.inf if steps[place - 1][1] else 1.0
    return steps[place - 1][1] / plan.error
