"""What an engine measures, times that fit together, and what an engine of another package is."""

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
    """An entry of an engine's profile, a kernel, a layer or a node of its own graph, and the modules whose work it is.

    ``ms`` is its time in one run, without the kernels of its subgraphs; ``launches`` their mean
    number. ``owners`` stand in the order of execution; ``around`` has for each the modules whose
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
    """An entry of an engine's profile, before its owners are known: the original nodes whose work it does.

    There are none if its name tells none: the engine inserted it, or it lost the names. ``inputs``
    and ``outputs`` are tensors of the engine's graph, by name.
    """

    kernel: Kernel
    nodes: Sequence[ir.Node]
    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()


def owned(kernel: Kernel, works: Iterable[NodeCalls], calls: CallTree) -> Kernel:
    """A kernel with its owners: those of the nodes whose work it does, in the order of execution, each once."""
    around = modules_around_owners(works, calls)
    return replace(kernel, owners=tuple(around), around=tuple(around.values()))


def modules_around_owners(works: Iterable[NodeCalls], calls: CallTree) -> dict[str, frozenset[str]]:
    """Owner → the modules whose regions contain its share of the work, in the order of execution."""
    modules_by_owner: dict[str, frozenset[str]] = {}
    for work in works:
        for owner, modules in calls.around_owners(work).items():
            modules_by_owner[owner] = modules_by_owner.get(owner, frozenset()) | modules
    return modules_by_owner


def entry_kernels(entries: Sequence[Entry], tagged: TaggedModel) -> tuple[Kernel, ...]:
    """The kernels of entries, which stand in the order of execution, with their owners.

    An entry with original nodes has their owners; for a node with subgraphs, also those of the
    nodes inside, unless these have entries of their own. An entry without belongs to the modules of
    its consumers, otherwise to those of its producers, as an inserted node does.
    """
    named = {node for entry in entries for node in entry.nodes}
    works = [_works(entry, named, tagged) for entry in entries]
    makers: defaultdict[str, list[int]] = defaultdict(list)
    readers: defaultdict[str, list[int]] = defaultdict(list)
    for index, entry in enumerate(entries):
        for name in entry.outputs:
            makers[name].append(index)
        for name in entry.inputs:
            readers[name].append(index)
    ahead = [[reader for name in entry.outputs for reader in readers[name]] for entry in entries]
    behind = [[maker for name in entry.inputs for maker in makers[name]] for entry in entries]
    _spread(works, ahead, reversed(range(len(entries))))
    _spread(works, behind, range(len(entries)))
    return tuple(
        owned(entry.kernel, dict.fromkeys(work), tagged.calls)
        for entry, work in zip(entries, works, strict=True)
    )


def _works(entry: Entry, named: set[ir.Node], tagged: TaggedModel) -> list[NodeCalls]:
    nodes = dict.fromkeys(entry.nodes)
    for node in entry.nodes:
        inside = [inner for body in subgraphs(node) for inner in body.all_nodes()]
        if named.isdisjoint(inside):
            nodes.update(dict.fromkeys(inside))
    ordered = sorted(nodes, key=lambda node: tagged.index.place.get(node, 0))
    return [work for work in map(tagged.work_of, ordered) if work.owners]


def _spread(
    works: list[list[NodeCalls]], near: Sequence[Sequence[int]], order: Iterable[int]
) -> None:
    """Give each entry without owners those of its neighbours."""
    for index in order:
        if not works[index]:
            works[index] = [
                work for neighbour in dict.fromkeys(near[index]) for work in works[neighbour]
            ]


_log = logging.getLogger(__name__)

_ATTEMPTS = 3  # a load that comes and goes spoils one, seldom three
_MOST = 2.0  # under a steady load both ratios stay below 1.5, also with kernels of a microsecond
# what the profiler may add to the time of a kernel, which shows in very short ones
_PROFILER_MS = 0.01


@dataclass(frozen=True)
class Measurement:
    """What an engine measured of a model.

    Attributes:
        kernels: What ran, with the times of one run.
        profiled: The times of the runs with the profiler, in ms; empty where only those of kernels
            are known.
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

        Neither can be much more than 1, unless something else kept the processor busy in one of
        them.
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

    def read(
        self, tagged: TaggedModel, files: Sequence[str | os.PathLike[str]], *, name: str
    ) -> Measurement:
        """Read what the engine measured elsewhere of a model without functions."""


def consistent(measure: Callable[[], Measurement]) -> Measurement:
    """Measure up to three times, while the times contradict each other; if they all do, the best has a note of it."""
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
