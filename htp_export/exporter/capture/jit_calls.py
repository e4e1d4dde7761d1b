"""The call of each node of a graph that was traced, from the nodes as they were while tracing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from htp_export.exporter.capture.calls import NO_CALL, CallLog
from htp_export.exporter.capture.jit_graph import JitStep, Reading
from htp_export.exporter.capture.torchscript_internals import names_of_inlined_scope, names_of_traced_scope, usual_name


class TracedNode(NamedTuple):
    """One node of a JIT graph while it is traced.

    Attributes:
        kind: What it does; an operation in place is called as the one that is not.
        scope: The name of its scope.
        call: Index of the call that ran it.
        outputs: The numbers of what it makes.
        inputs: The numbers of what it reads.
    """

    kind: str
    scope: str
    call: int
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]


@dataclass
class Matched:
    """Which nodes of a graph are which nodes of its trace.

    Attributes:
        calls: The call of each node of the graph's outermost block that is no constant.
        dead: Calls that ran nodes which the graph does not have.
        numbers: Number while tracing → number in the graph.
    """

    calls: list[int] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)
    numbers: dict[int, int] = field(default_factory=dict)

    def add(self, node: TracedNode, step: JitStep) -> None:
        """Note that a node of the graph is one of the trace."""
        self.calls.append(node.call)
        self.numbers.update(zip(node.outputs, step.outputs, strict=False))


def place_between(nodes: list[TracedNode], between: Mapping[int, Sequence[int]], log: CallLog) -> None:
    """Give calls, outer ones first, what was traced while they ran and has their callers' scope.

    Args:
        nodes: The nodes of the trace; changed.
        between: Call → the numbers between which it ran.
        log: The calls.
    """
    for index, (began, ended) in sorted(between.items()):
        parent = log.calls[index].parent
        for place, node in enumerate(nodes):
            if node.call == parent and node.outputs and began < node.outputs[0] < ended:
                nodes[place] = node._replace(call=index)


def _with_usual_names(traced: Sequence[TracedNode], reading: Reading) -> Sequence[TracedNode]:
    """The nodes, with the names that the tracer gives operators when it ends."""
    others = {node.kind for node in traced} - {step.kind for step in reading.outermost}
    usual = {kind: usual_name(kind) for kind in others}
    return (
        [node._replace(kind=usual[node.kind]) if node.kind in usual else node for node in traced] if usual else traced
    )


def match(
    traced: Sequence[TracedNode], reading: Reading, inputs: Mapping[int, int], outputs: Sequence[int | None]
) -> Matched:
    """Find the node of the trace that each node of the graph is: the graph is the trace, without dead nodes.

    Neither kind, scope nor order can tell a dead node from a live one like it, so that the graph is matched from its
    end: a node's consumers are matched first, and what they read in the trace is what the node made there.

    Args:
        traced: The nodes of the trace.
        reading: The graph: as it was traced, or that of a module which was made by tracing and inlined.
        inputs: Number while tracing → number in the graph, for the graph's inputs.
        outputs: The numbers while tracing of what the graph returns; None where it is not known.
    """
    return _Matching(_with_usual_names(traced, reading), reading, inputs, outputs).matched()


class _Matching:
    """The places of the graph's nodes in the trace, as far as they are found."""

    def __init__(
        self,
        traced: Sequence[TracedNode],
        reading: Reading,
        inputs: Mapping[int, int],
        outputs: Sequence[int | None],
    ) -> None:
        self._traced, self._steps, self._scopes = traced, reading.outermost, reading.scopes
        self._made_at = {number: place for place, node in enumerate(traced) for number in node.outputs}
        self._made_by = {number: index for index, step in enumerate(self._steps) for number in step.outputs}
        self._was: dict[int, int] = {number: old for old, number in inputs.items()}  # in the graph → while tracing
        self._places: list[int | None] = [None] * len(self._steps)
        if len(outputs) == len(reading.outputs):
            pairs = zip(reading.outputs, outputs, strict=True)
            self._was.update((number, old) for number, old in pairs if old is not None)
        for find in (self._by_consumers, self._by_inputs):
            for index in reversed(range(len(self._steps))):
                if self._places[index] is None:
                    self._put(index, find(index))

    def matched(self) -> Matched:
        """The nodes of both graphs that are the same, and the calls of those that only the trace has."""
        found = Matched()
        for step, place in zip(self._steps, self._places, strict=True):
            if place is None:
                found.calls.append(NO_CALL)
            else:
                found.add(self._traced[place], step)
        live = set(self._places)
        found.dead.update(node.call for place, node in enumerate(self._traced) if place not in live)
        return found

    def _put(self, index: int, place: int | None) -> None:
        self._places[index] = place
        if place is not None:
            for number, old in zip(self._steps[index].inputs, self._traced[place].inputs, strict=False):
                self._was.setdefault(number, old)

    def _by_consumers(self, index: int) -> int | None:
        """The node that made, while tracing, what consumers of this one read."""
        step = self._steps[index]
        places = (self._made_at.get(self._was[number]) for number in step.outputs if number in self._was)
        return next((place for place in places if place is not None and self._traced[place].kind == step.kind), None)

    def _by_inputs(self, index: int) -> int | None:
        """For a node whose results nothing reads, as it changes a tensor in place: the last that reads the same.

        It stands between those of the nodes around it. The scope decides between several; in the graph of a module
        that was made by tracing, the module's second call has none.
        """
        place = self._by_consumers(index)  # of one that has only consumers of this sort
        if place is not None:
            return place
        begin = next((at for at in reversed(self._places[:index]) if at is not None), -1)
        end = next((at for at in self._places[index + 1 :] if at is not None), len(self._traced))
        same = [place for place in range(end - 1, begin, -1) if self._does_the_same(index, place)]
        same.sort(key=lambda place: not _agree(self._traced[place].scope, self._scopes[index]))
        return same[0] if same else None

    def _does_the_same(self, index: int, place: int) -> bool:
        """Whether a node of the graph and one of the trace compute the same from what is known to be the same."""
        waiting, seen = [(index, place)], set()
        while waiting:
            pair = waiting.pop()
            step, node = self._steps[pair[0]], self._traced[pair[1]]
            if step.kind != node.kind or len(step.outputs) != len(node.outputs):
                return False
            seen.add(pair)
            for number, old in zip(step.inputs, node.inputs, strict=False):
                if number in self._was and self._was[number] != old:
                    return False
                producer, at = self._made_by.get(number), self._made_at.get(old)
                if number in self._was or producer is None:  # known, or a constant
                    continue
                if at is None:
                    return False
                if (producer, at) not in seen:
                    waiting.append((producer, at))
        return True


def _agree(traced: str, scope: str) -> bool:
    return traced == scope or names_of_traced_scope(traced) == names_of_inlined_scope(scope)
