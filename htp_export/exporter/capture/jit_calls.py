"""The call of each node of a graph that was traced, from the nodes as they were while tracing."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from htp_export.exporter.capture.calls import NO_CALL, CallLog
from htp_export.exporter.capture.jit_graph import Reading, Step
from htp_export.exporter.capture.torchscript_internals import names_of_inlined_scope, names_of_traced_scope, usual_name


class TracedNode(NamedTuple):
    """One node of a JIT graph while it is traced.

    Attributes:
        kind: What it does; an operation in place is called as the one that is not.
        scope: The name of its scope.
        call: Index of the call that ran it.
        outputs: The numbers of what it makes.
        inputs: The numbers of what it reads; empty where nobody asks for them.
    """

    kind: str
    scope: str
    call: int
    outputs: tuple[int, ...]
    inputs: tuple[int, ...] = ()


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

    def add(self, node: TracedNode, step: Step) -> None:
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


def match_by_scope(traced: Sequence[TracedNode], reading: Reading) -> Matched:
    """Match by kind, scope and order: the graph is the trace, less what nothing needed."""
    matched, at = Matched(), 0
    traced = _with_usual_names(traced, reading)
    places: defaultdict[tuple[str, str], deque[int]] = defaultdict(deque)
    for place, node in enumerate(traced):
        places[node.kind, node.scope].append(place)
    for step, scope in zip(reading.outermost, reading.scopes, strict=True):
        candidates = places[step.kind, scope]
        while candidates and candidates[0] < at:
            candidates.popleft()
        if not candidates:
            matched.calls.append(NO_CALL)
            continue
        matched.dead.update(node.call for node in traced[at : candidates[0]])
        at = candidates.popleft() + 1
        matched.add(traced[at - 1], step)
    matched.dead.update(node.call for node in traced[at:])
    return matched


def match_by_inputs(traced: Sequence[TracedNode], reading: Reading, inputs: Mapping[int, int]) -> Matched:
    """Match by kind, order, and what is read: the graph is that of a module that was made by tracing, inlined.

    Its scopes are others, and a module's second call has none: they only decide between equal operations.

    Args:
        traced: The nodes of the trace, with what they read.
        reading: The graph.
        inputs: Number while tracing → number in the graph, for what the user gives.
    """
    matched, at = Matched(numbers=dict(inputs)), 0
    traced = _with_usual_names(traced, reading)
    places: defaultdict[str, deque[int]] = defaultdict(deque)
    for place, node in enumerate(traced):
        places[node.kind].append(place)
    known = set(inputs.values())
    for step, scope in zip(reading.outermost, reading.scopes, strict=True):
        candidates = places[step.kind]
        while candidates and candidates[0] < at:
            candidates.popleft()
        reads = [number if number in known else None for number in step.inputs]
        same = [p for p in candidates if [matched.numbers.get(number) for number in traced[p].inputs] == reads]
        if not same:
            matched.calls.append(NO_CALL)
            continue
        names = names_of_inlined_scope(scope)
        place = next((p for p in same if names_of_traced_scope(traced[p].scope) == names), same[0])
        matched.dead.update(node.call for node in traced[at:place])
        at = place + 1
        matched.add(traced[place], step)
        known.update(step.outputs)
    matched.dead.update(node.call for node in traced[at:])
    return matched
