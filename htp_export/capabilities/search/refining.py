"""Plans next to measured ones that may be better: what computed fronts miss because errors do not add up exactly."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from htp_export.capabilities.search.fronts import Choice, pareto

__all__ = ["MeasuredPlan", "refined_plans"]


@dataclass(frozen=True)
class MeasuredPlan:
    """What was measured of a plan.

    Attributes:
        choices: Module → name of its choice.
        size: Its size.
        error: Its error.
    """

    choices: Mapping[str, str]
    size: float
    error: float


def refined_plans(
    measured: Sequence[MeasuredPlan], modules: Mapping[str, Sequence[Choice]], count: int
) -> list[dict[str, str]]:
    """Plans in which one module differs from a measured plan of the front, the most promising first.

    The error of such a plan is predicted as the measured one times the ratio of the sums of the errors that modules
    make alone: what does not add up in the measured plan does not in its neighbour either. Plans are chosen one after
    another, each time the one whose error is below that of the plans that are no larger by the largest factor.

    Args:
        measured: Measured plans.
        modules: Module → what it may be, with what it adds to size and error if it is so alone.
        count: How many plans at most.

    Examples:
        >>> wide = Choice("int8", 8, 0.0)
        >>> modules = {"a": [wide, Choice("int4", 4, 1.0)], "b": [wide, Choice("int4", 4, 3.0)]}
        >>> smallest = MeasuredPlan({"a": "int4", "b": "int4"}, 8, 5.0)
        >>> refined_plans([smallest, MeasuredPlan({"a": "int8", "b": "int8"}, 16, 0.0)], modules, 2)
        [{'a': 'int4', 'b': 'int8'}]
    """
    front = [measured[place] for place in pareto([(plan.size, plan.error) for plan in measured])]
    steps = sorted((plan.size, plan.error) for plan in front)
    known = {_key(plan.choices) for plan in measured}
    candidates: dict[tuple[tuple[str, str], ...], MeasuredPlan] = {}
    for each in (neighbour for plan in front for neighbour in _neighbours(plan, modules)):
        key = _key(each.choices)
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


def _neighbours(plan: MeasuredPlan, modules: Mapping[str, Sequence[Choice]]) -> Iterator[MeasuredPlan]:
    """The plans in which one module differs, as they are predicted to be."""
    now = {path: next(choice for choice in modules[path] if choice.name == name) for path, name in plan.choices.items()}
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


def _key(choices: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(choices.items()))
