"""Branches of ``torch.cond``, bodies of loops and other graphs in FX graphs, and which module runs what in them.

Dynamo traces these functions into FX graphs, whose nodes have the modules that ran.
``torch.export`` then traces those graphs once more: only the last line of a node's stack trace
tells from which node of Dynamo's graph it comes.
"""

from __future__ import annotations

import collections
import functools
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from htp_export.exporter.capture.calls import NO_CALL, CallLog
from htp_export.exporter.capture.torch_internals import has_bodies, is_choice, scopes_of
from htp_export.process.restoring import Changes

_Module = tuple[str, str]  # key and name of a running module in Dynamo's scopes


def bodies_run_in_place(module: Any) -> Iterator[Any]:
    """The graph modules inside an exported one that torch runs where they stand, once: ``with torch.no_grad():``."""
    for node in module.graph.nodes:
        if node.op == "call_function" and "wrap_with" in str(node.target):
            for argument in node.all_input_nodes:
                if argument.op == "get_attr" and hasattr(
                    body := getattr(module, argument.target), "graph"
                ):
                    yield body
                    yield from bodies_run_in_place(body)


def bodies_of(module: Any) -> dict[Any, list[Any]]:
    """The branches and loop bodies in the graph of a module: node → graph modules; none for what has no graph."""
    bodies: dict[Any, list[Any]] = {}
    for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
        if has_bodies(node.target):
            arguments = [
                getattr(module, each.target, None)
                for each in node.all_input_nodes
                if each.op == "get_attr"
            ]
            bodies[node] = [body for body in arguments if isinstance(body, torch.fx.GraphModule)]
    return bodies


def nodes_in_bodies(module: Any) -> dict[Any, list[Any]]:
    """The same with nodes in the place of graph modules, each before the nodes of the bodies that it has."""
    nodes: dict[Any, list[Any]] = {}
    for holder, bodies in bodies_of(module).items():
        nodes[holder] = []
        for body in bodies:
            inner = nodes_in_bodies(body)
            for node in body.graph.nodes:
                nodes[holder] += [node, *inner.get(node, ())]
    return nodes


def file_of_code(module: Any) -> str | None:
    """Return the file name that FX generates for the code of a graph module; None for other modules."""
    # Dynamo's have no code until it is asked for
    if not isinstance(module, torch.fx.GraphModule) or not module.code:
        return None
    code = getattr(module.forward, "__code__", None)
    return None if code is None else str(code.co_filename)


def generated_lines(trace: str) -> list[tuple[str, str]]:
    """Return the lines of FX-generated code in a stack trace, innermost first: file, and name of the line's node."""
    return re.findall(
        r'File "(<eval_with_key>[^"]*)", line \d+, in .*\n\s*(\w+)\b[^=\n]* = ', trace
    )[::-1]


@dataclass
class Run:
    """One run of an operator with bodies that Dynamo made."""

    parent: int  # the call that it happened in
    # body and name of a node in it → the node's call
    calls: dict[tuple[int, str], int] = field(default_factory=dict)
    # Module path and parent → the calls that were added for this run, in order
    made: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    # the bodies, inner ones too; held, so that their ids stay theirs
    bodies: list[Any] = field(default_factory=list)
    found: bool = False  # whether exported nodes are known to be of this run


class Bodies:
    """The bodies of one export; ``path_by_id`` gives ``id(module)`` → module path."""

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

        ``traced``: whether it runs in the model itself, and not while Dynamo tries its graphs out.
        Returns whether it has bodies and is not inside another one; only then `leave` is to be
        called.
        """
        bodies = [
            each for each in args if has_bodies(function) and isinstance(each, torch.fx.GraphModule)
        ]
        if self._inside or not bodies or not log.stack:
            return False
        self._inside = True
        if traced:
            run = Run(log.stack[-1])
            self._runs.append(run)
            _Reader(run, log, self._path_by_id).read_operator(
                function, bodies, run.parent, frozenset()
            )
            self._body_of_file.update((file_of_code(body) or "", id(body)) for body in run.bodies)
        return True

    def leave(self) -> None:
        """Note that the operator returns."""
        self._inside = False

    def calls(self, parent: int, traces: Iterable[str | None]) -> Mapping[str, int]:
        """Stack traces of nodes in bodies of an operator that ran in the call ``parent`` → their calls where known."""
        places = {trace: self._place(trace) for trace in traces if trace}
        at_hand = [run for run in self._runs if run.parent == parent and not run.found]
        run = next(
            (run for run in at_hand if any(place in run.calls for place in places.values())), None
        )
        if run is None:
            return {}
        run.found = True
        return {
            trace: run.calls.get(place, NO_CALL)
            for trace, place in places.items()
            if place is not None
        }

    def _place(self, trace: str) -> tuple[int, str] | None:
        """The body and the node of it that an exported node comes from."""
        lines = ((self._body_of_file.get(file), name) for file, name in generated_lines(trace))
        return next(((body, name) for body, name in lines if body is not None), None)


class _Reader:
    """Finds the calls of the nodes in the bodies of one run, and in the bodies inside them, in order of execution."""

    def __init__(self, run: Run, log: CallLog, path_by_id: Mapping[int, str]) -> None:
        self._run, self._log, self._path_by_id = run, log, path_by_id
        # module path and parent → how often it ran so far
        self._counts = collections.Counter[tuple[str, int]]()

    def read_operator(
        self, function: Any, bodies: Iterable[Any], call: int, above: frozenset[_Module]
    ) -> None:
        """Read the bodies of an operator that runs in a call, and in modules ``above`` that scopes inside name too.

        Of the branches of a ``torch.cond`` one alone runs: a module that runs in several of them
        runs once.
        """
        before, most = self._counts.copy(), self._counts.copy()
        for body in bodies:
            if is_choice(function):
                self._counts = before.copy()
            self._read_body(body, call, above)
            most |= self._counts
        self._counts = most

    def _read_body(self, body: Any, call: int, above: frozenset[_Module]) -> None:
        self._run.bodies.append(body)
        calls_of_modules: dict[_Module, int] = {}
        bodies_inside = bodies_of(body)
        for node in body.graph.nodes:
            if not node.op.startswith("call"):
                continue
            innermost, scopes = call, scopes_of(node)
            for scope in scopes:
                path, module = self._path_by_id.get(scope.module), scope[:2]
                if path is not None and module not in above:
                    if module not in calls_of_modules:
                        calls_of_modules[module] = self._next_call(path, innermost)
                    innermost = calls_of_modules[module]
            self._run.calls[id(body), node.name] = innermost
            if node in bodies_inside:
                inside = above.union(scope[:2] for scope in scopes)
                self.read_operator(node.target, bodies_inside[node], innermost, inside)

    def _next_call(self, path: str, parent: int) -> int:
        """The next call of a module on one way through the branches: one that another way has too, or a new one."""
        place = self._counts[path, parent]
        self._counts[path, parent] += 1
        calls = self._run.made.setdefault((path, parent), [])
        if place == len(calls):
            calls.append(self._log.add(path, parent))
        return calls[place]


def watch_bodies(
    changes: Changes, module: Any, watched: Callable[[Callable[[], Any], Any, Any], Any]
) -> None:
    """Observe the nodes of bodies while torch decomposes an exported graph: it inlines them, without their scopes.

    ``watched`` is called for each node of a body with a function that executes it, the interpreter
    of the body, and the node; it returns the result of the function.
    """

    class Watched(torch.fx.Interpreter):
        """Runs a body node by node, as its own code does."""

        def __init__(self, body: torch.fx.GraphModule) -> None:
            super().__init__(body)
            self._file = file_of_code(body) or ""
            self._lines = _lines_of_nodes(body)

        def run_node(self, n: torch.fx.Node) -> Any:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            if n.op == "call_function" and n.name in self._lines:
                call = _calling_from(self._file, self._lines[n.name])
                return watched(lambda: call(n.target, args, kwargs), self, n)
            return watched(lambda: getattr(self, n.op)(n.target, args, kwargs), self, n)

    for body in bodies_run_in_place(module):
        interpreter = Watched(body)
        changes.will_undo(functools.partial(vars(body).pop, "forward", None))
        body.forward = interpreter.run


def _lines_of_nodes(module: Any) -> dict[str, int]:
    """Name of a node of a graph module → its line in the code that FX made of the graph."""
    lines = enumerate(module.code.splitlines(), 1)
    named = [
        (match.group(1), line)
        for line, text in lines
        if (match := re.match(r"\s+(\w+)\b[^=\n]* = ", text))
    ]
    return dict(reversed(named))  # the first line of each name


def _calling_from(file: str, line: int) -> Callable[[Any, Any, Any], Any]:
    """Call a function from a ``forward`` at a line of a file, as torch sees it, which writes the place on each node."""

    def call(target: Any, args: Any, kwargs: Any) -> Any:
        return target(*args, **kwargs)

    code = call.__code__.replace(co_name="forward", co_filename=file, co_firstlineno=line - 1)
    return types.FunctionType(code, {})
