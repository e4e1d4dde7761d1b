"""Times of a model that fit together: kernels, and runs with and without a profiler."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from htp_export.capabilities.profile.kernels import Kernel

__all__ = ["Measurement", "consistent"]

_log = logging.getLogger(__name__)

_ATTEMPTS = 3
_MOST = 2.0  # under a steady load both ratios stay below 1.5, also with kernels of a microsecond
_PROFILER_MS = 0.01  # what the profiler may add to the time of a kernel, which shows in very short ones


@dataclass(frozen=True)
class Measurement:
    """The times of one session.

    Attributes:
        kernels: What ran, with the times of one run.
        profiled: The times of the runs with the profiler, in ms.
        plain: The times of the runs without it, in ms.
        providers: The execution providers in use.
        timing: As of `Profile`.
        at_once: How many kernels may run at the same time.
    """

    kernels: Sequence[Kernel]
    profiled: Sequence[float]
    plain: Sequence[float]
    providers: tuple[str, ...] = ()
    timing: str = "kernels"
    at_once: int = 1

    @property
    def kernels_ms(self) -> float:
        """The sum of the kernels."""
        return sum(kernel.ms for kernel in self.kernels)

    @property
    def end_to_end_ms(self) -> float:
        """The median of the runs without the profiler."""
        return statistics.median(self.plain)

    @property
    def profiled_ms(self) -> float:
        """The median of the runs with the profiler."""
        return statistics.median(self.profiled)

    @property
    def apart(self) -> float:
        """How many times the sum of the kernels is the time of a run, or a run is the one with the profiler.

        Neither can be much more than 1, unless something else kept the processor busy in one of them.

        Examples:
            >>> Measurement((), profiled=[1.0, 1.0], plain=[30.3, 30.3]).apart
            30.0
        """
        overhead = _PROFILER_MS * sum(kernel.launches for kernel in self.kernels)
        of_kernels = self.kernels_ms / (self.at_once * self.end_to_end_ms + overhead)
        return max(of_kernels, self.end_to_end_ms / (self.profiled_ms + _PROFILER_MS))


def consistent(measure: Callable[[], Measurement]) -> tuple[Measurement, tuple[str, ...]]:
    """Measure again, up to three times in all, while the times contradict each other.

    Args:
        measure: Runs the model in a new session.

    Returns:
        The first measurement without a contradiction; otherwise the one with the smallest, and a line that states it.
    """
    found: list[Measurement] = []
    while len(found) < _ATTEMPTS:
        found.append(measure())
        if found[-1].apart <= _MOST:
            return found[-1], ()
        _log.info("kernels and runs contradict each other by a factor of %.1f: measured again", found[-1].apart)
    best = min(found, key=lambda measurement: measurement.apart)
    return best, (
        f"the times contradict each other in each of {_ATTEMPTS} measurements: {best.kernels_ms:.3f} ms in kernels, "
        f"{best.end_to_end_ms:.3f} ms a run, {best.profiled_ms:.3f} ms under the profiler; "
        "other work keeps the processor busy: compare modules by their share, or measure again on an idle machine",
    )
