"""The module calls of an export through ``torch.export``, and the call of each node of its FX graphs.

FX nodes are marked with the call that makes them. Where none is seen (strict mode, an
``ExportedProgram``), the scopes of the nodes tell.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from htp_export.exporter.capture.bodies import Bodies, bodies_run_in_place, nodes_in_bodies
from htp_export.exporter.capture.calls import NO_CALL, CallLog, CallTensors
from htp_export.exporter.capture.modules import ModuleNames
from htp_export.exporter.capture.torch_internals import (
    changes_of,
    fx_node_of,
    fx_tracer,
    needed_nodes,
    without_export_root,
)
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.leaves import tensors_in

_captures = itertools.count()


class Places:
    """Numbers for the results of the nodes of one FX graph, under a key in their ``meta``; copies have the same."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._numbers = itertools.count()

    def mark(self, node: Any) -> int:
        """The number of a node; a new one where it has none."""
        if self._key not in node.meta:
            node.meta[self._key] = next(self._numbers)
        return int(node.meta[self._key])

    def read(self, node: Any) -> int | None:
        """The number of a node or of the one that it is a copy of, if that has one."""
        index: int | None = node.meta.get(self._key)
        return index


class Result(NamedTuple):
    """A tensor that a node of the exported graph gave, in one of its states."""

    place: int  # the node's number
    changes: int  # how often the tensor had been changed in place by then


@dataclass
class _Trace:
    """What one attempt at tracing has shown so far."""

    tracer: Any = None  # torch's tracer
    root_name: str | None = None  # its name of the model
    # module path, and which of its scopes → call
    scoped: dict[tuple[str, int], int] = field(default_factory=dict)
    # Module path → number of its scopes
    scope_counts: collections.Counter[str] = field(default_factory=collections.Counter)
    made_something: set[int] = field(default_factory=set)  # calls that made FX nodes
    # For each running call, how many FX nodes there were when it began
    nodes_before: list[int] = field(default_factory=list)
    marked: int = 0  # how many FX nodes there were when a module last began or returned


class FxCalls:
    """The calls of one export."""

    def __init__(self, names: ModuleNames) -> None:
        self.log, self.names = CallLog(), names
        # no capture reads what another one wrote in the ``meta`` of FX nodes
        number = next(_captures)
        self.call_key = (
            # in the ``meta`` of an FX node: its call, where its scopes do not say that
            f"htp.call.{number}"
        )
        # for the results of the nodes of the exported graph
        self.places = Places(f"htp.traced.{number}")
        # module path → class, for modules that only scopes tell of
        self.classes: dict[str, str] = {}
        self.bodies = Bodies(names.by_id)
        self.needed: set[int] = set()  # calls that did something which the model's result needs
        self._trace = _Trace()
        self._parameters: frozenset[str] = frozenset()  # of the exported program, buffers included
        self._by_stack: dict[tuple[tuple[str, tuple[str, Any]], ...], int] = {}

    @property
    def dead(self) -> set[int]:
        """Calls that did something which nothing needs."""
        return self._trace.made_something - self.needed

    def resumed(self) -> FxCalls:
        """The same calls, to which others can be added; the model is not held."""
        other, trace = FxCalls(self.names.without_model()), self._trace
        other.log, other.bodies = self.log.copy(), self.bodies.copy()
        other.call_key, other.places = self.call_key, self.places
        other.classes = self.classes.copy()
        other._trace = _Trace(
            None, trace.root_name, trace.scoped.copy(), made_something=trace.made_something.copy()
        )
        return other

    def release(self) -> None:
        """Let the model go, and all that is known of it alone."""
        self.names, self.bodies = self.names.without_model(), Bodies({})
        self._trace.tracer = None

    # --- while the model runs ---------------------------------------------------------------------

    def enter(self, tracer: Any, module: Any, name: str | None, args: Any, kwargs: Any) -> bool:
        """Note that a module's ``forward`` begins, and return whether it is one of the model's: then call `leave`.

        ``name`` is the tracer's; None for a module that was put in place after the tracing began.
        """
        path = self.names.path_now(module)
        if path is None:
            return False
        # a new attempt at tracing starts from nothing
        if not self.log.stack or tracer is not self._trace.tracer:
            self.log, self._trace = CallLog(), _Trace(tracer, name)
            self.bodies.clear()
        self._mark(tracer)
        index = self.log.enter(path)
        if name is not None:
            nth = self._trace.scope_counts[path]
            self._trace.scoped[path, nth] = index
            self._trace.scope_counts[path] += 1
        given = CallTensors.given(module.forward, args, kwargs)
        self.log.record_inputs(given, functools.partial(self._result_of, tracer))
        self._trace.nodes_before.append(len(tracer.graph.nodes))
        return True

    def leave(self, tracer: Any, result: Any) -> None:
        """Note that the innermost running module returns."""
        self._mark(tracer)
        if len(tracer.graph.nodes) > self._trace.nodes_before.pop():
            self._trace.made_something.add(self.log.stack[-1])
        self.log.exit(list(tensors_in(result)), functools.partial(self._result_of, tracer))

    def enter_operator(self, function: Any, args: Any) -> bool:
        """Note that an operator runs that may have bodies; only if it is true, ``bodies.leave`` is to be called."""
        tracer = fx_tracer()
        return self.bodies.enter(
            function, args, self.log, traced=tracer is not None and tracer is self._trace.tracer
        )

    def _result_of(self, tracer: Any, tensor: Any) -> Result | None:
        node = fx_node_of(tensor, tracer)
        return None if node is None else Result(self.places.mark(node), changes_of(tensor))

    def _mark(self, tracer: Any) -> None:
        """Write the running call on the FX nodes made since a module last began or returned.

        Torch opens no scope for a ``GraphModule``, and none for a module that was put in place
        while the model ran.
        """
        nodes = tracer.graph.nodes
        if self.log.stack:
            for node in itertools.islice(reversed(nodes), len(nodes) - self._trace.marked):
                node.meta[self.call_key] = self.log.stack[-1]
        self._trace.marked = len(nodes)

    # --- the FX graph -----------------------------------------------------------------------------

    def mark_bodies(self, program: Any) -> None:
        """Write its call on each node of a branch or loop body of a program that was just made."""
        for node, inner in nodes_in_bodies(program.graph_module).items():
            holder = self.of_node(node)
            known = self.bodies.calls(holder, [each.meta.get("stack_trace") for each in inner])
            for each in inner:
                if not each.meta.get("nn_module_stack"):
                    call = known.get(each.meta.get("stack_trace") or "", NO_CALL)
                    each.meta.setdefault(self.call_key, holder if call == NO_CALL else call)

    def write_stacks(self, program: Any, hierarchy: Hierarchy) -> None:
        """Write module stacks on the nodes of bodies, for whoever reads the program without this capture.

        Without strict mode, torch leaves these nodes without one. Their calls are numbered after
        those outside.
        """
        numbers, counts = dict[int, int](), self._trace.scope_counts.copy()
        scoped = set(self._trace.scoped.values())
        for index, call in enumerate(self.log.calls):
            if index not in scoped:
                numbers[index] = counts[call.path]
                counts[call.path] += 1
        for holder, inner in nodes_in_bodies(program.graph_module).items():
            outside, around = (
                holder.meta.get("nn_module_stack") or {},
                self.log.chain(self.of_node(holder)),
            )
            for node in inner:
                if node.op == "call_function" and not node.meta.get("nn_module_stack"):
                    stack = node.meta["nn_module_stack"] = dict(outside)
                    for index in reversed(self.log.chain(self.of_node(node))):
                        if index not in around:
                            path, number = self.log.calls[index].path, numbers[index]
                            name = f"{path}@{number}" if number else path
                            stack[f"L__self___{name}"] = name, hierarchy[path].class_name

    def exported(self, program: Any) -> None:
        """Note which calls did something that the model's result needs, before anything is decomposed away."""
        self._parameters = frozenset(program.state_dict)
        modules = [program.graph_module, *bodies_run_in_place(program.graph_module)]
        graphs = [module.graph for module in modules]
        if all(self.places.read(node) is None for graph in graphs for node in graph.nodes):
            self.log.call_tensors.clear()  # calls of a failed attempt at tracing
        for module in modules:
            inner = nodes_in_bodies(module)
            for node in module.graph.nodes:
                for each in (*inner.get(node, ()), node):
                    # where no Python call was seen, calls are numbered in the order of the graph
                    self.of_node(each)
        for graph in graphs:
            for node in needed_nodes(graph):
                self.needed.update(self.log.chain(self.of_node(node)))

    def of_node(self, fx_node: Any) -> int:
        """The call of an FX node, of whatever graph."""
        if fx_node is None:
            return NO_CALL
        call = fx_node.meta.get(self.call_key)
        return self._of_stack(fx_node.meta.get("nn_module_stack")) if call is None else int(call)

    def assign(self, fx_node: Any, call: int) -> None:
        """Give an FX node to a call, whatever its scopes say."""
        if call != NO_CALL:
            fx_node.meta[self.call_key] = call

    def by_parameters(self, names: Iterable[str]) -> int:
        """The call of work in a branch or loop body without scopes: that of its parameters' module, or a new one."""
        aliases = self.names.aliases
        holders = {name.rpartition(".")[0] for name in names if name in self._parameters}
        paths = {aliases.get(name, name) for name in holders}
        if len(paths) != 1:
            return NO_CALL
        path = paths.pop()
        calls = (index for index, call in enumerate(self.log.calls) if call.path == path)
        return (
            next(calls, NO_CALL)
            if self.log.count(path)
            else self.log.add(path, self.log.near(path))
        )

    def _of_stack(self, stack: dict[str, tuple[str, Any]] | None) -> int:
        scopes = tuple((stack or {}).items())
        call = self._by_stack.get(scopes)
        if call is None:
            call = NO_CALL
            for key, (name, cls) in scopes:
                if key != name:  # where torch lost the stack, it fills in one name for everything
                    call = self._of_scope(key, name, cls, call)
            self._by_stack[scopes] = call
        return call

    def _of_scope(self, key: str, name: str, cls: Any, parent: int) -> int:
        path, nth = self._read_scope(key, name)
        call = self._trace.scoped.get((path, nth))
        if call is None:  # no Python call was seen
            self.classes.setdefault(
                path, cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
            )
            call = self._trace.scoped[path, nth] = self.log.add(path, parent)
        return call

    def _read_scope(self, key: str, name: str) -> tuple[str, int]:
        """The module's path and which of its calls: torch writes the second as ``name@1``, in the key or in both."""
        aliases, by_id = self.names.aliases, self.names.by_id
        if name not in aliases:
            name = without_export_root(name, self._trace.root_name)
        first, at, count = key.rpartition("@")
        again = bool(at) and count.isdigit() and not (name in aliases and key.endswith(name))
        nth = int(count) if again else 0
        # in strict mode, the id of the module; the name is how Dynamo reached it
        module = first if again else key
        if module.isdecimal() and int(module) in by_id:
            return by_id[int(module)], nth
        name = name.removesuffix(f"@{count}") if again and name not in aliases else name
        return aliases.get(name, name), nth
