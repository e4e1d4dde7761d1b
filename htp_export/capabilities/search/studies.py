"""Optuna studies on which several processes and machines work, and which survive their crashes.

Each process that opens a storage runs the next trial until all are finished: there is no main
process. Trials of crashed processes are repeated: in a database, Optuna's heartbeats detect them;
elsewhere, they are the trials that still run when nothing else is left to do.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from htp_export.errors import FileError, HtpExportError, InputError, first_line
from htp_export.extras import required
from htp_export.files.filesystem import opened_plain
from htp_export.process.interrupts import stems_from_interrupt

if TYPE_CHECKING:
    import optuna

SAMPLERS = {
    "tpe": "TPESampler",
    "nsga2": "NSGAIISampler",
    "random": "RandomSampler",
    "grid": "GridSampler",
}
"""Name → class in ``optuna.samplers``."""

_RUN = "run "
"""The prefix of attributes of a study that store finished runs."""

_TAKEN_UP = "taken up again"
"""Attribute of a trial: the numbers of the trials that it repeats."""

_PROBLEM = "problem"
"""Attribute of a trial: the reason why it could not be measured."""

_MOST_RETRIES = 3
"""How often a trial is repeated: one that kills every process that runs it must end."""

_LARGEST_GRID = 1_000_000
"""Combinations of a grid: Optuna keeps a list of them, of about 100 bytes each."""

Measured: TypeAlias = tuple[Sequence[float], Mapping[str, Any]]
Measure: TypeAlias = Callable[[Mapping[str, str]], Measured]
"""Parameters → the values of the objectives, and attributes of the trial."""


def _need_optuna() -> Any:
    return required("optuna", "a search")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Optuna's log of every trial, and its warnings of experimental features."""
    optuna = _need_optuna()
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(before, optuna.logging.ERROR))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


def open_study(
    storage: Any, name: str, directions: Sequence[str], grace: float = 60.0
) -> optuna.Study:
    """Open a study in a storage, or create it.

    Args:
        storage: A database URL (``sqlite:///study.db``, ``postgresql://...``), ``grpc://host:port``
            of a proxy (``optuna.storages.run_grpc_proxy_server``), the path of a journal file, an
            Optuna storage, or None for a storage in memory.
        name: The name of the study.
        directions: ``minimize`` or ``maximize`` for each objective.
        grace: Seconds without a heartbeat after which a database considers a process dead.
    """
    library = _need_optuna()
    is_file = isinstance(storage, str | os.PathLike) and "://" not in os.fspath(storage)
    if is_file:
        _check_journal(Path(storage))
    with _quiet():
        try:
            if isinstance(storage, str | os.PathLike):
                opened = _opened(library, os.fspath(storage), grace)
            else:
                opened = library.storages.InMemoryStorage() if storage is None else storage
            study: optuna.Study = library.create_study(
                storage=opened, study_name=name, directions=list(directions), load_if_exists=True
            )
        except Exception as error:
            # SQLAlchemy, its drivers and gRPC share no base; gRPC has a method for the text.
            details = getattr(error, "details", None)
            reason = str(details()) if callable(details) else first_line(error)
            if is_file:
                raise FileError(storage, f"is no journal of Optuna: {reason}") from error
            named = storage if isinstance(storage, str) else type(storage).__name__
            raise InputError(f"storage {named!r} cannot be opened: {reason}") from error
    return study


def _check_journal(file: Path) -> None:
    """Raise a `FileError` for a file that Optuna did not write: Optuna would append to any text."""
    if not file.absolute().parent.is_dir():
        raise FileError(file, f"its folder does not exist: {file.absolute().parent}")
    if os.path.lexists(file) and not file.is_file():
        raise FileError(file, "is no file; name a file for the journal")
    # if it cannot be read, Optuna reports why
    with contextlib.suppress(OSError), opened_plain(file) as stream:
        first = stream.readline()
        if first and b'"op_code"' not in first:
            raise FileError(file, "is no journal of Optuna; name another file")


def _opened(optuna: Any, named: str, grace: float) -> Any:
    if "://" not in named:
        return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(named))
    if named.startswith("grpc://"):
        host, _, port = named.removeprefix("grpc://").partition(":")
        return optuna.storages.GrpcStorageProxy(host=host, port=int(port or 13000))
    class_name, argument = "RetryHeartbeatStaleTrialCallback", "heartbeat_stale_trial_callback"
    if not hasattr(optuna.storages, class_name):  # before Optuna 4.9
        class_name, argument = "RetryFailedTrialCallback", "failed_trial_callback"
    callback = getattr(optuna.storages, class_name)(_MOST_RETRIES)
    # Four heartbeats in the period: one may be late on a busy machine.
    interval = max(1, math.ceil(grace / 4))
    return optuna.storages.RDBStorage(
        named,
        heartbeat_interval=interval,
        grace_period=max(interval, math.ceil(grace)),
        **{argument: callback},
    )


def check_sampler(sampler: str, space: Mapping[str, Sequence[str]]) -> None:
    """Raise an `InputError` for an unknown sampler, and for a grid that is too large for Optuna."""
    if sampler not in SAMPLERS:
        raise InputError(f"there is no sampler {sampler!r}; there are {', '.join(SAMPLERS)}")
    combinations = math.prod(map(len, space.values()))
    if sampler == "grid" and combinations > _LARGEST_GRID:
        raise InputError(
            f"the sampler 'grid' lists all combinations of choices, of which there are {combinations:,}, and at "
            f"most {_LARGEST_GRID:,}: give fewer choices, decide by class, or take another sampler"
        )


class KeptRuns:
    """Results of finished runs by key, stored in a study; without a study, in memory."""

    def __init__(self, study: optuna.Study | None = None) -> None:
        self._study = study
        self._runs: dict[str, dict[str, Any]] = {}

    def get(self, key: str) -> dict[str, Any] | None:
        """The result of a run that any process has finished; None if none has."""
        if _short(key) not in self._runs and self._study is not None:
            self._runs = {
                name: value
                for name, value in self._study.user_attrs.items()
                if name.startswith(_RUN)
            }
        return self._runs.get(_short(key))

    def add(self, key: str, result: dict[str, Any]) -> None:
        """Store the result of a run for all processes."""
        self._runs[_short(key)] = result
        if self._study is not None:
            self._study.set_user_attr(_short(key), result)


def _short(key: str) -> str:
    """A key of limited length, as databases require."""
    return f"{_RUN}{hashlib.sha256(key.encode()).hexdigest()[:32]}"


class SharedStudy:
    """A study whose trials are shared between processes; ``storage`` as for `open_study`.

    A trial of another process is repeated after ``grace`` seconds: in a database, without a
    heartbeat; elsewhere, without any change of the study while nothing else is left to do.
    ``facts`` identify the measurement: a study with other facts is an `InputError`.
    """

    def __init__(
        self,
        storage: Any,
        name: str,
        directions: Sequence[str],
        *,
        grace: float,
        facts: Mapping[str, Any],
    ) -> None:
        self._space: dict[str, list[str]] = {}
        self._grace = grace
        self.study: Any = open_study(storage, name, directions, grace)
        self.runs = KeptRuns(self.study)
        self._check_facts({**facts, "directions": list(directions)})

    def _check_facts(self, facts: Mapping[str, Any]) -> None:
        known = self.study.user_attrs
        for key, value in facts.items():
            if key not in known:
                self.study.set_user_attr(key, value)
            elif known[key] != value:
                problem = f"is of another search: its {key} differs; give another name"
                raise InputError(f"study {self.study.study_name!r} {problem}")

    def choose_from(self, space: Mapping[str, Sequence[str]], sampler: str, seed: int) -> None:
        """Set the parameters with their choices, and the sampler, one of `SAMPLERS`.

        A study with another space is an `InputError`.
        """
        self._space = {key: list(choices) for key, choices in space.items()}
        self._check_facts({"space": self._space})
        create: Any = getattr(_need_optuna().samplers, SAMPLERS[sampler])
        arguments = [self._space] if sampler == "grid" else []
        # A process that joins later gets another seed, so that it chooses other trials.
        number = len(self.study.get_trials(deepcopy=False))
        self.study.sampler = create(*arguments, seed=seed + number)

    def enqueue(self, plans: Sequence[Mapping[str, str]]) -> None:
        """Add trials to be run next, unless the study contains them in any state."""
        with _quiet():
            for plan in plans:
                self.study.enqueue_trial(dict(plan), skip_if_exists=True)

    def work(self, measure: Measure, trials: int, report: Callable[[int], None]) -> None:
        """Run trials until the study has a number of finished ones, of all processes.

        It ends earlier if all combinations of choices are measured. ``report`` is called with the
        number of finished trials.
        """
        optuna = _need_optuna()
        seen: list[Any] = []
        since = 0.0
        with _quiet():
            while True:
                optuna.storages.fail_stale_trials(self.study)
                all_trials = self.study.get_trials(deepcopy=False)
                repeated: set[int] = set()
                for trial in all_trials:
                    repeated.update(trial.user_attrs.get(_TAKEN_UP, ()))
                running = [trial for trial in self._of("RUNNING") if trial.number not in repeated]
                waiting, finished = self._of("WAITING"), len(self._of("COMPLETE")) + self.failed
                report(finished)
                if not waiting and (finished >= trials or self._is_exhausted()):
                    return
                if waiting or finished + len(running) < trials:
                    self._optimize(measure)
                    continue
                # Other processes run the remaining trials: wait for a change, then repeat them.
                states = [trial.state for trial in all_trials]
                if states != seen:
                    seen, since = states, time.monotonic()
                elif time.monotonic() - since > self._grace:
                    self._take_up(running)
                time.sleep(min(self._grace / 4, 1.0))

    def _is_exhausted(self) -> bool:
        """Whether all combinations of choices are measured."""
        return len(self.complete()) >= math.prod(map(len, self._space.values()))

    def _optimize(self, measure: Measure) -> None:
        """Run a trial; if it is interrupted, it is left for the next process."""
        begun: list[int] = []

        def values(trial: optuna.Trial) -> Sequence[float]:
            begun.append(trial.number)
            return self._values(trial, measure)

        try:
            self.study.optimize(values, n_trials=1, catch=(HtpExportError,))
        except BaseException as error:
            # Optuna converts an interrupt to another error while it holds the lock of a journal.
            if stems_from_interrupt(error):
                with contextlib.suppress(Exception):
                    self._take_up([trial for trial in self._of("RUNNING") if trial.number in begun])
            raise

    def _take_up(self, running: Sequence[optuna.trial.FrozenTrial]) -> None:
        """Enqueue trials of other processes again; a plan of a slow process runs twice."""
        for trial in running:
            history = [*trial.user_attrs.get(_TAKEN_UP, ()), trial.number]
            if len(history) <= _MOST_RETRIES:
                params = dict(trial.params) or dict(trial.system_attrs.get("fixed_params", {}))
                self.study.enqueue_trial(params, user_attrs={_TAKEN_UP: history})
            else:
                self.study.tell(trial.number, state=_need_optuna().trial.TrialState.FAIL)

    def _of(self, state: str) -> list[optuna.trial.FrozenTrial]:
        kind = _need_optuna().trial.TrialState[state]
        return list(self.study.get_trials(deepcopy=False, states=(kind,)))

    def complete(self) -> list[optuna.trial.FrozenTrial]:
        """The trials that were measured; of trials with equal parameters, the first."""
        by_plan: dict[str, optuna.trial.FrozenTrial] = {}
        for trial in self._of("COMPLETE"):
            by_plan.setdefault(repr(sorted(trial.params.items())), trial)
        return list(by_plan.values())

    def why_fewer(self, trials: int) -> list[str]:
        """A sentence why fewer plans than trials were measured; empty if as many were."""
        plans = len(self.complete())
        if plans + self.failed >= trials:
            return []
        if self._is_exhausted():
            return [f"{plans} plans are measured, and not {trials}: the space has no others"]
        again = len(self._of("COMPLETE")) - plans
        return [f"{plans} plans are measured, and not {trials}: the sampler chose {again} again"]

    @property
    def failed(self) -> int:
        """The number of trials that could not be measured; crashes of processes do not count."""
        return len(self.failures)

    @property
    def failures(self) -> list[tuple[Mapping[str, str], str]]:
        """The trials that could not be measured: their parameters, and the reason."""
        failures: list[tuple[Mapping[str, str], str]] = []
        for trial in self._of("FAIL"):
            reason = trial.user_attrs.get(_PROBLEM)
            if reason is not None:
                failures.append((trial.params, str(reason)))
        return failures

    @property
    def problems(self) -> list[str]:
        """The reasons why trials could not be measured, each once."""
        return list(dict.fromkeys(reason for _, reason in self.failures))

    def _values(self, trial: optuna.Trial, measure: Measure) -> Sequence[float]:
        plan = {
            key: str(trial.suggest_categorical(key, choices))
            for key, choices in self._space.items()
        }
        try:
            values, facts = measure(plan)
        except HtpExportError as error:
            trial.set_user_attr(_PROBLEM, first_line(error))
            raise
        for key, value in facts.items():
            trial.set_user_attr(key, value)
        return values
