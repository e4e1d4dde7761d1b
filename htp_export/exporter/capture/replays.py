"""Nodes that torch adds while it decomposes a graph in which tensors that share memory are changed in place.

Functionalization replaces each change in place by a new tensor, and keeps the tensors that share its memory in step:

- A view of the changed tensor is computed again, by the same chain of view operators, when an operation reads it, or
  after the last operation if the model returns it.
- Where the changed tensor is itself a view, the change is written back into the tensor under it: each view operator is
  reversed, ``slice_scatter`` for ``slice``, and then the view is computed again.

torch gives all these nodes the scope of the operation that reads the view or changes it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from htp_export.exporter.capture.calls import NO_CALL
from htp_export.exporter.capture.fx_calls import FxCalls, Places
from htp_export.exporter.capture.torch_internals import ExecutedNode, State, is_view, reversed_view


class View(NamedTuple):
    """One view in the way to a tensor, as it was first made. torch may erase the nodes later."""

    # The view operator; None for one that has several results, since another may stand for it afterwards: ``slice`` for
    # ``split``
    operator: Any
    call: int  # the call that made the view
    number: int  # the number of the node that gives the view
    below: int  # the number of the node that gives the tensor under it


class Way(NamedTuple):
    """How a tensor was first made."""

    maker: Any  # the node of the decomposed graph that made it
    views: tuple[View, ...]  # the views that lead to it, from the last to the first; none for a tensor that is no view


class Repeated(NamedTuple):
    """Nodes that repeat the way to a tensor."""

    # For each view, from the last to the first, its nodes: the operator, after the one that picks a result
    views: list[list[Any]]
    base: Any  # the node that gives the tensor under them


class Moved(NamedTuple):
    """A view that was computed again, and belongs to another call than the one that made it first."""

    first: int  # the number of the node that made it first
    call: int  # the call that did
    again: int  # the number of the node that computed it again
    now: int  # the call to which that node belongs


class Replays:
    """Finds the calls to which these nodes belong.

    A view computed again from the same tensor is the work of the call that made it first; from another state of the
    tensor, of the innermost call around that one and the call that made the change. What is written back belongs to the
    innermost call around the one that made the change and those that made the views. Both belong to a call inside of
    that one if it makes the change and reads the result, too (`settle`).
    """

    def __init__(self, calls: FxCalls, decomposed: Places) -> None:
        self._mark, self._calls = decomposed.mark, calls
        self._first: dict[Any, Way] = {}  # node of the exported graph → how its tensor was first made
        # Views that were computed again from another state of the tensor, and do not belong to the call that made them
        # first
        self.moved: list[Moved] = []
        # Number of the node that made a view first → the numbers of those that computed the same again
        self.again: dict[int, list[int]] = {}
        self._written: set[Any] = set()  # nodes that write back
        self._change: dict[int, int] = {}  # number of a node that follows a change → the call that made the change

    def record(self, executed: ExecutedNode) -> dict[Any, Any]:
        """Assign the nodes that were added when a node of the exported graph was executed.

        Returns for views that it changed: the node that makes the tensor afterwards → the node that has its value
        before that is written back.
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

        ``outputs``: nodes of the exported graph, each with the node that is returned, or None for what is no tensor;
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
                both = self._calls.log.common(change, self._calls.of_node(reader))  # around the change, as `call` is
                call = both if self._calls.log.common(both, call) == call else call
            if call != before:
                self._calls.assign(node, call)
                settled[self._mark(node)] = call
        self.moved = [moved._replace(now=settled.get(moved.again, moved.now)) for moved in self.moved]

    def _way(self, maker: Any) -> Way:
        views = []
        node = maker
        while is_view(node) and node not in self._written:
            nodes, below = _step(node)
            target = nodes[0].target if len(nodes) == 1 else None
            views.append(View(target, self._calls.of_node(node), self._mark(node), self._mark(below)))
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
            while below is not value and below in traced and is_view(below):  # the views before this one, as they were
                self._calls.assign(below, call)
                self._change[self._mark(below)] = change
                below = below.args[0]
            node = value
        self._computed_again(first, state.maker, traced)
        return value


def _step(node: Any) -> tuple[list[Any], Any]:
    """The nodes of the view that a node gives, and the node that gives the tensor under it."""
    several = node.args[0]
    return ([node, several], several.args[0]) if node.target is operator.getitem else ([node], several)
