"""Nodes that torch adds while it decomposes a graph in which tensors that share memory are changed in place.

Functionalization replaces each change in place by a new tensor, and keeps the tensors that share its memory in step:

- A view of the changed tensor is out of date, also a view that is made after the change. It is computed again, from
  the tensor as it is now, when an operation reads it, or after the last operation if the model returns it. The nodes
  made for that are a chain of view operators, the same as when the view was first made.
- Where the changed tensor is itself a view, the change is written back into the tensor under it: each view operator is
  reversed, ``slice_scatter`` for ``slice``, and then the view is computed again.

torch gives all these nodes the scope of the operation that reads the view or changes it, although they are the work of
those who made the views, or who have the tensor under them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from htp_export.capture.torch_internals import Ran, State, is_view, reversed_view


class Views(NamedTuple):
    """How a tensor was first made: a chain of view operators on another tensor. torch may erase the nodes later.

    Attributes:
        maker: The node of the decomposed graph that made it.
        targets: The operators, from the last to the first; none for a tensor that is no view.
        calls: Their calls.
        below: For each, the number of the node that makes the tensor that it views.
    """

    maker: Any
    targets: tuple[Any, ...]
    calls: tuple[int, ...]
    below: tuple[int, ...]


class Replays:
    """Finds the calls to which these nodes belong.

    A view computed again from the same tensor is the work of the call that made it first. Computed from another state
    of the tensor, it combines the work of that call and of the call that made the change: it belongs to the innermost
    call around both. What is written back belongs to the innermost call that has the tensor under the view: the call
    around the one that made the change and those that made the views.

    Args:
        mark: A node of the decomposed graph → a number that copies of the node have too.
        call_of: A node of an FX graph → its call.
        common: Two calls → the innermost call around both.
        assign: Gives a node of the decomposed graph to a call.

    Attributes:
        moved: For views that were computed again from another state of the tensor, and do not belong to the call that
            made them first: the number of the node that made them first, that call, and the call that has them now.
        again: Number of the node that made a view first → the numbers of those that computed the same again.
    """

    def __init__(
        self,
        mark: Callable[[Any], int],
        call_of: Callable[[Any], int],
        common: Callable[[int, int], int],
        assign: Callable[[Any, int], None],
    ) -> None:
        self._mark, self._call_of, self._common, self._assign = mark, call_of, common, assign
        self._first: dict[Any, Views] = {}  # node of the exported graph → how its tensor was first made
        self.moved: list[tuple[int, int, int]] = []
        self.again: dict[int, list[int]] = {}
        self._written: set[Any] = set()  # nodes that write back

    def ran(self, ran: Ran) -> dict[Any, Any]:
        """Assign the nodes that were added when a node of the exported graph ran.

        Returns:
            For views that the node changed: the node of the decomposed graph that makes the tensor afterwards → the
            node that has its value before that is written back.
        """
        made, changed = set(ran.made), {}
        for state in ran.read:
            first = self._first.get(state.node)
            if first is None or not first.targets or first.maker is state.maker:
                continue
            if not state.changed:
                self._computed_again(first, state.maker, made)
                continue
            self._computed_again(first, self._before_change(first, ran.made), made)
            value = self._written_back(first, state, made)
            if value is not None:
                changed[state.maker] = value
        for state in (*ran.read, *ran.returned):
            if state.maker is not None and state.node not in self._first:
                self._first[state.node] = self._views(state.maker)
        return changed

    def returned(self, outputs: Iterable[tuple[Any, Any]], late: Collection[Any]) -> None:
        """Assign the nodes that compute views again for what the graph returns.

        Args:
            outputs: Nodes of the exported graph whose results are returned, each with the node of the decomposed
                graph that is returned; None for what is no tensor.
            late: The nodes of the decomposed graph that were made after the last node of the exported graph ran.
        """
        for node, again in outputs:
            if node in self._first:
                self._computed_again(self._first[node], again, late)

    def _views(self, maker: Any) -> Views:
        views = []
        node = maker
        while is_view(node) and node not in self._written and _viewed(node) is not None:
            views.append(node)
            node = _viewed(node)
        below = [*views[1:], node] if views else []
        targets = tuple(view.target for view in views)
        return Views(maker, targets, tuple(map(self._call_of, views)), tuple(map(self._mark, below)))

    @staticmethod
    def _chain(first: Views, again: Any, made: Collection[Any]) -> list[Any]:
        """The nodes that repeat the first way to a tensor, from ``again`` backwards, and the one below; else nothing.

        All but the one below are among ``made``.
        """
        chain = [again]
        for target in first.targets:
            if chain[-1] not in made:
                break
            if chain[-1].target != target or _viewed(chain[-1]) is None:
                return []
            chain.append(_viewed(chain[-1]))
        return chain if len(chain) > 1 else []

    def _computed_again(self, first: Views, again: Any, made: Collection[Any]) -> None:
        """Assign the nodes that repeat the first way to a tensor."""
        chain = self._chain(first, again, made)
        if not chain:
            return
        *nodes, base = chain
        same, change = self._mark(base) == first.below[len(nodes) - 1], self._call_of(base)
        numbers = (self._mark(first.maker), *first.below)
        for node, number, call in zip(nodes, numbers, first.calls, strict=False):
            now = call if same else self._common(call, change)
            self._assign(node, now)
            if same:
                self.again.setdefault(number, []).append(self._mark(node))
            if now != call:
                self.moved.append((number, call, now))

    def _before_change(self, first: Views, made: list[Any]) -> Any:
        """The node that computes a view again before the view is changed; None where it was not out of date."""
        for node in made:
            chain = self._chain(first, node, made)
            if chain and chain[-1] not in made:
                return node
        return None

    def _written_back(self, first: Views, state: State, made: Collection[Any]) -> Any:
        """Assign the nodes that write the new value of a view into the tensor under it; the node of that value.

        Returns:
            None if nothing is written back, or not in the way that is known.
        """
        chain = self._chain(first, state.maker, made)
        if not chain or chain[-1] not in made:
            return None
        node, value = chain[-1], None
        call, calls = self._call_of(node), []
        for target, maker in zip(first.targets, first.calls, strict=True):
            call = self._common(call, maker)
            if target is not operator.getitem:  # that is one view with the operator that has several results
                calls.append(call)
        for call in reversed(calls):
            value = reversed_view(node) if node in made else None
            if value is None:
                break
            self._assign(node, call)
            self._written.add(node)
            below = _viewed(node)
            while below is not value and below in made and is_view(below):  # the views before this one, as they were
                self._assign(below, call)
                below = _viewed(below)
            node = value
        self._computed_again(first, state.maker, made)
        return value


def _viewed(node: Any) -> Any:
    """The node whose result a view operator reads, its first argument; None where that is no node."""
    return node.args[0] if node.args and hasattr(node.args[0], "op") else None
