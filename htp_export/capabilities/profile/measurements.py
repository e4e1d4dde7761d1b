"""Measurements of an engine, their consistency, and the interface of engines."""

from __future__ import annotations

import logging
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import onnx_ir as ir

from htp_export.format.call_tree import CallTree, NodeCalls
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.inputs import Feed
from htp_export.shapes.operator_kinds import subgraphs


@dataclass(frozen=True)
class Kernel:
    """An entry of an engine's profile (a kernel, a layer or a node of its graph), with its modules.

    ``ms`` is its time in one run, without the kernels of its subgraphs; ``launches`` their mean
    number. ``owners`` are in execution order; ``around`` contains, for each owner, the modules whose
    regions contain its share.
    """

    name: str
    op_type: str
    provider: str
    ms: float
    launches: float
    owners: tuple[str, ...] = ()
    around: tuple[frozenset[str], ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Entry:
    """An entry of an engine's profile before its owners are known, with its original nodes.

    It has none if its name refers to none: the engine inserted it, or lost the names. ``inputs``
    and ``outputs`` are names of tensors in the engine's graph.
    """

    kernel: Kernel
    nodes: Sequence[ir.Node]
    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()


def owned(kernel: Kernel, works: Iterable[NodeCalls], calls: CallTree) -> Kernel:
    """A kernel with its owners: the owners of its original nodes, in execution order."""
    around = modules_around_owners(works, calls)
    return replace(kernel, owners=tuple(around), around=tuple(around.values()))


def modules_around_owners(works: Iterable[NodeCalls], calls: CallTree) -> dict[str, frozenset[str]]:
    """Owner → modules whose regions contain its share of the work, in execution order."""
    modules_by_owner: dict[str, frozenset[str]] = {}
    for work in works:
        for owner, modules in calls.around_owners(work).items():
            modules_by_owner[owner] = modules_by_owner.get(owner, frozenset()) | modules
    return modules_by_owner


def entry_kernels(entries: Sequence[Entry], tagged: TaggedModel) -> tuple[Kernel, ...]:
    """The kernels of entries in execution order, with their owners.

    An entry with original nodes has their owners; for a node with subgraphs, also the
    nodes inside, unless these have entries of their own. An entry without original nodes belongs to
    the modules of its consumers, or else of its producers, like an inserted node.
    """
    named = {node for entry in entries for node in entry.nodes}
    works = [_works(entry, named, tagged) for entry in entries]
    producers: defaultdict[str, list[int]] = defaultdict(list)
    consumers: defaultdict[str, list[int]] = defaultdict(list)
    for index, entry in enumerate(entries):
        for name in entry.outputs:
            producers[name].append(index)
        for name in entry.inputs:
            consumers[name].append(index)
    for index in reversed(range(len(entries))):
        if not works[index]:
            works[index] = _works_of_neighbours(entries[index].outputs, consumers, works)
    for index, entry in enumerate(entries):
        if not works[index]:
            works[index] = _works_of_neighbours(entry.inputs, producers, works)
    return tuple(
        owned(entry.kernel, dict.fromkeys(work), tagged.calls)
        for entry, work in zip(entries, works, strict=True)
    )


def _works(entry: Entry, named: set[ir.Node], tagged: TaggedModel) -> list[NodeCalls]:
    """The works of an entry's nodes, in the order of the model.

    They include the nodes of subgraphs, unless one of these has an entry of its own.
    """
    nodes = dict.fromkeys(entry.nodes)
    for node in entry.nodes:
        inner_nodes = list[ir.Node]()
        for body in subgraphs(node):
            inner_nodes.extend(body.all_nodes())
        if named.isdisjoint(inner_nodes):
            nodes.update(dict.fromkeys(inner_nodes))
    ordered = sorted(nodes, key=lambda node: tagged.index.place.get(node, 0))
    works = map(tagged.work_of, ordered)
    return [work for work in works if work.owners]


def _works_of_neighbours(
    tensors: Iterable[str],
    neighbours: Mapping[str, Sequence[int]],
    works: Sequence[Sequence[NodeCalls]],
) -> list[NodeCalls]:
    """The works of the entries at the other end of an entry's tensors."""
    indices: dict[int, None] = {}
    for name in tensors:
        indices.update(dict.fromkeys(neighbours.get(name, ())))
    found: list[NodeCalls] = []
    for index in indices:
        found.extend(works[index])
    return found


_log = logging.getLogger(__name__)

_ATTEMPTS = 3  # load that comes and goes affects one measurement, seldom three
_MOST = 2.0  # under a steady load both ratios stay below 1.5, also for kernels of a microsecond
# The most that the profiler adds to the time of a kernel, which matters for very short ones.
_PROFILER_MS = 0.01


@dataclass(frozen=True)
class Measurement:
    """An engine's measurement of a model.

    Attributes:
        kernels: The kernels, with their times in one run.
        profiled: The times of the runs with the profiler, in ms; empty if only the times of kernels
            are known.
        plain: The times of the runs without the profiler, in ms; empty in the same case.
        providers: The execution providers or devices in use.
        timing: As in `Profile`.
        runs: Number of measured runs; 0 if unknown.
        at_once: Number of kernels that may run at the same time.
        notes: Facts that the times do not show, one line each.
    """

    kernels: Sequence[Kernel]
    profiled: Sequence[float] = ()
    plain: Sequence[float] = ()
    providers: tuple[str, ...] = ()
    timing: str = "kernels"
    runs: int = 0
    at_once: int = 1
    notes: tuple[str, ...] = ()

    def with_note(self, note: str) -> Measurement:
        """The measurement with one more note, before the others."""
        return replace(self, notes=(note, *self.notes))

    @property
    def kernels_ms(self) -> float:
        """The sum of the kernels."""
        return sum(kernel.ms for kernel in self.kernels)

    @property
    def end_to_end_ms(self) -> float:
        """The median of the runs without the profiler; the sum of the kernels if it is unknown."""
        if self.plain:
            return statistics.median(self.plain)
        return self.kernels_ms

    @property
    def profiled_ms(self) -> float:
        """The median of the runs with the profiler; the sum of the kernels if it is unknown."""
        if self.profiled:
            return statistics.median(self.profiled)
        return self.kernels_ms

    @property
    def apart(self) -> float:
        """How inconsistent the times are: kernels and runs, runs without and with profiler.

        Neither ratio can be much more than 1, unless something else kept the processor busy during
        one of the two.
        """
        overhead = _PROFILER_MS * sum(kernel.launches for kernel in self.kernels)
        of_kernels = self.kernels_ms / (self.at_once * self.end_to_end_ms + overhead)
        return max(of_kernels, self.end_to_end_ms / (self.profiled_ms + _PROFILER_MS))


class ProfileEngine(Protocol):
    """The interface of an engine of another package: an entry point of ``htp_export.profile``.

    An engine that cannot run models here has no ``measure``; one that writes no files has neither
    ``read`` nor ``wrote``.

    Attributes:
        THREADS: The engine's option for the number of threads of a kernel; "" if it has none.
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
        """Run a model without functions: ``warmup`` runs, then ``runs`` with profiler and without.

        ``name`` is that of the model in errors, and ``folder`` a temporary folder.
        """

    def read(
        self, tagged: TaggedModel, files: Sequence[str | os.PathLike[str]], *, name: str
    ) -> Measurement:
        """Read the engine's measurements of a model without functions from files."""

    def wrote(self, beginning: str) -> bool:
        """Whether a text file with this beginning is one that ``read`` takes."""


def consistent(measure: Callable[[], Measurement]) -> Measurement:
    """Measure up to three times until the times are consistent; else add a note to the best."""
    measured: list[Measurement] = []
    while len(measured) < _ATTEMPTS:
        measured.append(measure())
        apart = measured[-1].apart
        if apart <= _MOST:
            return measured[-1]
        _log.info(
            "kernels and runs contradict each other by a factor of %.1f: measured again", apart
        )
    best = min(measured, key=lambda measurement: measurement.apart)
    contradiction = (
        f"the times contradict each other in each of {_ATTEMPTS} measurements: {best.kernels_ms:.3f} ms in kernels, "
        f"{best.end_to_end_ms:.3f} ms a run, {best.profiled_ms:.3f} ms under the profiler; "
        "other work keeps the processor busy: compare modules by their share, or measure again on an idle machine"
    )
    return replace(best, notes=(contradiction, *best.notes))


def mean_of(measured: Sequence[Measurement], of: str = "sessions") -> Measurement:
    """Several measurements as one: the mean of each kernel, and the times of all runs.

    ``of`` is a noun for them, for a note.
    """
    kernels: dict[Kernel, list[Kernel]] = {}
    for measurement in measured:
        seen: defaultdict[Kernel, int] = defaultdict(int)
        for kernel in measurement.kernels:
            # kernels of one name are told apart by their order; a branch may not run each time
            key = replace(
                kernel, ms=0.0, launches=float(seen[replace(kernel, ms=0.0, launches=0.0)])
            )
            seen[replace(kernel, ms=0.0, launches=0.0)] += 1
            kernels.setdefault(key, []).append(kernel)
    means = []
    for each in kernels.values():
        ms = sum(kernel.ms for kernel in each) / len(measured)
        launches = sum(kernel.launches for kernel in each) / len(measured)
        means.append(replace(each[0], ms=ms, launches=launches))
    notes = dict.fromkeys(note for measurement in measured for note in measurement.notes)
    return replace(
        measured[0],
        kernels=tuple(means),
        profiled=[ms for measurement in measured for ms in measurement.profiled],
        plain=[ms for measurement in measured for ms in measurement.plain],
        runs=sum(measurement.runs for measurement in measured),
        notes=(f"the mean of {len(measured)} {of}", *notes),
    )
