"""The result of a search: measured plans and their Pareto front, also from ``front.json``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from htp_export.capabilities.search.fronts import pareto
from htp_export.errors import InputError, described
from htp_export.reporting.columns import Column, si
from htp_export.reporting.result import PlainData, Result, Table
from htp_export.reporting.tag_facts import TagFacts
from htp_export.runtime.arrays import Array

OBJECTIVES = ("error", "size", "bits", "latency", "metric", "nonzeros", "tokens", "time")
OF_DECODERS = ("tokens", "time")
"""Objectives that run the loop of token generation."""
LARGER_IS_BETTER = ("metric", "tokens")
ORIGINS = ("front", "uniform", "sampler")
_KEPT = "fp32"


@dataclass(frozen=True)
class Trial(PlainData):
    """A measured plan.

    Attributes:
        number: Its number in the study; None for the whole model with one choice.
        plan: Selector → name of a precision, or a mapping of its fields: a plan for ``quantize``.
        values: Objective → value: ``error``, ``size`` in bytes, ``latency`` in ms, ``metric``,
            ``bits``, ``nonzeros``, ``tokens``, a share, and ``time`` in ms.
        origin: ``front`` for the front of the sums, ``uniform``, or ``sampler``.
        measured: The whole measurement, as plain data.
        prune: Selector → sparsity, applied before: a plan for ``prune``; empty without pruning.
        spread: Objective → half the range of its values, if it is the median of repeated
            measurements that differ.
    """

    number: int | None
    plan: Mapping[str, Any]
    values: Mapping[str, float]
    origin: str
    measured: Mapping[str, Any]
    prune: Mapping[str, str] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name in pictures and pages."""
        return "whole model" if self.number is None else f"trial {self.number}"

    @property
    def choices(self) -> dict[str, str]:
        """Selector → name of the choice: ``int8``, ``2:4+int8``, ``drop``."""
        choices: dict[str, str] = {}
        for path in dict.fromkeys((*self.prune, *self.plan)):
            value = self.plan.get(path, _KEPT)
            precision = value if isinstance(value, str) else value["precision"]
            if path not in self.prune:
                choices[path] = precision
            elif precision == _KEPT:
                choices[path] = self.prune[path]
            else:
                choices[path] = f"{self.prune[path]}+{precision}"
        return choices

    @property
    def counted(self) -> str:
        """The number of modules of each choice."""
        counts = Counter(self.choices.values()).most_common()
        return ", ".join(f"{count} {name}" for name, count in counts)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The steps of ``pipeline`` that apply the plan."""
        kept = all(value == _KEPT for value in self.plan.values())
        plans = {"prune": dict(self.prune), "quantize": {} if kept else dict(self.plan)}
        return [{step: {"plan": plan}} for step, plan in plans.items() if plan]


class _Measured(Protocol):
    """A measured plan or candidate."""

    @property
    def values(self) -> Mapping[str, float]: ...

    @property
    def spread(self) -> Mapping[str, float]: ...


M = TypeVar("M", bound=_Measured)


class Front(Result, Generic[M]):
    """The base of results with a Pareto front: trials with a value for each objective."""

    objectives: tuple[str, ...]
    trials: tuple[M, ...]

    def table(self) -> Table:
        """The trials on the front."""
        raise NotImplementedError

    @property
    def pareto(self) -> tuple[M, ...]:
        """The trials that no other trial dominates, sorted by the last objective.

        A trial dominates another one if it is worse in no objective and better in at least one; if
        values have a spread, better by more than the larger spread of the two.
        """
        best = [self.trials[place] for place in sorted(self.front_places)]
        return tuple(sorted(best, key=lambda trial: self._signed(trial, self.objectives[-1])))

    @property
    def front_places(self) -> set[int]:
        """The places of these trials in `trials`."""
        points: list[list[float]] = []
        spreads: list[list[float]] = []
        for trial in self.trials:
            points.append([self._signed(trial, name) for name in self.objectives])
            spreads.append([trial.spread.get(name, 0.0) for name in self.objectives])
        return {*pareto(points, spreads)}

    def _signed(self, trial: M, objective: str) -> float:
        """The value of an objective, negative if larger is better."""
        value = trial.values[objective]
        return -value if objective in LARGER_IS_BETTER else value


@dataclass(frozen=True)
class Search(Front[Trial]):
    """The result of `search`.

    Attributes:
        objectives: The objectives, in the order of the argument.
        trials: The measured plans: first those of the study in its order, then the whole model with
            each choice.
        failed: Number of trials that could not be measured.
        modules: Module path → names of its choices.
        predicted: Points of the front of the additive problem: the first objective of ``size``,
            ``bits``, ``latency``, ``time`` and ``nonzeros``, and error, as sums over modules.
        exact: Whether these are all points of that front.
        notes: Remarks on the data, and on choices that modules cannot have, a line each.
        tags: The tags of the model.
        prompts: Random inputs of a decoder: input name → ids, for each run; empty with data.
    """

    derived = ("summary", "pareto")

    objectives: tuple[str, ...]
    trials: tuple[Trial, ...]
    failed: int
    modules: Mapping[str, Sequence[str]]
    predicted: tuple[tuple[float, float], ...] = ()
    exact: bool = True
    notes: tuple[str, ...] = ()
    tags: TagFacts | None = None
    prompts: tuple[Mapping[str, Array], ...] = field(default=(), repr=False)

    @property
    def summary(self) -> str:
        """The result in one line."""
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{len(self.pareto)} of {len(self.trials)} plans are on the front{failed}"

    def table(self) -> Table:
        """The trials on the front."""
        spread: Column[Trial] = Column("spread", "spread", right=False, text=_spread)
        columns = trial_columns(self.objectives)
        noisy = any(trial.spread for trial in self.pareto)
        return [*columns[:-2], *([spread] if noisy else []), *columns[-2:]], self.pareto


class SearchInterrupted(KeyboardInterrupt):
    """A search was interrupted.

    Attributes:
        result: The search so far, with the trials of all processes.
    """

    def __init__(self, result: Front[Any]) -> None:
        super().__init__(result.summary)
        self.result = result


def trial_columns(objectives: Sequence[str]) -> list[Column[Trial]]:
    """The columns of a table of trials."""
    values = [value_column(name) for name in objectives]
    number: Column[Trial] = Column(
        "number", "trial", lambda trial: "-" if trial.number is None else str(trial.number)
    )
    return [
        number,
        *values,
        Column("origin", "from", right=False),
        Column("counted", "modules", right=False),
    ]


def _spread(spread: Mapping[str, float]) -> str:
    return ", ".join(f"{name} ±{value:.3g}" for name, value in spread.items())


_TEXTS = {
    "error": "{:.2e}".format,
    "size": lambda value: si(value, "B"),
    "latency": "{:.3f}".format,
    "time": "{:.3f}".format,
    "tokens": "{:.2%}".format,
    "nonzeros": "{:,.0f}".format,
    "bits": "{:,.0f}".format,
    "metric": "{:.4f}".format,
    "parameters": si,
    "flops": si,
}
"""Objective → how its values are drawn."""


def value_column(name: str) -> Column[Any]:
    """The column of an objective."""
    title = f"{name} ms" if name in ("latency", "time") else name
    return Column(name, title, lambda trial: trial.values[name], text=_TEXTS[name])


def search_from(data: object) -> Search | None:
    """Parse the plain data of ``Search.to_dict`` or ``front.json``; None for another result.

    The data may come from any source: an invalid search is an `InputError`. Tags of the model are
    not parsed.

    Examples:
        >>> trial = Trial(0, {"fc": "int8"}, {"error": 0.01, "size": 100.0}, "front", {})
        >>> found = search_from(Search(("error", "size"), (trial,), 0, {"fc": ("int8",)}).to_dict())
        >>> found.trials[0].plan, search_from({"modules": {}})
        ({'fc': 'int8'}, None)
    """
    if not isinstance(data, Mapping) or not {"objectives", "trials", "pareto"} <= data.keys():
        return None
    if "space" in data:  # it is one of architectures
        return None
    try:
        objectives = tuple(data["objectives"])
        if not objectives or not set(objectives) <= set(OBJECTIVES):
            raise ValueError(f"objectives are {', '.join(OBJECTIVES)}")
        trials = tuple(_trial(entry, objectives) for entry in data["trials"])
        modules = {str(path): tuple(map(str, choices)) for path, choices in data["modules"].items()}
        notes = tuple(map(str, data.get("notes", ())))
        return Search(objectives, trials, int(data.get("failed", 0)), modules, notes=notes)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"this is no result of a search: {described(error)}") from error


def _trial(entry: Mapping[str, Any], objectives: tuple[str, ...]) -> Trial:
    """Parse a trial of `search_from`."""
    values = {name: float(entry["values"][name]) for name in objectives}
    number, origin = entry["number"], entry["origin"]
    if origin not in ORIGINS or not (number is None or isinstance(number, int)):
        raise ValueError(f"a trial has a number, and comes from {', '.join(ORIGINS)}")
    plan = {str(selector): _precision(precision) for selector, precision in entry["plan"].items()}
    removed = {str(selector): str(value) for selector, value in entry.get("prune", {}).items()}
    spread: dict[str, float] = {}
    for name in objectives:
        value = float(entry.get("spread", {}).get(name, 0))
        if value > 0:
            spread[name] = value
    return Trial(number, plan, values, origin, dict(entry.get("measured", {})), removed, spread)


def _precision(precision: object) -> str | dict[str, Any]:
    """Check a precision of a plan: a name, or a mapping with the name."""
    if isinstance(precision, Mapping) and isinstance(precision.get("precision"), str):
        return dict(precision)
    if not isinstance(precision, str):
        raise TypeError("a plan gives each selector a precision")
    return precision
