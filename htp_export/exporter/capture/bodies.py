"""Which module runs what in the branches of ``torch.cond`` and in the bodies of loops.

Dynamo traces these functions into FX graphs, whose nodes have the modules that ran. ``torch.export`` then traces those
graphs once more, and nothing but the stack trace of a node tells from which node of Dynamo's graph it comes: its last
line is the line of the code that FX generated for that graph.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from htp_export.exporter.capture.body_internals import bodies_given, bodies_of, file_of_code, generated_lines, is_choice
from htp_export.exporter.capture.calls import NO_CALL, CallLog
from htp_export.exporter.capture.torch_internals import scopes_of

_Counts = collections.Counter[tuple[str, int]]
_Module = tuple[str, str]  # key and name of a running module in Dynamo's scopes


@dataclass
class Run:
    """One run of an operator with bodies that Dynamo made.

    Attributes:
        parent: The call that it happened in.
        calls: Body and name of a node in it → the node's call.
        made: Module path and parent → the calls that were added for this run, in order.
        bodies: The bodies, inner ones too; held, so that their ids stay theirs.
        found: Whether exported nodes are known to be of this run.
    """

    parent: int
    calls: dict[tuple[int, str], int] = field(default_factory=dict)
    made: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    bodies: list[Any] = field(default_factory=list)
    found: bool = False


class Bodies:
    """The bodies of one export.

    Args:
        path_by_id: ``id(module)`` → module path.
    """

    def __init__(self, path_by_id: Mapping[int, str]) -> None:
        self._path_by_id = path_by_id
        self._runs: list[Run] = []
        self._body_of_file: dict[str, int] = {}
        self._inside = False

    def copy(self) -> Bodies:
        """The same runs, none of them found yet."""
        other = Bodies(self._path_by_id)
        other._runs = [replace(run, found=False) for run in self._runs]
        other._body_of_file = self._body_of_file.copy()
        return other

    def clear(self) -> None:
        """Forget everything: a new attempt at tracing begins."""
        self._runs.clear()
        self._body_of_file.clear()
        self._inside = False

    def enter(self, function: Any, args: Any, log: CallLog, *, traced: bool) -> bool:
        """Note that the model calls an operator, which calls itself again with the same bodies while it runs.

        Args:
            function: The operator.
            args: Its arguments.
            log: The calls so far. Those of modules in bodies are added.
            traced: Whether it runs in the model itself, and not while Dynamo tries its graphs out.

        Returns:
            Whether it has bodies and is not inside another one; only then `leave` is to be called.
        """
        bodies = bodies_given(function, args)
        if self._inside or not bodies or not log.stack:
            return False
        self._inside = True
        if traced:
            run = Run(log.stack[-1])
            self._runs.append(run)
            self._enter_bodies(run, function, bodies, log, run.parent, collections.Counter(), frozenset())
        return True

    def leave(self) -> None:
        """Note that the operator returns."""
        self._inside = False

    def _enter_bodies(
        self,
        run: Run,
        function: Any,
        bodies: Iterable[Any],
        log: CallLog,
        parent: int,
        counts: _Counts,
        above: frozenset[_Module],
    ) -> None:
        """Find the calls of the nodes of the bodies of an operator; the arguments are those of `_enter`."""
        before = counts.copy()
        for body in bodies:
            run.bodies.append(body)
            self._body_of_file[file_of_code(body) or ""] = id(body)
            ran = before.copy() if is_choice(function) else counts
            self._enter(run, body, log, parent, ran, above)
            counts |= ran

    def _enter(
        self, run: Run, graph_module: Any, log: CallLog, parent: int, counts: _Counts, above: frozenset[_Module]
    ) -> None:
        """Find the calls of the nodes of a graph, and of those in its bodies.

        Of the branches of a ``torch.cond`` one alone runs: a module that runs in several of them runs once.

        Args:
            run: The run; changed.
            graph_module: The graph.
            log: The calls so far.
            parent: The call that the graph runs in.
            counts: Module path and parent → how often the module ran so far; counted on.
            above: The modules in which the operator runs that has the graph: the scopes inside name them too.
        """
        known: dict[_Module, int] = {}
        bodies = bodies_of(graph_module)
        for node in graph_module.graph.nodes:
            if not node.op.startswith("call"):
                continue
            call, scopes = parent, scopes_of(node)
            for scope in scopes:
                path = self._path_by_id.get(scope.module)
                if path is None or scope[:2] in above:
                    continue
                if scope[:2] not in known:
                    known[scope[:2]] = _next_call(run, log, path, call, counts)
                call = known[scope[:2]]
            run.calls[id(graph_module), node.name] = call
            inside = above.union(scope[:2] for scope in scopes)
            self._enter_bodies(run, node.target, bodies.get(node, ()), log, call, counts, inside)

    def calls(self, parent: int, traces: Iterable[str | None]) -> Mapping[str, int]:
        """Stack traces of exported nodes in the bodies of one operator → their calls, as far as they are known.

        Args:
            parent: The call of the operator.
            traces: The stack traces.
        """
        places = {trace: self._place(trace) for trace in traces if trace}
        at_hand = [run for run in self._runs if run.parent == parent and not run.found]
        run = next((run for run in at_hand if any(place in run.calls for place in places.values())), None)
        if run is None:
            return {}
        run.found = True
        return {trace: run.calls.get(place, NO_CALL) for trace, place in places.items() if place is not None}

    def _place(self, trace: str) -> tuple[int, str] | None:
        """The body and the node of it that an exported node comes from."""
        lines = ((self._body_of_file.get(file), name) for file, name in generated_lines(trace))
        return next(((body, name) for body, name in lines if body is not None), None)


def _next_call(run: Run, log: CallLog, path: str, parent: int, counts: _Counts) -> int:
    """The next call of a module on one way through the branches: one that another way has as well, or a new one."""
    counts[path, parent] += 1
    calls = run.made.setdefault((path, parent), [])
    if counts[path, parent] > len(calls):
        calls.append(log.add(path, parent))
    return calls[counts[path, parent] - 1]
