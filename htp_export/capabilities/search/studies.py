"""Optuna studies that several processes and machines work on, and that survive processes that die.

A study has a fixed number of trials. Every process that opens its storage takes the next one until all are finished:
there is no main process. If a process dies (see ``heartbeats``), its trial is marked as failed, and its parameters are
enqueued again.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from htp_export.capabilities.search.heartbeats import BEAT, Heartbeat, Watch, beating
from htp_export.capabilities.search.storages import need_optuna, open_study, quiet_optuna
from htp_export.errors import HtpExportError, InputError, first_line

if TYPE_CHECKING:
    import optuna

__all__ = ["SAMPLERS", "SharedStudy"]

SAMPLERS = ("tpe", "nsga2", "random", "grid")
_RUN = "run "
_RETRIED = "taken up again"
_PROBLEM = "problem"
_MOST_RETRIES = 3
"""How often a trial is taken up again: one that kills every process that runs it must end."""

Measured: TypeAlias = tuple[Sequence[float], Mapping[str, Any]]
Measure: TypeAlias = Callable[[Mapping[str, str]], Measured]
"""Parameters → the values of the objectives, and facts to keep with the trial."""


class SharedStudy:
    """A study with a number of trials that all processes together work off.

    Args:
        storage: As for `open_storage`.
        name: Its name in the storage.
        directions: ``minimize`` or ``maximize`` for each objective.
        heartbeat: How processes show that they are alive.
        facts: What the trials measure. A study with other facts is refused.

    Raises:
        InputError: If Optuna is not installed, or the storage has another study of this name.
    """

    def __init__(
        self,
        storage: Any,
        name: str,
        directions: Sequence[str],
        *,
        heartbeat: Heartbeat,
        facts: Mapping[str, Any],
    ) -> None:
        self._space: dict[str, list[str]] = {}
        self._runs: dict[str, dict[str, Any]] = {}
        self._heartbeat = heartbeat
        self._watch = Watch(heartbeat.grace)
        self.study: Any = open_study(storage, name, directions)
        self._check_facts({**facts, "directions": list(directions)})

    def _check_facts(self, facts: Mapping[str, Any]) -> None:
        known = self.study.user_attrs
        for key, value in facts.items():
            if key not in known:
                self.study.set_user_attr(key, value)
            elif known[key] != value:
                raise InputError(
                    f"study {self.study.study_name!r} is of another search: its {key} differs; give another name"
                )

    def get(self, key: str) -> dict[str, Any] | None:
        """The result of a run that any process has finished; see ``FinishedRuns``."""
        short = _short(key)
        if short not in self._runs:
            self._runs = {name: value for name, value in self.study.user_attrs.items() if name.startswith(_RUN)}
        return self._runs.get(short)

    def add(self, key: str, result: dict[str, Any]) -> None:
        """Keep the result of a run, for all processes."""
        self._runs[_short(key)] = result
        self.study.set_user_attr(_short(key), result)

    def choose_from(self, space: Mapping[str, Sequence[str]], sampler: str, seed: int) -> None:
        """Set what trials choose from, and how.

        Args:
            space: Parameter → its choices.
            sampler: One of `SAMPLERS`.
            seed: Its seed. A process that joins has another one, so that it does not repeat the trials of the others.

        Raises:
            InputError: If there is no such sampler, or the study chooses from something else.
        """
        self._space = {key: list(choices) for key, choices in space.items()}
        self._check_facts({"space": self._space})
        joined = len(self.study.get_trials(deepcopy=False))
        self.study.sampler = _sampler(need_optuna(), sampler, seed + joined, self._space)

    def enqueue(self, plans: Sequence[Mapping[str, str]]) -> None:
        """Add trials to be run first; those that the study has, in whatever state, are left out."""
        with quiet_optuna(need_optuna()):
            for plan in plans:
                self.study.enqueue_trial(dict(plan), skip_if_exists=True)

    def work(
        self,
        measure: Measure,
        trials: int,
        report: Callable[[int], None] = lambda done: None,
    ) -> None:
        """Run trials until the study has as many finished ones as asked for, also those of processes that died.

        It ends earlier if there is nothing left to measure: if all combinations of choices are.

        Args:
            measure: Measures a plan.
            trials: How many.
            report: Called with the number of finished trials.
        """
        optuna = need_optuna()
        with quiet_optuna(optuna):
            while True:
                self._take_up_dead()
                states = [trial.state for trial in self.study.get_trials(deepcopy=False)]
                finished = sum(state in (_state("COMPLETE"), _state("FAIL")) for state in states) - self._retried()
                running, waiting = states.count(_state("RUNNING")), states.count(_state("WAITING"))
                report(finished)
                if not waiting and (finished >= trials or self._exhausted()):
                    return
                if waiting or finished + running < trials:
                    self._run_one(measure)
                elif running:
                    time.sleep(min(self._heartbeat.interval, 1.0))
                else:
                    return

    def _exhausted(self) -> bool:
        """Whether every combination of choices is measured."""
        return len(self.complete()) >= math.prod(map(len, self._space.values()))

    def complete(self) -> list[optuna.trial.FrozenTrial]:
        """The trials that were measured; of trials with equal parameters, the first."""
        found: dict[str, optuna.trial.FrozenTrial] = {}
        for trial in self.study.get_trials(deepcopy=False, states=(_state("COMPLETE"),)):
            found.setdefault(repr(sorted(trial.params.items())), trial)
        return list(found.values())

    @property
    def failed(self) -> int:
        """Trials that could not be measured; not those of dead processes, which were taken up again."""
        return len(self.study.get_trials(deepcopy=False, states=(_state("FAIL"),))) - self._retried()

    @property
    def problems(self) -> list[str]:
        """Why trials could not be measured, each reason once."""
        failed = self.study.get_trials(deepcopy=False, states=(_state("FAIL"),))
        return list(dict.fromkeys(trial.user_attrs[_PROBLEM] for trial in failed if _PROBLEM in trial.user_attrs))

    def _retried(self) -> int:
        """Trials that stand for one that failed since its process died."""
        return sum(_RETRIED in trial.user_attrs for trial in self.study.get_trials(deepcopy=False))

    def _run_one(self, measure: Measure) -> None:
        def objective(trial: optuna.Trial) -> Sequence[float]:
            with beating(trial, self._heartbeat.interval):
                plan = {key: trial.suggest_categorical(key, choices) for key, choices in self._space.items()}
                known = self._measured(plan)
                values, facts = known if known is not None else self._values(trial, measure, plan)
                for key, value in facts.items():
                    trial.set_user_attr(key, value)
            return values

        self.study.optimize(objective, n_trials=1, catch=(HtpExportError,))

    def _values(self, trial: optuna.Trial, measure: Measure, plan: Mapping[str, Any]) -> Measured:
        try:
            return measure({key: str(value) for key, value in plan.items()})
        except HtpExportError as error:
            trial.set_user_attr(_PROBLEM, first_line(error))
            raise

    def _measured(self, plan: Mapping[str, Any]) -> Measured | None:
        """The values of a trial with the same parameters: samplers repeat themselves."""
        for trial in self.study.get_trials(deepcopy=False, states=(_state("COMPLETE"),)):
            if trial.params == plan:
                facts = {key: value for key, value in trial.user_attrs.items() if key not in (BEAT, _RETRIED)}
                return list(trial.values or ()), facts
        return None

    def _take_up_dead(self) -> None:
        """Enqueue the trials of dead processes again."""
        for trial in self._watch.dead(self.study.get_trials(deepcopy=False, states=(_state("RUNNING"),))):
            self._take_up(trial)

    def _take_up(self, trial: optuna.trial.FrozenTrial) -> None:
        times = trial.user_attrs.get(_RETRIED, 0) + 1
        try:
            self.study.tell(trial.number, state=_state("FAIL"))
        except (ValueError, RuntimeError):
            return  # its process was only slow, or another one was first
        if times <= _MOST_RETRIES:
            params = dict(trial.params) or dict(trial.system_attrs.get("fixed_params", {}))
            self.study.enqueue_trial(params, user_attrs={_RETRIED: times})


def _short(key: str) -> str:
    """A key that every storage takes: databases limit its length."""
    return f"{_RUN}{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def _state(name: str) -> Any:
    return getattr(need_optuna().trial.TrialState, name)


def _sampler(optuna: Any, name: str, seed: int, space: Mapping[str, Sequence[str]]) -> Any:
    match name:
        case "tpe":
            return optuna.samplers.TPESampler(seed=seed)
        case "nsga2":
            return optuna.samplers.NSGAIISampler(seed=seed)
        case "random":
            return optuna.samplers.RandomSampler(seed=seed)
        case "grid":
            return optuna.samplers.GridSampler(dict(space), seed=seed)
    raise InputError(f"there is no sampler {name!r}; there are {', '.join(SAMPLERS)}")
