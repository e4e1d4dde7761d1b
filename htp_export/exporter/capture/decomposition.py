"""What became of the FX graph of an exported program when torch decomposed it: each node is watched while it runs.

Names are no help, as torch copies graphs and names nodes anew; what stands in a node's ``meta`` is
copied with it.

Where tensors that share memory are changed in place, functionalization adds nodes, under the scope
of the operation that reads the view or changes it:

- A view of the changed tensor is computed again, by the same chain of view operators, when an operation reads it, or
  after the last operation if the model returns it.
- Where the changed tensor is itself a view, the change is written back into the tensor under it: each view operator is
  reversed, ``slice_scatter`` for ``slice``, and then the view is computed again.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from htp_export.exporter.capture.calls import NO_CALL
from htp_export.exporter.capture.fx_calls import FxCalls, Places, Result
from htp_export.exporter.capture.torch_internals import (
    ExecutedNode,
    State,
    is_view,
    outputs_of,
    reversed_view,
)


class View(NamedTuple):
    """One view in the way to a tensor, as it was first made. torch may erase the nodes later."""

    # The view operator; None for one that has several results, since another may stand for it
    # afterwards: ``slice`` for ``split``
    operator: Any
    call: int  # the call that made the view
    number: int  # the number of the node that gives the view
    below: int  # the number of the node that gives the tensor under it


class Way(NamedTuple):
    """How a tensor was first made."""

    maker: Any  # the node of the decomposed graph that made it
    # the views that lead to it, from the last to the first; none for a tensor that is no view
    views: tuple[View, ...]


class Repeated(NamedTuple):
    """Nodes that repeat the way to a tensor."""

    # For each view, from the last to the first, its nodes: the operator, after the one that picks a
    # result
    views: list[list[Any]]
    base: Any  # the node that gives the tensor under them


class Moved(NamedTuple):
    """A view that was computed again, and belongs to another call than the one that made it first."""

    first: int  # the number of the node that made it first
    call: int  # the call that did
    again: int  # the number of the node that computed it again
    now: int  # the call to which that node belongs


class Replays:
    """Finds the calls to which the nodes that functionalization adds belong.

    A view computed again from the same tensor is the work of the call that made it first; from
    another state of the tensor, of the innermost call around that one and the call that made the
    change. What is written back belongs to the innermost call around the one that made the change
    and those that made the views. Both belong to a call inside of that one if it makes the change
    and reads the result, too (`settle`).
    """

    def __init__(self, calls: FxCalls, decomposed: Places) -> None:
        self._mark, self._calls = decomposed.mark, calls
        # node of the exported graph → how its tensor was first made
        self._first: dict[Any, Way] = {}
        # Views that were computed again from another state of the tensor, and do not belong to the
        # call that made them first
        self.moved: list[Moved] = []
        # Number of the node that made a view first → the numbers of those that computed the same
        # again
        self.again: dict[int, list[int]] = {}
        self._written: set[Any] = set()  # nodes that write back
        # number of a node that follows a change → the call that made the change
        self._change: dict[int, int] = {}

    def record(self, executed: ExecutedNode) -> dict[Any, Any]:
        """Assign the nodes that were added when a node of the exported graph was executed.

        Returns for views that it changed: the node that makes the tensor afterwards → the node that
        has its value before that is written back.
        """
        traced, changed = set(executed.made), {}
        for state in executed.read:
            first = self._first.get(state.node)
            if first is None or not first.views or first.maker is state.maker:
                continue
            if not state.changed:
                self._computed_again(first, state.maker, traced)
                continue
            self._computed_again(first, self._before_change(first, executed.made), traced)
            value = self._written_back(first, state, traced)
            if value is not None:
                changed[state.maker] = value
        for state in (*executed.read, *executed.returned):
            if state.maker is not None and state.node not in self._first:
                self._first[state.node] = self._way(state.maker)
        return changed

    def returned(self, outputs: Iterable[tuple[Any, Any]], late: Collection[Any]) -> None:
        """Assign the nodes that compute views again for what the graph returns.

        ``outputs``: nodes of the exported graph, each with the node that is returned, or None for
        what is no tensor;
        ``late``: the nodes that were made after the last node of the exported graph ran.
        """
        for node, again in outputs:
            if node in self._first:
                self._computed_again(self._first[node], again, late)

    def settle(self, nodes: Iterable[Any]) -> None:
        """Assign nodes of the complete graph that follow a change to a call that makes the change and reads the result.

        Otherwise nodes outside of that call would take what it changed, and give it back.
        """
        settled: dict[int, int] = {}
        for node in reversed(list(nodes)):
            change = self._change.get(self._mark(node), NO_CALL)
            call = before = self._calls.of_node(node)
            for reader in node.users if change != NO_CALL else ():
                # around the change, as `call` is
                both = self._calls.log.common(change, self._calls.of_node(reader))
                call = both if self._calls.log.common(both, call) == call else call
            if call != before:
                self._calls.assign(node, call)
                settled[self._mark(node)] = call
        self.moved = [
            moved._replace(now=settled.get(moved.again, moved.now)) for moved in self.moved
        ]

    def _way(self, maker: Any) -> Way:
        views = []
        node = maker
        while is_view(node) and node not in self._written:
            nodes, below = _step(node)
            target = nodes[0].target if len(nodes) == 1 else None
            views.append(
                View(target, self._calls.of_node(node), self._mark(node), self._mark(below))
            )
            node = below
        return Way(maker, tuple(views))

    @staticmethod
    def _repeated(first: Way, again: Any, traced: Collection[Any]) -> Repeated | None:
        """The nodes among ``made`` that lead to ``again`` on the same way; None if it is another."""
        repeated = Repeated([], again)
        for view in first.views:
            if repeated.base not in traced:
                break
            if not is_view(repeated.base):
                return None
            nodes, below = _step(repeated.base)
            if view.operator is not None and [node.target for node in nodes] != [view.operator]:
                return None
            repeated = Repeated([*repeated.views, nodes], below)
        return repeated if repeated.views else None

    def _computed_again(self, first: Way, again: Any, traced: Collection[Any]) -> None:
        """Assign the nodes that repeat the first way to a tensor."""
        repeated = self._repeated(first, again, traced)
        if repeated is None:
            return
        same = self._mark(repeated.base) == first.views[len(repeated.views) - 1].below
        base = self._calls.of_node(repeated.base)
        change = self._change.get(self._mark(repeated.base), base)
        for nodes, view in zip(repeated.views, first.views, strict=False):
            call = view.call if same else self._calls.log.common(view.call, base)
            for node in nodes:
                self._calls.assign(node, call)
                if not same:
                    self._change[self._mark(node)] = change
            if same:
                self.again.setdefault(view.number, []).append(self._mark(nodes[0]))
            if call != view.call:
                self.moved.append(Moved(view.number, view.call, self._mark(nodes[0]), call))

    def _before_change(self, first: Way, traced: list[Any]) -> Any:
        """The node that computes a view again before the view is changed; None where it was not out of date."""
        for node in traced:
            repeated = self._repeated(first, node, traced)
            if repeated is not None and repeated.base not in traced:
                return node
        return None

    def _written_back(self, first: Way, state: State, traced: Collection[Any]) -> Any:
        """Assign the nodes that write the new value of a view into the tensor under it; that value's node, if any."""
        repeated = self._repeated(first, state.maker, traced)
        if repeated is None or repeated.base not in traced:
            return None
        node, value = repeated.base, None
        change = call = self._calls.of_node(node)
        calls = []
        for view in first.views:
            call = self._calls.log.common(call, view.call)
            calls.append(call)
        for call in reversed(calls):
            value = reversed_view(node) if node in traced else None
            if value is None:
                break
            self._calls.assign(node, call)
            self._change[self._mark(node)] = change
            self._written.add(node)
            below = node.args[0]
            # the views before this one, as they were
            while below is not value and below in traced and is_view(below):
                self._calls.assign(below, call)
                self._change[self._mark(below)] = change
                below = below.args[0]
            node = value
        self._computed_again(first, state.maker, traced)
        return value


def _step(node: Any) -> tuple[list[Any], Any]:
    """The nodes of the view that a node gives, and the node that gives the tensor under it."""
    several = node.args[0]
    return (
        ([node, several], several.args[0]) if node.target is operator.getitem else ([node], several)
    )


class Decomposition:
    """The decomposition of one exported program, as it happens."""

    def __init__(self, calls: FxCalls) -> None:
        self.runs = False  # whether torch is at it
        # Call → other calls to which its work was given, because nothing is left of what it did
        # itself
        self.moved: dict[int, set[int]] = {}
        self._calls, self._decomposed = calls, Places("htp.decomposed")
        self._replays = Replays(calls, self._decomposed)
        self._outputs: list[Any] = []
        # place → changes → places in graphs that were traced
        self._results: dict[int, dict[int, list[int]]] = {}
        self._returned: list[Result | None] = []
        self._names: dict[int, str] = {}  # place in the decomposed graph → name of its node

    def record(self, executed: ExecutedNode) -> None:
        """Record an executed node."""
        call = self._calls.of_node(executed.node) if executed.made else NO_CALL
        for each in executed.made:  # a body's nodes come before the node that runs the body
            self._decomposed.mark(each)
            if call != NO_CALL:
                each.meta.setdefault(self._calls.call_key, call)
        changed = self._replays.record(executed)
        if executed.node.op == "output":  # of a body, or of the whole, which comes last
            changes = {state.node: state.changes for state in executed.read}
            self._outputs = outputs_of(executed.node)
            self._returned = [self._result(node, changes.get(node)) for node in self._outputs]
            return
        self._note_same(executed)
        for state in (*executed.read, *executed.returned):
            result = self._result(state.node, state.changes)
            if result is not None and state.maker is not None:
                if state.maker in changed:
                    self._note(result, changed[state.maker])
                self._note(result, state.maker)

    def _note_same(self, executed: ExecutedNode) -> None:
        """Note that an operator, such as dropout in evaluation, gave back a tensor that it read."""
        for state in executed.returned if not executed.made else ():
            given = [
                each
                for each in executed.read
                if (each.maker, each.changes) == (state.maker, state.changes)
            ]
            place, *same = (self._calls.places.read(each.node) for each in (state, *given))
            if place is not None and len(same) == 1 and same[0] is not None:
                self._results.setdefault(place, self._results.setdefault(same[0], {}))

    def _note(self, result: Result, maker: Any) -> None:
        """Note what makes a tensor; torch computes it only when it is read: until then, it has what made it before."""
        states, mark = self._results.setdefault(result.place, {}), self._decomposed.mark(maker)
        nodes = states.get(result.changes, [])
        if nodes[-1:] == [mark]:  # noted each time that it is read
            return
        if not any(mark in nodes for changes, nodes in states.items() if changes < result.changes):
            states.setdefault(result.changes, []).append(mark)

    def _result(self, node: Any, changes: int | None) -> Result | None:
        place = None if node is None else self._calls.places.read(node)
        return None if place is None or changes is None else Result(place, changes)

    def finish(self, program: Any) -> None:
        """Note that the decomposed program is complete."""
        self.runs = False
        returned = outputs_of(next(iter(reversed(program.graph.nodes))))
        late = {node for node in program.graph.nodes if self._decomposed.read(node) is None}
        # From the end: what was changed of inputs and buffers comes before what the model returns.
        self._replays.returned(zip(reversed(self._outputs), reversed(returned), strict=False), late)
        for result, node in zip(reversed(self._returned), reversed(returned), strict=False):
            if result is not None and node is not None:
                self._results.setdefault(result.place, {})[result.changes] = []
                self._note(result, node)
        places = ((self._decomposed.read(node), node.name) for node in program.graph.nodes)
        self._names = {place: name for place, name in places if place is not None}
        self._replays.settle(program.graph.nodes)
        for moved in self._replays.moved:
            if not self._named([moved.first, *self._replays.again.get(moved.first, ())]):
                self.moved.setdefault(moved.call, set()).add(moved.now)

    def name_of(self, result: Result | None, *, read: bool = False) -> str | None:
        """The name of the decomposed program's node that has a result; None where that is gone, or cannot be told.

        Where several nodes have it one after the other: with ``read``, what its readers read; else
        what was made first.
        """
        states = {} if result is None else self._results.get(result.place, {})
        if result is None or not states:
            return None
        # Operators that torch runs otherwise while it decomposes may count otherwise, too.
        nodes = next(iter(states.values())) if len(states) == 1 else states.get(result.changes, ())
        again = (copy for place in nodes for copy in self._replays.again.get(place, ()))
        names = self._named(nodes) or self._named(again)
        return names[-1 if read else 0] if names else None

    def _named(self, places: Iterable[int]) -> list[str]:
        return [self._names[place] for place in places if place in self._names]
