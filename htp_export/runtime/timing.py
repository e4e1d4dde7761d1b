"""Times of runs that can be compared: those of several sessions alternate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

from htp_export.runtime.arrays import Array
from htp_export.runtime.sessions import Session

_WARMUP = 2


def median_times(sessions: Sequence[Session], feeds: Sequence[Mapping[str, Array]], runs: int) -> list[float]:
    """The median time of a run of each session in ms, after some to warm up.

    The sessions run in turn, so that what else the machine does slows down all of them.
    """
    values = [session.values(feed) for session, feed in zip(sessions, feeds, strict=True)]
    times: list[list[float]] = [[] for _ in sessions]
    for _ in range(_WARMUP + runs):
        for session, given, taken in zip(sessions, values, times, strict=True):
            begun = time.perf_counter()
            session.run_values(given)
            taken.append((time.perf_counter() - begun) * 1000)
    return [statistics.median(taken[_WARMUP:]) for taken in times]
