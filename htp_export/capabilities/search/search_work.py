"""What every process of a search does: measure choices alone, compute fronts, measure plans."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from htp_export.capabilities.search.fronts import (
    AdditiveFront,
    Choice,
    MeasuredPlan,
    additive_front,
    refined_plans,
    spread_over,
)
from htp_export.capabilities.search.measuring import Measurement, Measurer
from htp_export.capabilities.search.search_results import OBJECTIVES, Search, Trial
from htp_export.capabilities.search.spaces import Decision, SearchSpace, Treatment, kept_precision
from htp_export.capabilities.search.studies import SharedStudy
from htp_export.errors import InputError, ToolError
from htp_export.format import tags
from htp_export.process.progress import counted

_COSTS = ("size", "latency", "time", "nonzeros")
"""Objectives of which sums over modules are computed, with the errors."""

_FIELDS = {"size": "bytes", "latency": "latency_ms", "time": "time_ms"}
"""The fields of a measurement for objectives with another name."""


class SearchWork:
    """The work of one process of a search for some objectives in a space."""

    def __init__(
        self,
        measurer: Measurer,
        study: SharedStudy,
        objectives: tuple[str, ...],
        space: SearchSpace,
    ) -> None:
        self.space = space
        self._measurer, self._study, self._objectives = measurer, study, objectives

    def measure_alone(self) -> None:
        """Measure every choice of every module alone; take away those that a module cannot have."""
        pairs = [(path, name) for path, names in self.space.variables.items() for name in names]
        self._measurer.original  # noqa: B018 - it is the first run
        problems = {}
        own_order = random.Random()  # other processes measure others first, whatever the seed is
        for path, name in counted(own_order.sample(pairs, len(pairs)), "modules alone"):
            try:
                self._alone(path, name)
            except (InputError, ToolError) as error:
                problems[path, name] = error
        for path, name in sorted(problems):
            self.space = self.space.without(path, name, problems[path, name])
        self.space = self.space.completed()

    def _alone(self, path: str, name: str) -> Measurement:
        others = dict.fromkeys(self.space.variables, kept_precision().name)
        return self._numbers(self._measure(self.space.treatment({**others, path: name})))

    def _choice(self, path: str, name: str, cost: str) -> Choice:
        """What a choice of a module adds to the cost and the error if it is made alone."""
        found = self._alone(path, name)
        return Choice(
            name, _values(found)[cost] - _values(self._measurer.original)[cost], found.error
        )

    def _measure(self, treatment: Treatment) -> Measurement:
        """The measurement of plans; of one that changes nothing, that of the original."""
        if treatment.changes_nothing:
            return self._measurer.original
        return self._measurer.measure(treatment.quantize, treatment.prune)

    def fronts(self) -> dict[str, AdditiveFront]:
        """For each objective that is a cost, the front of the problem in which it and the errors add up."""
        return {cost: self._front(cost) for cost in self._objectives if cost in _COSTS} or {
            "size": self._front("size")
        }

    def _front(self, cost: str) -> AdditiveFront:
        start = _values(self._measurer.original)[cost]
        found = self._additive(list(self.space.variables), cost)
        return AdditiveFront(
            tuple((start + size, error, plan) for size, error, plan in found.points), found.exact
        )

    def _additive(self, paths: Sequence[str], cost: str) -> AdditiveFront:
        """The front of some modules; a module with others inside is dropped, or adds what these do."""
        choices: dict[str, list[Choice]] = {}
        decisions: dict[str, dict[str, Decision]] = {}
        exact = True
        for path in paths:
            if any(other != path and tags.is_under(path, other) for other in paths):
                continue
            inside = [other for other in paths if other != path and tags.is_under(other, path)]
            inner = (
                self._additive(inside, cost)
                if inside
                else AdditiveFront(((0.0, 0.0, {}),), exact=True)
            )
            exact = exact and inner.exact
            choices[path], decisions[path] = [], {}
            for name in self.space.variables[path]:
                alone = self._choice(path, name, cost)
                points = inner.points
                if self.space.choices[name].is_dropped:  # of what is inside, nothing is left
                    points = ((0.0, 0.0, points[0][2]),)
                for number, (size, error, within) in enumerate(points):
                    key = f"{number} {name}"
                    choices[path].append(Choice(key, alone.size + size, alone.error + error))
                    decisions[path][key] = {path: name, **within}
        front = additive_front(choices)
        points = tuple(
            (
                size,
                error,
                {
                    path: name
                    for of, key in plan.items()
                    for path, name in decisions[of][key].items()
                },
            )
            for size, error, plan in front.points
        )
        return AdditiveFront(points, exact and front.exact)

    def first_plans(self, fronts: Mapping[str, AdditiveFront], count: int) -> list[Decision]:
        """Plans that are measured first: those in which all modules become the same, and some of each front."""
        plans = self._uniform()
        for front in fronts.values():
            chosen = spread_over(
                [(size, error) for size, error, _ in front.points], -(-count // len(fronts))
            )
            plans += [front.points[place][2] for place in chosen]
        return plans

    def refined(self, count: int) -> list[Decision]:
        """Plans next to those of the measured front; none where modules inside of others are decided, too.

        The errors of modules inside of one that may be dropped do not add up.
        """
        if self.space.frames:
            return []
        cost = next((name for name in self._objectives if name in _COSTS), "size")
        variables = self.space.variables.items()
        alone = {
            path: [self._choice(path, name, cost) for name in names] for path, names in variables
        }
        measured = []
        for trial in self._study.complete():
            found = Measurement.from_dict(trial.user_attrs["measured"])
            measured.append(MeasuredPlan(trial.params, _values(found)[cost], found.error))
        return [*refined_plans(measured, alone, count)]

    def _uniform(self) -> list[Decision]:
        """The decisions in which all modules become the same; those that others lie in stay."""
        variables, frames = self.space.variables, set(self.space.frames)
        names = dict.fromkeys(itertools.chain.from_iterable(variables.values()))
        plans = [
            {path: kept_precision().name if path in frames else name for path in variables}
            for name in names
        ]
        return [
            plan for plan in plans if all(plan[path] in each for path, each in variables.items())
        ]

    def measured(self, decision: Decision) -> tuple[Sequence[float], Mapping[str, Any]]:
        """The values of the objectives for a decision, and everything that was measured."""
        found = self._measure(self.space.treatment(decision))
        try:
            self._numbers(found)
        except InputError as error:
            listed = [
                f"{path or '(root)'} in {name}"
                for path, name in decision.items()
                if name != kept_precision().name
            ]
            more = f" and {len(listed) - 3} more" * (len(listed) > 3)
            raise InputError(f"{', '.join(listed[:3])}{more}: {error}") from error
        return [_values(found)[name] for name in self._objectives], {"measured": found.to_dict()}

    def _numbers(self, found: Measurement) -> Measurement:
        """What was measured, if it has a number for each objective; an InputError otherwise."""
        values = _values(found)
        for name in self._objectives:
            if not math.isfinite(values[name]):
                why = ": outputs have NaN or infinities where those of the original have none" * (
                    name == "error"
                )
                raise InputError(f"{name} is {values[name]}{why}")
        return found

    def results(self, fronts: Iterable[AdditiveFront]) -> tuple[Trial, ...]:
        """The finished trials of all processes, and the whole model with each choice, which may be measured for it."""
        names = dict.fromkeys(itertools.chain.from_iterable(self.space.variables.values()))
        return (*self.finished(fronts), *filter(None, map(self._whole, names)))

    def finished(self, fronts: Iterable[AdditiveFront]) -> tuple[Trial, ...]:
        """The finished trials of all processes; nothing is measured."""
        of_front = [dict(plan) for front in fronts for _, _, plan in front.points]
        uniform = self._uniform()
        found = []
        for trial in self._study.complete():
            decision = {path: str(trial.params[path]) for path in self.space.variables}
            origin = (
                "front" if decision in of_front else "uniform" if decision in uniform else "sampler"
            )
            measured = Measurement.from_dict(trial.user_attrs["measured"])
            found.append(
                self._trial(trial.number, self.space.treatment(decision), measured, origin)
            )
        return tuple(found)

    def _trial(
        self, number: int | None, treatment: Treatment, found: Measurement, origin: str
    ) -> Trial:
        values, spreads = (
            _values(found),
            {name: found.spread.get(_FIELDS.get(name, name)) for name in self._objectives},
        )
        removed, plan = treatment.written
        return Trial(
            number,
            plan,
            {name: values[name] for name in self._objectives},
            origin,
            found.to_dict(),
            removed,
            {name: value for name, value in spreads.items() if value is not None},
        )

    def repeated(self, search: Search, repeats: int) -> Search:
        """A search in which the plans of the front are measured again: medians and spreads in place of one value."""
        trials, done = list(search.trials), set[int]()
        while waiting := search.front_places - done:
            for place in counted(sorted(waiting), "plans of the front again"):
                done.add(place)
                trials[place] = self._again(trials[place], repeats)
            search = replace(search, trials=tuple(trials))
        differ = list(dict.fromkeys(name for trial in search.trials for name in trial.spread))
        how = "no value differed"
        if differ:
            alone = Search(
                search.objectives, tuple(replace(each, spread={}) for each in search.trials), 0, {}
            )
            tied = [
                each.name for each in search.pareto if replace(each, spread={}) not in alone.pareto
            ]
            how = f"medians and half the range of {', '.join(differ)}"
            how += f"; no plan is ahead by more than that of {', '.join(tied)}" * bool(tied)
        return replace(
            search,
            notes=(*search.notes, f"{len(done)} plans were measured {repeats} more times: {how}"),
        )

    def _again(self, trial: Trial, repeats: int) -> Trial:
        from htp_export.capabilities.prune.sparsities import sparsities_of
        from htp_export.capabilities.quantize.precisions import precisions_of

        treatment = Treatment(
            sparsities_of(trial.prune), precisions_of(trial.plan) if trial.plan else {}
        )
        found = self._numbers(self._measurer.again(treatment.quantize, treatment.prune, repeats))
        return self._trial(trial.number, treatment, found, trial.origin)

    def _whole(self, name: str) -> Trial | None:
        """The whole model with one choice, its nodes outside of modules with weights too."""
        choice = self.space.choices[name]
        treatment = Treatment(
            {".": choice.sparsity} if choice.sparsity else {}, {".": choice.precision}
        )
        try:
            found = self._numbers(self._measure(treatment))
        except (InputError, ToolError):
            return None
        return self._trial(None, treatment, found, "uniform")


def _values(found: Measurement) -> dict[str, float]:
    """Objective → value; NaN for what was not measured."""
    values = {name: getattr(found, _FIELDS.get(name, name)) for name in OBJECTIVES}
    return {name: math.nan if value is None else float(value) for name, value in values.items()}
