"""The nodes of the decomposed FX graph that each node of an exported program became.

Each node of the exported graph is observed while torch executes it. Names cannot be compared,
because torch copies graphs and renames nodes; entries in a node's ``meta`` are copied with it.

Where tensors that share memory are changed in place, functionalization adds nodes, in the scope of
the operation that uses or changes the view:

- A view of the changed tensor is repeated by the same sequence of view operators when an operation
  reads it, or after the last operation if the model returns it.
- If the changed tensor is itself a view, the change is written back into the tensor below: each
  view operator is reversed, ``slice_scatter`` for ``slice``, and then the view is repeated.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from htp_export.exporter.capture.calls import NO_CALL
from htp_export.exporter.capture.fx_calls import FxCalls, NodeNumbers, NodeResult
from htp_export.exporter.capture.torch_internals import (
    ExecutedNode,
    State,
    is_view,
    outputs_of,
    reversed_view,
)


class ViewStep(NamedTuple):
    """One view operator between a tensor and its base; torch may erase its nodes later."""

    # None for an operator with several results, because functionalization may repeat it as another
    # one: ``slice`` for ``split``
    operator: Any
    call: int  # the call that created the view
    number: int  # number of the node that returns the view
    below: int  # number of the node that returns the tensor of which it is a view


class ViewSequence(NamedTuple):
    """The views between a tensor, when it was first computed, and its base."""

    producer: Any  # the node of the decomposed graph that computed the tensor
    steps: tuple[ViewStep, ...]  # the last view first; empty for a tensor that is not a view


class RepeatedSequence(NamedTuple):
    """Nodes that repeat a `ViewSequence`, or its last steps."""

    # for each step, the last one first, its nodes: the one that selects a result of an operator
    # with several results, then the operator
    steps: list[list[Any]]
    base: Any  # the node that returns the tensor of which they are views


class MovedView(NamedTuple):
    """A repeated view that belongs to another call than the one that created it."""

    first: int  # number of the node that created the view
    first_call: int  # the call of that node
    again: int  # number of the node that repeats it
    call: int  # the call of the repeated node


class RepeatedViews:
    """Assigns the nodes that functionalization adds to calls.

    A view repeated on the same tensor belongs to the call that created it. A view repeated on a
    changed tensor, and a change that is written back, belong to the innermost call around the
    change and the view::

        model                      decomposed graph              call
        v = x[0]      in call A    v = select(x, 0)              A
        x.add_(1)     in call B    x1 = add(x, 1)                B
        v.relu()      in call C    v1 = select(x1, 0)            common(A, B)
                                   relu(v1)                      C
        v.mul_(2)     in call D    v2 = mul(v1, 2)               D
                                   x2 = select_scatter(x1, v2)   common(A, D)

    If one call inside that one makes the change and also reads the result, they belong to it
    (`settle`).
    """

    def __init__(self, calls: FxCalls, decomposed: NodeNumbers) -> None:
        self._number_of = decomposed.assign
        self._calls = calls
        # node of the exported graph → the views by which its tensor was first computed
        self._sequences: dict[Any, ViewSequence] = {}
        # Views repeated on a changed tensor that do not belong to the call that created them
        self.moved: list[MovedView] = []
        # Number of the node that created a view → numbers of the nodes that repeat it unchanged
        self.again: dict[int, list[int]] = {}
        self._written: set[Any] = set()  # nodes that write back
        # number of a node added after a change → the call that made the change
        self._change: dict[int, int] = {}

    def record(self, executed: ExecutedNode) -> dict[Any, Any]:
        """Assign the nodes that were added when a node of the exported graph was executed.

        Returns, for each view that it changed: the node that returns the tensor afterwards → the
        node that computes its value before it is written back.
        """
        traced = set(executed.traced)
        changed = {}
        for state in executed.read:
            sequence = self._sequences.get(state.node)
            if sequence is None or not sequence.steps or sequence.producer is state.producer:
                continue
            if not state.changed:
                self._assign_repeated(sequence, state.producer, traced)
                continue
            before = self._repeated_before_change(sequence, executed.traced)
            self._assign_repeated(sequence, before, traced)
            new_value = self._assign_written_back(sequence, state, traced)
            if new_value is not None:
                changed[state.producer] = new_value
        for state in (*executed.read, *executed.returned):
            if state.producer is not None and state.node not in self._sequences:
                self._sequences[state.node] = self._sequence_of(state.producer)
        return changed

    def returned(self, outputs: Iterable[tuple[Any, Any]], late: Collection[Any]) -> None:
        """Assign the nodes that repeat views for the outputs of the graph.

        ``outputs``: nodes of the exported graph, each with the node that is returned, or None if
        the output is not a tensor.
        ``late``: the nodes traced after the last node of the exported graph was executed.
        """
        for node, again in outputs:
            if node in self._sequences:
                self._assign_repeated(self._sequences[node], again, late)

    def settle(self, nodes: Iterable[Any]) -> None:
        """Reassign nodes added after a change to a call that contains the change and a consumer.

        It is the innermost one. Otherwise nodes outside that call would consume its change and pass
        it back into it.
        """
        settled: dict[int, int] = {}
        for node in reversed(list(nodes)):
            change = self._change.get(self._number_of(node), NO_CALL)
            before = self._calls.of_node(node)
            if change == NO_CALL:
                continue
            call = self._innermost_with_readers(node, change, before)
            if call != before:
                self._calls.assign(node, call)
                settled[self._number_of(node)] = call
        self.moved = [
            moved._replace(call=settled.get(moved.again, moved.call)) for moved in self.moved
        ]

    def _innermost_with_readers(self, node: Any, change: int, call: int) -> int:
        """The innermost call, inside ``call``, that contains the change and a consumer."""
        log = self._calls.log
        for reader in node.users:
            # both this and `call` contain the change: one of them is inside the other
            both = log.common(change, self._calls.of_node(reader))
            if log.common(both, call) == call:
                call = both
        return call

    def _sequence_of(self, producer: Any) -> ViewSequence:
        steps = []
        node = producer
        while is_view(node) and node not in self._written:
            nodes, below = _view_nodes(node)
            target = nodes[0].target if len(nodes) == 1 else None
            call = self._calls.of_node(node)
            steps.append(ViewStep(target, call, self._number_of(node), self._number_of(below)))
            node = below
        return ViewSequence(producer, tuple(steps))

    @staticmethod
    def _repeated(
        sequence: ViewSequence,
        last: Any,
        traced: Collection[Any],
    ) -> RepeatedSequence | None:
        """The nodes among ``traced`` that end in ``last`` and repeat a sequence, or None."""
        repeated = RepeatedSequence([], last)
        for step in sequence.steps:
            if repeated.base not in traced:
                break
            if not is_view(repeated.base):
                return None
            nodes, below = _view_nodes(repeated.base)
            if step.operator is not None and [node.target for node in nodes] != [step.operator]:
                return None
            repeated = RepeatedSequence([*repeated.steps, nodes], below)
        return repeated if repeated.steps else None

    def _assign_repeated(
        self,
        sequence: ViewSequence,
        last: Any,
        traced: Collection[Any],
    ) -> None:
        """Assign the nodes that repeat a sequence, if they do."""
        repeated = self._repeated(sequence, last, traced)
        if repeated is None:
            return
        base = self._number_of(repeated.base)
        base_call = self._calls.of_node(repeated.base)
        unchanged = base == sequence.steps[len(repeated.steps) - 1].below
        change = self._change.get(base, base_call)
        for nodes, step in zip(repeated.steps, sequence.steps, strict=False):
            call = step.call if unchanged else self._calls.log.common(step.call, base_call)
            for node in nodes:
                self._calls.assign(node, call)
                if not unchanged:
                    self._change[self._number_of(node)] = change
            number = self._number_of(nodes[0])
            if unchanged:
                self.again.setdefault(step.number, []).append(number)
            if call != step.call:
                self.moved.append(MovedView(step.number, step.call, number, call))

    def _repeated_before_change(self, sequence: ViewSequence, traced: list[Any]) -> Any:
        """The node that repeats a view before it is changed; None if the view was up to date."""
        for node in traced:
            repeated = self._repeated(sequence, node, traced)
            if repeated is not None and repeated.base not in traced:
                return node
        return None

    def _assign_written_back(
        self,
        sequence: ViewSequence,
        state: State,
        traced: Collection[Any],
    ) -> Any:
        """Assign the nodes that write a changed view into the tensor below.

        Returns the node that computes the new value of the view, or None.
        """
        repeated = self._repeated(sequence, state.producer, traced)
        if repeated is None or repeated.base not in traced:
            return None
        node = repeated.base
        new_value = None
        change = call = self._calls.of_node(node)
        calls = []  # for each step, the innermost call around the change and the views so far
        for step in sequence.steps:
            call = self._calls.log.common(call, step.call)
            calls.append(call)
        for call in reversed(calls):
            new_value = reversed_view(node) if node in traced else None
            if new_value is None:
                break
            self._assign_after_change(node, call, change)
            self._written.add(node)
            # the views below this one, repeated as they were before the change
            below = node.args[0]
            while below is not new_value and below in traced and is_view(below):
                self._assign_after_change(below, call, change)
                below = below.args[0]
            node = new_value
        self._assign_repeated(sequence, state.producer, traced)
        return new_value

    def _assign_after_change(self, node: Any, call: int, change: int) -> None:
        self._calls.assign(node, call)
        self._change[self._number_of(node)] = change


def _view_nodes(node: Any) -> tuple[list[Any], Any]:
    """The nodes of the view that a node returns, and the node that returns the tensor below."""
    source = node.args[0]
    if node.target is operator.getitem:  # one result of an operator with several
        return [node, source], source.args[0]
    return [node], source


class Decomposition:
    """The decomposition of one exported program, observed as it happens."""

    def __init__(self, calls: FxCalls) -> None:
        self.runs = False  # whether torch is decomposing the program
        # Call → other calls that its work was assigned to, because no node of it is left
        self.moved: dict[int, set[int]] = {}
        self._calls = calls
        self._decomposed = NodeNumbers("htp.decomposed")
        self._repeated_views = RepeatedViews(calls, self._decomposed)
        self._outputs: list[Any] = []
        # number of an exported node → changes of its result → numbers of traced nodes
        self._results: dict[int, dict[int, list[int]]] = {}
        self._returned: list[NodeResult | None] = []
        self._names: dict[int, str] = {}  # number of a node of the decomposed graph → its name

    def record(self, executed: ExecutedNode) -> None:
        """Record an executed node, and assign the traced nodes to its call."""
        call = self._calls.of_node(executed.node) if executed.traced else NO_CALL
        for node in executed.traced:
            self._decomposed.assign(node)
            # nodes of a body keep their call: they come before the node that executes the body
            if call != NO_CALL:
                node.meta.setdefault(self._calls.call_key, call)
        changed = self._repeated_views.record(executed)
        if executed.node.op == "output":  # of a body, or of the whole graph, which comes last
            self._record_outputs(executed)
            return
        self._record_unchanged(executed)
        for state in (*executed.read, *executed.returned):
            result = self._result(state.node, state.changes)
            if result is None or state.producer is None:
                continue
            if state.producer in changed:
                self._add_producer(result, changed[state.producer])
            self._add_producer(result, state.producer)

    def _record_outputs(self, executed: ExecutedNode) -> None:
        changes = {state.node: state.changes for state in executed.read}
        self._outputs = outputs_of(executed.node)
        self._returned = [self._result(node, changes.get(node)) for node in self._outputs]

    def _record_unchanged(self, executed: ExecutedNode) -> None:
        """Record that an operator returned a tensor that it read, such as dropout in evaluation."""
        if executed.traced:
            return
        for state in executed.returned:
            number = self._calls.numbers.read(state.node)
            same = [
                self._calls.numbers.read(read.node)
                for read in executed.read
                if (read.producer, read.changes) == (state.producer, state.changes)
            ]
            if number is None or len(same) != 1 or same[0] is None:
                continue
            # both nodes share one entry from here on
            states = self._results.setdefault(same[0], {})
            self._results.setdefault(number, states)

    def _add_producer(self, result: NodeResult, producer: Any) -> None:
        """Record the producer of a result.

        torch repeats a view after a change only when it is read. Until then, its producer is the
        one before the change, which does not count for the new state.
        """
        states = self._results.setdefault(result.number, {})
        number = self._decomposed.assign(producer)
        if states.get(result.changes, [])[-1:] == [number]:  # recorded at each read
            return
        earlier = (numbers for changes, numbers in states.items() if changes < result.changes)
        if not any(number in numbers for numbers in earlier):
            states.setdefault(result.changes, []).append(number)

    def _result(self, node: Any, changes: int | None) -> NodeResult | None:
        number = None if node is None else self._calls.numbers.read(node)
        if number is None or changes is None:
            return None
        return NodeResult(number, changes)

    def finish(self, program: Any) -> None:
        """Record that the decomposed program is complete."""
        self.runs = False
        nodes = program.graph.nodes
        returned = outputs_of(next(iter(reversed(nodes))))
        late = {node for node in nodes if self._decomposed.read(node) is None}
        # Paired from the end: changed inputs and buffers come before the outputs of the model.
        outputs = zip(reversed(self._outputs), reversed(returned), strict=False)
        self._repeated_views.returned(outputs, late)
        for result, node in zip(reversed(self._returned), reversed(returned), strict=False):
            if result is not None and node is not None:
                self._results.setdefault(result.number, {})[result.changes] = []
                self._add_producer(result, node)
        numbers = ((self._decomposed.read(node), node.name) for node in nodes)
        self._names = {number: name for number, name in numbers if number is not None}
        self._repeated_views.settle(nodes)
        for view in self._repeated_views.moved:
            same = self._repeated_views.again.get(view.first, ())
            if not self._named([view.first, *same]):
                self.moved.setdefault(view.first_call, set()).add(view.call)

    def name_of(self, result: NodeResult | None, *, read: bool = False) -> str | None:
        """The name of the node of the decomposed program that returns a result; None if unknown.

        If several nodes return it one after the other: with ``read``, the last one, whose result
        consumers read; else the first one.
        """
        states = {} if result is None else self._results.get(result.number, {})
        if result is None or not states:
            return None
        if len(states) == 1:
            # Operators that torch executes differently while decomposing may count changes
            # differently, too.
            numbers: Sequence[int] = next(iter(states.values()))
        else:
            numbers = states.get(result.changes, ())
        again = self._repeated_views.again
        names = self._named(numbers)
        if not names:
            for number in numbers:
                names += self._named(again.get(number, ()))
        if not names:
            return None
        return names[-1] if read else names[0]

    def _named(self, numbers: Iterable[int]) -> list[str]:
        return [self._names[number] for number in numbers if number in self._names]
