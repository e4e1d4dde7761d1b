"""The work of a process of a search: measure single choices, compute fronts, and measure plans."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
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

_COSTS = ("size", "bits", "latency", "time", "nonzeros")
"""Objectives that are summed over modules, as errors are; the first one is predicted."""

_FIELDS = {"size": "bytes", "latency": "latency_ms", "time": "time_ms"}
"""Objective → the field of a measurement, if its name differs."""

_NO_LOSS = 1e-4
"""The loss of a metric, as a share of its value, that is as good as none."""

_MOST_NAMED = 3
"""Modules that the error of a plan lists: a plan has dozens."""


_NO_MODULES = AdditiveFront(((0.0, 0.0, MappingProxyType({})),), exact=True)
"""The front of the sums over no modules."""


class SearchWork:
    """The work of one process: measures choices and plans for the objectives of a search."""

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
        """Measure each choice of each module alone; remove choices that a module cannot have."""
        pairs = [(path, name) for path, names in self.space.variables.items() for name in names]
        self._measurer.original  # noqa: B018 - it is the first run
        problems = {}
        # Without a seed: each process begins with other choices, and they share the results.
        own_order = random.Random()
        for path, name in counted(own_order.sample(pairs, len(pairs)), "modules alone"):
            try:
                self._alone(path, name)
            except (InputError, ToolError) as error:
                problems[path, name] = error
        # Sorted, because each process measures in another order.
        for path, name in sorted(problems):
            self.space = self.space.without(path, name, problems[path, name])
        self.space = self.space.completed()

    def _alone(self, path: str, name: str) -> Measurement:
        others = dict.fromkeys(self.space.variables, kept_precision().name)
        return self._numbers(self._measure(self.space.treatment({**others, path: name})))

    def _choice(self, path: str, name: str, cost: str) -> Choice:
        """The contributions of a choice of a module to the cost and the error, measured alone."""
        alone = self._alone(path, name)
        added = _values(alone)[cost] - _values(self._measurer.original)[cost]
        return Choice(name, added, alone.error)

    def _measure(self, treatment: Treatment) -> Measurement:
        """The measurement of plans; without a change, that of the original."""
        if treatment.changes_nothing:
            return self._measurer.original
        return self._measurer.measure(treatment.quantize, treatment.prune)

    def fronts(self) -> dict[str, AdditiveFront]:
        """For each cost among the objectives, the front of its sums and the sums of errors."""
        costs = [name for name in self._objectives if name in _COSTS] or ["size"]
        return {cost: self._front(cost) for cost in costs}

    def _front(self, cost: str) -> AdditiveFront:
        start = _values(self._measurer.original)[cost]
        changes = self._additive(list(self.space.variables), cost)
        points = tuple((start + added, error, plan) for added, error, plan in changes.points)
        return AdditiveFront(points, changes.exact)

    def _additive(self, paths: Sequence[str], cost: str) -> AdditiveFront:
        """The front of the sums over modules; points are added cost, error, and a decision.

        Modules may contain others. The choices of an outer module are its own, combined with each
        point of the front of the modules inside.
        """
        choices: dict[str, list[Choice]] = {}
        decisions: dict[str, Decision] = {}  # name of a combination → its decision
        exact = True
        for path in paths:
            if any(other != path and tags.is_under(path, other) for other in paths):
                continue  # combined with the module around it
            inside = [other for other in paths if other != path and tags.is_under(other, path)]
            inner = _NO_MODULES if not inside else self._additive(inside, cost)
            exact = exact and inner.exact
            choices[path] = []
            for name in self.space.variables[path]:
                alone = self._choice(path, name, cost)
                points = inner.points
                if self.space.choices[name].is_dropped:
                    # The modules inside are removed, too: any of their points will do.
                    points = ((0.0, 0.0, points[0][2]),)
                for number, (size, error, decided) in enumerate(points):
                    key = f"{number} {name} {path}"
                    choices[path].append(Choice(key, alone.size + size, alone.error + error))
                    decisions[key] = {path: name, **decided}
        front = additive_front(choices)
        points_of_front: list[tuple[float, float, Decision]] = []
        for size, error, chosen in front.points:
            decision: dict[str, str] = {}
            for key in chosen.values():
                decision |= decisions[key]
            points_of_front.append((size, error, decision))
        return AdditiveFront(tuple(points_of_front), exact and front.exact)

    def first_plans(self, fronts: Mapping[str, AdditiveFront], count: int) -> list[Decision]:
        """The plans to measure first: one choice for all modules, and plans along each front."""
        plans = list(self.space.uniform().values())
        each_count = math.ceil(count / len(fronts))
        for front in fronts.values():
            points = [(size, error) for size, error, _ in front.points]
            plans += [front.points[place][2] for place in spread_over(points, each_count)]
        return plans

    def refined(self, count: int) -> list[Decision]:
        """Plans next to the measured front; none for modules inside other modules.

        Errors of modules inside one that may be dropped do not add up.
        """
        if self.space.frames:
            return []
        cost = next((name for name in self._objectives if name in _COSTS), "size")
        alone: dict[str, list[Choice]] = {}
        for path, names in self.space.variables.items():
            alone[path] = [self._choice(path, name, cost) for name in names]
        plans: list[MeasuredPlan] = []
        for trial in self._study.complete():
            measured = Measurement.from_dict(trial.user_attrs["measured"])
            plans.append(MeasuredPlan(trial.params, _values(measured)[cost], self._loss(measured)))
        return [*refined_plans(plans, alone, count)]

    def _loss(self, measured: Measurement) -> float:
        """The number that plans next to the front lower: the error, or with the metric alone its loss."""
        best = self._measurer.original.metric
        if "error" in self._objectives or measured.metric is None or best is None:
            return measured.error
        # A plan that loses nothing has neighbours, too: a small loss can be scaled, zero cannot.
        return max(best - measured.metric, abs(best) * _NO_LOSS)

    def measured(self, decision: Decision) -> tuple[Sequence[float], Mapping[str, Any]]:
        """The values of the objectives for a decision, and the whole measurement."""
        measurement = self._measure(self.space.treatment(decision))
        try:
            self._numbers(measurement)
        except InputError as error:
            kept = kept_precision().name
            changed = [
                f"{path or '(root)'} in {name}" for path, name in decision.items() if name != kept
            ]
            listed = ", ".join(changed[:_MOST_NAMED])
            if len(changed) > _MOST_NAMED:
                listed += f" and {len(changed) - _MOST_NAMED} more"
            raise InputError(f"{listed}: {error}") from error
        values = _values(measurement)
        objectives = [values[name] for name in self._objectives]
        return objectives, {"measured": measurement.to_dict()}

    def _numbers(self, measurement: Measurement) -> Measurement:
        """Return a measurement if its objectives are finite; raise an `InputError` otherwise."""
        values = _values(measurement)
        for name in self._objectives:
            if not math.isfinite(values[name]):
                problem = f"{name} is {values[name]}"
                if name == "error":
                    problem += (
                        ": outputs have NaN or infinities where those of the original have none"
                    )
                raise InputError(problem)
        return measurement

    def results(self, fronts: Iterable[AdditiveFront]) -> tuple[Trial, ...]:
        """The finished trials of all processes, and the whole model with each choice."""
        trials = list(self.finished(fronts))
        labels: dict[str, None] = {}
        for key, names in self.space.variables.items():
            labels.update(dict.fromkeys(map(self.space.targets[key].label, names)))
        for label in labels:
            whole = self._whole(label)
            if whole is not None:
                trials.append(whole)
        return tuple(trials)

    def finished(self, fronts: Iterable[AdditiveFront]) -> tuple[Trial, ...]:
        """The finished trials of all processes; nothing is measured."""
        of_front = [dict(plan) for front in fronts for _, _, plan in front.points]
        uniform = list(self.space.uniform().values())
        trials = []
        for trial in self._study.complete():
            decision = {path: str(trial.params[path]) for path in self.space.variables}
            origin = "sampler"
            if decision in of_front:
                origin = "front"
            elif decision in uniform:
                origin = "uniform"
            measured = Measurement.from_dict(trial.user_attrs["measured"])
            treatment = self.space.treatment(decision)
            trials.append(self._trial(trial.number, treatment, measured, origin))
        return tuple(trials)

    def _trial(
        self, number: int | None, treatment: Treatment, measured: Measurement, origin: str
    ) -> Trial:
        values = _values(measured)
        spreads: dict[str, float] = {}
        for name in self._objectives:
            spread = measured.spread.get(_FIELDS.get(name, name))
            if spread is not None:
                spreads[name] = spread
        removed, plan = treatment.written
        return Trial(
            number,
            plan,
            {name: values[name] for name in self._objectives},
            origin,
            measured.to_dict(),
            removed,
            spreads,
        )

    def repeated(self, search: Search, repeats: int) -> Search:
        """Measure the plans of the front again: medians and spreads of their values."""
        trials, done = list(search.trials), set[int]()
        # New values may bring other plans onto the front; each is measured again once.
        while waiting := search.front_places - done:
            for place in counted(sorted(waiting), "plans of the front again"):
                done.add(place)
                trials[place] = self._again(trials[place], repeats)
            search = replace(search, trials=tuple(trials))
        note = f"{len(done)} plans were measured {repeats} more times: {_spread_note(search)}"
        return replace(search, notes=(*search.notes, note))

    def _again(self, trial: Trial, repeats: int) -> Trial:
        from htp_export.capabilities.prune.sparsities import sparsities_of
        from htp_export.capabilities.quantize.precisions import precisions_of

        precisions = precisions_of(trial.plan) if trial.plan else {}
        treatment = Treatment(sparsities_of(trial.prune).weights, precisions)
        measured = self._measurer.again(treatment.quantize, treatment.prune, repeats)
        return self._trial(trial.number, treatment, self._numbers(measured), trial.origin)

    def _whole(self, label: str) -> Trial | None:
        """The whole model with one choice, including nodes outside the modules of the space."""
        choice = self.space.whole(label)
        removed = {".": choice.sparsity} if choice.sparsity else {}
        treatment = Treatment(removed, {".": choice.precision})
        try:
            measured = self._numbers(self._measure(treatment))
        except (InputError, ToolError):
            return None
        return self._trial(None, treatment, measured, "uniform")


def _spread_note(search: Search) -> str:
    """Which values of repeated measurements differ, and which plans are tied by that."""
    differ = list(dict.fromkeys(name for trial in search.trials for name in trial.spread))
    if not differ:
        return "no value differed"
    note = f"medians and half the range of {', '.join(differ)}"
    without_spread = [replace(trial, spread={}) for trial in search.trials]
    exact = Search(search.objectives, tuple(without_spread), 0, {}).pareto
    tied = [trial.name for trial in search.pareto if replace(trial, spread={}) not in exact]
    if tied:
        note += f"; no plan is ahead by more than that of {', '.join(tied)}"
    return note


def _values(measured: Measurement) -> dict[str, float]:
    """Objective → value; NaN for values that were not measured."""
    values: dict[str, float] = {}
    for name in OBJECTIVES:
        value = getattr(measured, _FIELDS.get(name, name))
        values[name] = math.nan if value is None else float(value)
    return values
