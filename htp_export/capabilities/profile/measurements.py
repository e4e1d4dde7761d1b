"""What an engine measures, times that fit together, and what an engine of another package is."""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from htp_export.capabilities.profile.kernels import Kernel
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.inputs import Feed

_log = logging.getLogger(__name__)

_ATTEMPTS = 3
_MOST = 2.0  # under a steady load both ratios stay below 1.5, also with kernels of a microsecond
_PROFILER_MS = 0.01  # what the profiler may add to the time of a kernel, which shows in very short ones


@dataclass(frozen=True)
class Measurement:
    """What an engine measured of a model.

    Attributes:
        kernels: What ran, with the times of one run.
        profiled: The times of the runs with the profiler, in ms; empty where only those of kernels are known.
        plain: The times of the runs without it, in ms; empty as these.
        providers: The execution providers or devices in use.
        timing: As of `Profile`.
        runs: Number of measured runs; 0 if it is not known.
        at_once: How many kernels may run at the same time.
        notes: What the times do not say, a line each.
    """

    kernels: Sequence[Kernel]
    profiled: Sequence[float] = ()
    plain: Sequence[float] = ()
    providers: tuple[str, ...] = ()
    timing: str = "kernels"
    runs: int = 0
    at_once: int = 1
    notes: tuple[str, ...] = ()

    @property
    def kernels_ms(self) -> float:
        """The sum of the kernels."""
        return sum(kernel.ms for kernel in self.kernels)

    @property
    def end_to_end_ms(self) -> float:
        """The median of the runs without the profiler; the sum of the kernels where it is not known."""
        return statistics.median(self.plain) if self.plain else self.kernels_ms

    @property
    def profiled_ms(self) -> float:
        """The median of the runs with the profiler; the sum of the kernels where it is not known."""
        return statistics.median(self.profiled) if self.profiled else self.kernels_ms

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


class ProfileEngine(Protocol):
    """An engine of another package: what an entry point of the group ``htp_export.profile`` names, a module mostly.

    One that cannot run models here has no ``measure``, and one that writes no files no ``read``.

    Attributes:
        THREADS: Which of the engine's options says how many threads a kernel has; "" if none does.
    """

    THREADS: str

    def measure(
        self,
        tagged: TaggedModel,
        feed: Feed,
        runs: int,
        warmup: int,
        *,
        name: str,
        options: Mapping[str, Any],
        folder: Path,
    ) -> Measurement:
        """Run a model without functions ``warmup`` times, then ``runs`` times with the engine's profiler and without.

        ``name`` is the model's in errors, and ``folder`` a temporary one.
        """

    def read(self, tagged: TaggedModel, files: Sequence[str | os.PathLike[str]], *, name: str) -> Measurement:
        """Read what the engine measured elsewhere of a model without functions."""


def consistent(measure: Callable[[], Measurement]) -> Measurement:
    """Measure again in a new session, up to three times in all, while the times contradict each other.

    Returns:
        The first measurement without a contradiction; otherwise the one with the smallest, and a note that states it.
    """
    measured: list[Measurement] = []
    while len(measured) < _ATTEMPTS:
        measured.append(measure())
        apart = measured[-1].apart
        if apart <= _MOST:
            return measured[-1]
        _log.info("kernels and runs contradict each other by a factor of %.1f: measured again", apart)
    best = min(measured, key=lambda measurement: measurement.apart)
    contradiction = (
        f"the times contradict each other in each of {_ATTEMPTS} measurements: {best.kernels_ms:.3f} ms in kernels, "
        f"{best.end_to_end_ms:.3f} ms a run, {best.profiled_ms:.3f} ms under the profiler; "
        "other work keeps the processor busy: compare modules by their share, or measure again on an idle machine"
    )
    return replace(best, notes=(contradiction, *best.notes))
