"""The result of an architecture search: candidates, their parts, and their Pareto front."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from htp_export.capabilities.search.search_results import Front, value_column
from htp_export.reporting.columns import Column
from htp_export.reporting.result import PlainData, Table

ARCHITECTURE_OBJECTIVES = ("latency", "size", "parameters", "flops", "metric")


@dataclass(frozen=True)
class CandidatePart(PlainData):
    """A part of a candidate: one call of a module, or the work between the modules.

    Attributes:
        module: The path of the module; ``""`` for the work between the others.
        call: The number of the call; -1 for the work between the others.
        key: The key of its measurement in `Architectures.measured`.
        latency_ms: Its time.
        flops: FLOPs of its products and convolutions.
        reused: Whether an equal part had been measured before.
    """

    module: str
    call: int
    key: str
    latency_ms: float
    flops: int
    reused: bool

    @property
    def name(self) -> str:
        """Its name in texts."""
        if self.call < 0:
            return "(between the modules)"
        return f"{self.module} (call {self.call})" if self.call else self.module


@dataclass(frozen=True)
class Candidate(PlainData):
    """A candidate that was built.

    Attributes:
        number: Its number in the study.
        choice: Name → its choice.
        values: Objective → value: ``latency`` in ms, ``size`` in bytes, ``parameters``, ``flops``,
            ``metric``.
        latency_ms: The predicted latency, the sum of the parts.
        flops: FLOPs of products and convolutions, the sum of the parts.
        parameters: Elements of its parameters; one that several modules share counts once.
        bytes: Size of its parameters and buffers.
        metric: The user's metric; None without one.
        parts: Its parts.
    """

    number: int
    choice: Mapping[str, Any]
    values: Mapping[str, float]
    latency_ms: float
    flops: int
    parameters: int
    bytes: int
    metric: float | None
    parts: tuple[CandidatePart, ...]

    @property
    def spread(self) -> Mapping[str, float]:
        """Empty: a candidate is measured once."""
        return {}

    @property
    def name(self) -> str:
        """Its name in pictures."""
        return f"trial {self.number}"

    @property
    def origin(self) -> str:
        """As for a trial: the sampler chose it."""
        return "sampler"

    @property
    def counted(self) -> str:
        """The choices in one line."""
        return ", ".join(f"{name}={choice}" for name, choice in self.choice.items())

    @property
    def shared(self) -> str:
        """The number of parts, and how many were measured for it."""
        new = sum(not part.reused for part in self.parts)
        return f"{new} of {len(self.parts)}"


@dataclass(frozen=True)
class FailedCandidate(PlainData):
    """A candidate that could not be built or measured.

    Attributes:
        choice: Name → its choice.
        reason: The reason.
    """

    choice: Mapping[str, Any]
    reason: str

    @property
    def text(self) -> str:
        """Both in one line."""
        choices = ", ".join(f"{name}={choice}" for name, choice in self.choice.items())
        return f"{choices or 'a candidate'}: {self.reason}"


@dataclass(frozen=True)
class Architectures(Front[Candidate]):
    """The result of a `search` over architectures.

    Attributes:
        objectives: The objectives, in the order of the argument.
        trials: The candidates that were measured, in the order of the study.
        failures: The candidates that could not be measured.
        space: Name → its choices.
        notes: Remarks, a line each.
    """

    derived = ("summary", "pareto", "measured_parts", "all_parts")

    objectives: tuple[str, ...]
    trials: tuple[Candidate, ...]
    failures: tuple[FailedCandidate, ...]
    space: Mapping[str, tuple[Any, ...]]
    notes: tuple[str, ...] = ()

    @property
    def all_parts(self) -> int:
        """The number of parts of all candidates."""
        return sum(len(candidate.parts) for candidate in self.trials)

    @property
    def measured_parts(self) -> int:
        """The number of different parts, each of which is measured once."""
        return len({part.key for candidate in self.trials for part in candidate.parts})

    @property
    def summary(self) -> str:
        """The result in one line."""
        failed = f", {len(self.failures)} failed" if self.failures else ""
        front = f"{len(self.pareto)} of {len(self.trials)} candidates are on the front{failed}"
        return f"{front}; {self.measured_parts} of {self.all_parts} parts were measured"

    @property
    def lines(self) -> tuple[str, ...]:
        """The candidates that failed, and the notes."""
        return (*(failure.text for failure in self.failures), *self.notes)

    def table(self) -> Table:
        """The candidates on the front."""
        number: Column[Candidate] = Column("number", "trial")
        columns: list[Column[Candidate]] = [
            number,
            *map(value_column, self.objectives),
            Column("shared", "new parts"),
            Column("counted", "choices", right=False),
        ]
        return columns, self.pareto


def are_architectures(data: object) -> bool:
    """Whether plain data, of any source, is that of ``Architectures.to_dict`` or ``front.json``."""
    if not isinstance(data, Mapping) or not {"objectives", "pareto", "space"} <= data.keys():
        return False
    points, objectives = data["pareto"], data["objectives"]
    if not isinstance(points, list) or not isinstance(objectives, list):
        return False
    if not all(isinstance(name, str) for name in objectives):
        return False
    return all(isinstance(point, Mapping) and "choice" in point for point in points)
