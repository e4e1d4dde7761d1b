"""What became of the FX graph of an exported program when torch decomposed it: each node is watched while it runs.

Names are no help, as torch copies graphs and names nodes anew; what stands in a node's ``meta`` is copied with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from htp_export.exporter.capture.calls import NO_CALL
from htp_export.exporter.capture.fx_calls import FxCalls, Places, Result
from htp_export.exporter.capture.replays import Replays
from htp_export.exporter.capture.torch_internals import ExecutedNode, outputs_of


class Decomposition:
    """The decomposition of one exported program, as it happens."""

    def __init__(self, calls: FxCalls) -> None:
        self.runs = False  # whether torch is at it
        # Call → other calls to which its work was given, because nothing is left of what it did itself
        self.moved: dict[int, set[int]] = {}
        self._calls, self._decomposed = calls, Places("htp.decomposed")
        self._replays = Replays(calls, self._decomposed)
        self._outputs: list[Any] = []
        self._results: dict[int, dict[int, list[int]]] = {}  # place → changes → places in graphs that were traced
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
        for state in (*executed.read, *executed.returned):
            result = self._result(state.node, state.changes)
            if result is not None and state.maker is not None:
                if state.maker in changed:
                    self._note(result, changed[state.maker])
                self._note(result, state.maker)

    def _note(self, result: Result, maker: Any) -> None:
        self._results.setdefault(result.place, {}).setdefault(result.changes, []).append(self._decomposed.mark(maker))

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

        Where several nodes have it one after the other: with ``read``, what its readers read; else what was made first.
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
