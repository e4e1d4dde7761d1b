"""Bodies in FX graphs, such as branches of ``torch.cond`` and of loops, and their modules' calls.

Dynamo traces these functions into FX graphs, whose nodes have the scopes of the modules that ran.
``torch.export`` then traces those graphs again: only the last line of a node's stack trace tells
which node of Dynamo's graph it comes from.
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

_ModuleScope = tuple[str, str]  # key and name of a running module in Dynamo's scopes


def bodies_run_in_place(module: Any) -> Iterator[Any]:
    """Graph modules in an exported one that torch runs once, inlined: ``with torch.no_grad():``."""
    for node in module.graph.nodes:
        if node.op != "call_function" or "wrap_with" not in str(node.target):
            continue
        for argument in node.all_input_nodes:
            body = getattr(module, argument.target) if argument.op == "get_attr" else None
            if hasattr(body, "graph"):
                yield body
                yield from bodies_run_in_place(body)


def bodies_of(module: Any) -> dict[Any, list[Any]]:
    """Node → the graph modules of its branches or loop bodies; empty for other modules."""
    bodies: dict[Any, list[Any]] = {}
    if not isinstance(module, torch.fx.GraphModule):
        return bodies
    for node in module.graph.nodes:
        if not has_bodies(node.target):
            continue
        attributes = [argument for argument in node.all_input_nodes if argument.op == "get_attr"]
        inner = [getattr(module, attribute.target, None) for attribute in attributes]
        bodies[node] = [body for body in inner if isinstance(body, torch.fx.GraphModule)]
    return bodies


def nodes_in_bodies(module: Any) -> dict[Any, list[Any]]:
    """Node → the nodes in its bodies, each before the nodes of its own bodies."""
    nodes: dict[Any, list[Any]] = {}
    for holder, bodies in bodies_of(module).items():
        nodes[holder] = []
        for body in bodies:
            inner = nodes_in_bodies(body)
            for node in body.graph.nodes:
                nodes[holder] += [node, *inner.get(node, ())]
    return nodes


def file_of_code(module: Any) -> str | None:
    """The file name that FX generates for the code of a graph module; None for other modules."""
    # FX generates the code of Dynamo's graph modules when it is first read
    if not isinstance(module, torch.fx.GraphModule) or not module.code:
        return None
    code = getattr(module.forward, "__code__", None)
    if code is None:
        return None
    return str(code.co_filename)


def generated_lines(trace: str) -> list[tuple[str, str]]:
    """File and node name of each line of FX-generated code in a stack trace, innermost first."""
    return re.findall(
        r'File "(<eval_with_key>[^"]*)", line \d+, in .*\n\s*(\w+)\b[^=\n]* = ', trace
    )[::-1]


@dataclass
class Run:
    """One run of an operator with bodies traced by Dynamo."""

    parent: int  # the call in which it ran
    # (id of a body, name of a node in it) → the node's call
    calls: dict[tuple[int, str], int] = field(default_factory=dict)
    # (module path, parent) → the calls that were added for this run, in order
    added: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    # the bodies, with inner ones; kept alive, so that their ids stay unique
    bodies: list[Any] = field(default_factory=list)
    found: bool = False  # whether exported nodes were matched with this run


class Bodies:
    """The bodies of one export; ``path_by_id`` gives ``id(module)`` → module path."""

    def __init__(self, path_by_id: Mapping[int, str]) -> None:
        self._path_by_id = path_by_id
        self._runs: list[Run] = []
        self._body_of_file: dict[str, int] = {}
        self._inside = False

    def copy(self) -> Bodies:
        """A copy of the runs, none of them matched yet."""
        other = Bodies(self._path_by_id)
        other._runs = [replace(run, found=False) for run in self._runs]
        other._body_of_file = self._body_of_file.copy()
        return other

    def clear(self) -> None:
        """Discard everything: a new attempt at tracing begins."""
        self._runs.clear()
        self._body_of_file.clear()
        self._inside = False

    def enter(self, function: Any, args: Any, log: CallLog, *, traced: bool) -> bool:
        """Record that the model calls an operator, which may call itself with the same bodies.

        ``traced``: whether it runs in the model itself, and not while Dynamo tests its graphs.
        Returns whether it has bodies and is not inside another one; only then `leave` is called.
        """
        if self._inside or not log.stack or not has_bodies(function):
            return False
        bodies = [argument for argument in args if isinstance(argument, torch.fx.GraphModule)]
        if not bodies:
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
        """Record that the operator returns."""
        self._inside = False

    def calls(self, parent: int, traces: Iterable[str | None]) -> Mapping[str, int]:
        """Stack trace of a node in a body → its call, if known.

        ``parent`` is the call in which the operator ran.
        """
        origins = {trace: self._origin(trace) for trace in traces if trace}
        for run in self._runs:
            if run.parent != parent or run.found:
                continue
            if any(origin in run.calls for origin in origins.values()):
                run.found = True
                return {
                    trace: run.calls.get(origin, NO_CALL)
                    for trace, origin in origins.items()
                    if origin is not None
                }
        return {}

    def _origin(self, trace: str) -> tuple[int, str] | None:
        """The body, and the name of its node, that an exported node comes from."""
        for file, name in generated_lines(trace):
            body = self._body_of_file.get(file)
            if body is not None:
                return body, name
        return None


class _Reader:
    """Finds the calls of the nodes in the bodies of one run, with inner bodies, in order."""

    def __init__(self, run: Run, log: CallLog, path_by_id: Mapping[int, str]) -> None:
        self._run = run
        self._log = log
        self._path_by_id = path_by_id
        # module path and parent → how often it ran so far
        self._counts = collections.Counter[tuple[str, int]]()

    def read_operator(
        self,
        function: Any,
        bodies: Iterable[Any],
        call: int,
        above: frozenset[_ModuleScope],
    ) -> None:
        """Read the bodies of an operator that runs in a call; scopes inside also contain ``above``.

        Only one branch of a ``torch.cond`` runs: a module that is called in several branches runs
        once.
        """
        before = self._counts.copy()
        most = self._counts.copy()
        for body in bodies:
            if is_choice(function):
                self._counts = before.copy()
            self._read_body(body, call, above)
            most |= self._counts
        self._counts = most

    def _read_body(self, body: Any, call: int, above: frozenset[_ModuleScope]) -> None:
        self._run.bodies.append(body)
        calls_of_modules: dict[_ModuleScope, int] = {}
        bodies_inside = bodies_of(body)
        for node in body.graph.nodes:
            if not node.op.startswith("call"):
                continue
            innermost = call
            scopes = scopes_of(node)
            for scope in scopes:
                path = self._path_by_id.get(scope.module)
                module = scope[:2]
                if path is None or module in above:
                    continue
                if module not in calls_of_modules:
                    calls_of_modules[module] = self._next_call(path, innermost)
                innermost = calls_of_modules[module]
            self._run.calls[id(body), node.name] = innermost
            if node in bodies_inside:
                inside = above.union(scope[:2] for scope in scopes)
                self.read_operator(node.target, bodies_inside[node], innermost, inside)

    def _next_call(self, path: str, parent: int) -> int:
        """The next call of a module along one way through the branches.

        Calls are shared with other branches; one is added if there is none left.
        """
        place = self._counts[path, parent]
        self._counts[path, parent] += 1
        calls = self._run.added.setdefault((path, parent), [])
        if place == len(calls):
            calls.append(self._log.add(path, parent))
        return calls[place]


def watch_bodies(
    changes: Changes,
    module: Any,
    watched: Callable[[Callable[[], Any], Any, Any], Any],
) -> None:
    """Observe the nodes of bodies that torch inlines, without their scopes, during decomposition.

    ``watched`` is called for each node of a body with a function that executes it, the interpreter
    of the body, and the node; it returns the result of the function.
    """

    class Watched(torch.fx.Interpreter):
        """Runs a body node by node, with the stack traces of its own code."""

        def __init__(self, body: torch.fx.GraphModule) -> None:
            super().__init__(body)
            self._file = file_of_code(body) or ""
            self._lines = _lines_of_nodes(body)

        def run_node(self, n: torch.fx.Node) -> Any:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            if n.op == "call_function" and n.name in self._lines:
                call = _calling_from(self._file, self._lines[n.name])
                return watched(lambda: call(n.target, args, kwargs), self, n)
            run = getattr(self, n.op)
            return watched(lambda: run(n.target, args, kwargs), self, n)

    for body in bodies_run_in_place(module):
        interpreter = Watched(body)
        changes.will_undo(functools.partial(vars(body).pop, "forward", None))
        body.forward = interpreter.run


def _lines_of_nodes(module: Any) -> dict[str, int]:
    """Name of a node of a graph module → its line in the code that FX generated."""
    lines: dict[str, int] = {}
    for line, text in enumerate(module.code.splitlines(), 1):
        assignment = re.match(r"\s+(\w+)\b[^=\n]* = ", text)
        if assignment is not None:
            lines.setdefault(assignment.group(1), line)
    return lines


def _calling_from(file: str, line: int) -> Callable[[Any, Any, Any], Any]:
    """Return a function that calls another one, in a frame named ``forward`` at a line of a file.

    torch writes the place of that frame on each node.
    """

    def call(target: Any, args: Any, kwargs: Any) -> Any:
        return target(*args, **kwargs)

    code = call.__code__.replace(co_name="forward", co_filename=file, co_firstlineno=line - 1)
    return types.FunctionType(code, {})
