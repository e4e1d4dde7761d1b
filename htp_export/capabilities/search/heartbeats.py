"""How the processes of a study see that one of them has died.

Each process writes a *heartbeat* into the trial that it runs, a number that grows, from a thread of its own. If another
process sees the same number for longer than ``grace``, the process is taken to be dead. Heartbeats are attributes of
trials, so that this works with every storage of Optuna (its own heartbeat needs a relational database). Clocks of
different machines are not compared.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import optuna

__all__ = ["BEAT", "Heartbeat", "Watch", "beating"]

BEAT = "heartbeat"
"""Attribute of a trial."""


@dataclass(frozen=True)
class Heartbeat:
    """How a process shows that it is alive.

    Attributes:
        interval: Seconds between two heartbeats.
        grace: Seconds without a change after which a process is taken to be dead.
    """

    interval: float = 15.0
    grace: float = 60.0


class Watch:
    """Finds trials whose processes have died.

    Args:
        grace: Seconds without a change after which a process is taken to be dead.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._seen: dict[int, tuple[Any, float]] = {}

    def dead(self, running: Iterable[optuna.trial.FrozenTrial]) -> list[optuna.trial.FrozenTrial]:
        """Of trials that run, those whose heartbeat has not changed for too long; each once."""
        now = time.monotonic()
        found = []
        for trial in running:
            beat = trial.user_attrs.get(BEAT)
            before, since = self._seen.get(trial.number, (object(), now))
            if before != beat:
                self._seen[trial.number] = (beat, now)
            elif now - since > self._grace:
                del self._seen[trial.number]
                found.append(trial)
        return found


@contextlib.contextmanager
def beating(trial: optuna.Trial, interval: float) -> Iterator[None]:
    """Write heartbeats into a trial while a block runs."""
    ended = threading.Event()

    def beat() -> None:
        count = 0
        while True:
            count += 1
            with contextlib.suppress(Exception):  # a storage that is out of reach for a moment ends no search
                trial.set_user_attr(BEAT, f"{os.getpid()}: {count}")
            if ended.wait(interval):
                return

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
