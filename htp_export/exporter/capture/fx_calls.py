"""Module calls of an export through ``torch.export``, and the call of each node of its FX graphs.

FX nodes are marked with the call in which they are traced. If no call was observed (strict mode, an
``ExportedProgram``), calls are derived from the scopes of the nodes.
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


class NodeNumbers:
    """Numbers of the nodes of one FX graph, stored in their ``meta``; copies have the same."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._numbers = itertools.count()

    def assign(self, node: Any) -> int:
        """Return the number of a node; a node without one is assigned a new one."""
        if self._key not in node.meta:
            node.meta[self._key] = next(self._numbers)
        return int(node.meta[self._key])

    def read(self, node: Any) -> int | None:
        """Return the number of a node, or of the node that it is a copy of; None without one."""
        number: int | None = node.meta.get(self._key)
        return number


class NodeResult(NamedTuple):
    """The tensor that a node of the exported graph returned, in one of its states."""

    number: int  # the node's number
    changes: int  # how often the tensor had been changed in place


@dataclass
class _Trace:
    """One attempt at tracing, so far."""

    tracer: Any = None  # torch's tracer
    root_name: str | None = None  # the tracer's name of the model
    # (module path, number of its scope) → call
    scoped: dict[tuple[str, int], int] = field(default_factory=dict)
    # module path → number of its scopes
    scope_counts: collections.Counter[str] = field(default_factory=collections.Counter)
    with_nodes: set[int] = field(default_factory=set)  # calls in which FX nodes were traced
    # for each running call, the number of FX nodes when it began
    nodes_before: list[int] = field(default_factory=list)
    marked: int = 0  # number of FX nodes when a module last began or returned


class FxCalls:
    """The calls of one export."""

    def __init__(self, names: ModuleNames) -> None:
        self.log = CallLog()
        self.names = names
        # the keys differ by capture, because programs keep the ``meta`` of their FX nodes
        capture = next(_captures)
        # key in the ``meta`` of an FX node of its call, if that is not the call of its scopes
        self.call_key = f"htp.call.{capture}"
        self.numbers = NodeNumbers(f"htp.traced.{capture}")  # of the nodes of the exported graph
        # module path → class, for modules known from scopes only
        self.classes: dict[str, str] = {}
        self.bodies = Bodies(names.by_id)
        self.needed: set[int] = set()  # calls with nodes that the model's outputs depend on
        self._trace = _Trace()
        self._parameters: frozenset[str] = frozenset()  # of the exported program, with buffers
        self._by_stack: dict[tuple[tuple[str, tuple[str, Any]], ...], int] = {}

    @property
    def dead(self) -> set[int]:
        """Calls in which nodes were traced, but none that the outputs depend on."""
        return self._trace.with_nodes - self.needed

    def resumed(self) -> FxCalls:
        """A copy to which calls can be added; it does not keep the model alive."""
        other = FxCalls(self.names.without_model())
        trace = self._trace
        other.log = self.log.copy()
        other.bodies = self.bodies.copy()
        other.call_key = self.call_key
        other.numbers = self.numbers
        other.classes = self.classes.copy()
        other._trace = _Trace(
            None, trace.root_name, trace.scoped.copy(), with_nodes=trace.with_nodes.copy()
        )
        return other

    def release(self) -> None:
        """Release the model, and data that only its capture needs."""
        self.names = self.names.without_model()
        self.bodies = Bodies({})
        self._trace.tracer = None

    # --- while the model runs ---------------------------------------------------------------------

    def enter(
        self,
        tracer: Any,
        module: Any,
        name: str | None,
        args: Any,
        kwargs: Any,
    ) -> bool:
        """Record that a module's ``forward`` begins.

        Returns whether it is a module of the model; only then, `leave` is called. ``name`` is the
        tracer's name of the module; None for a module that was registered after tracing began.
        """
        path = self.names.path_now(module)
        if path is None:
            return False
        # a new attempt at tracing discards the earlier one
        if not self.log.stack or tracer is not self._trace.tracer:
            self.log = CallLog()
            self._trace = _Trace(tracer, name)
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

    def replace_arguments(self, tracer: Any, module: Any, args: Any, kwargs: Any) -> None:
        """Record the arguments of the innermost running module after its forward pre-hooks ran.

        If the hooks replaced or changed a tensor, their work belongs to the caller, as it ends
        before ``forward`` begins. Other work, such as that of a weight normalization, stays its own.
        """
        index = self.log.stack[-1]
        caller = self.log.calls[index].parent
        if caller == NO_CALL:  # the model itself
            return
        before = self.log.inputs
        given = CallTensors.given(module.forward, args, kwargs)
        self.log.record_inputs(given, functools.partial(self._result_of, tracer))
        if self.log.inputs == before:
            return
        self._mark(tracer)
        nodes = tracer.graph.nodes
        count = self._trace.nodes_before.pop()
        for node in itertools.islice(reversed(nodes), len(nodes) - count):
            if node.meta.get(self.call_key) == index:
                node.meta[self.call_key] = caller
        self.log.adopt(index, caller)
        self._trace.nodes_before.append(len(nodes))

    def leave(self, tracer: Any, result: Any) -> None:
        """Record that the innermost running module returns."""
        self._mark(tracer)
        if len(tracer.graph.nodes) > self._trace.nodes_before.pop():
            self._trace.with_nodes.add(self.log.stack[-1])
        self.log.exit(list(tensors_in(result)), functools.partial(self._result_of, tracer))

    def enter_operator(self, function: Any, args: Any) -> bool:
        """Record that an operator is called that may have bodies.

        Returns whether it has; only then, ``bodies.leave`` is called.
        """
        tracer = fx_tracer()
        return self.bodies.enter(
            function, args, self.log, traced=tracer is not None and tracer is self._trace.tracer
        )

    def _result_of(self, tracer: Any, tensor: Any) -> NodeResult | None:
        node = fx_node_of(tensor, tracer)
        if node is None:
            return None
        return NodeResult(self.numbers.assign(node), changes_of(tensor))

    def _mark(self, tracer: Any) -> None:
        """Write the running call on the FX nodes traced since a module last began or returned.

        torch opens no scope for a ``GraphModule``, nor for a module that was registered while the
        model ran.
        """
        nodes = tracer.graph.nodes
        if self.log.stack:
            for node in itertools.islice(reversed(nodes), len(nodes) - self._trace.marked):
                node.meta[self.call_key] = self.log.stack[-1]
        self._trace.marked = len(nodes)

    # --- the FX graph -----------------------------------------------------------------------------

    def mark_bodies(self, program: Any) -> None:
        """Write the running call on the nodes inside higher-order operators of an exported program.

        A body is a graph that such an operator runs: a branch of ``cond``, the body of ``scan``.
        Its nodes are traced apart, so their calls are found by their stack traces. Nodes without
        an equal stack trace belong to the call that runs the operator, the holder of the body.
        """
        for holder, inner in nodes_in_bodies(program.graph_module).items():
            call_of_holder = self.of_node(holder)
            traces = [node.meta.get("stack_trace") for node in inner]
            call_by_trace = self.bodies.calls(call_of_holder, traces)
            for node in inner:
                if node.meta.get("nn_module_stack"):
                    continue  # torch named its module itself
                call = call_by_trace.get(node.meta.get("stack_trace") or "", NO_CALL)
                # A node that the capture saw already has the exact call.
                node.meta.setdefault(self.call_key, call_of_holder if call == NO_CALL else call)

    def write_stacks(self, program: Any, hierarchy: Hierarchy) -> None:
        """Write module stacks on the nodes of bodies, for exporters without this capture.

        Without strict mode, torch writes none on these nodes. Calls in bodies are numbered after
        calls outside.
        """
        numbers = self._numbers_of_unscoped()
        for holder, inner in nodes_in_bodies(program.graph_module).items():
            outer_stack = holder.meta.get("nn_module_stack") or {}
            outer_calls = self.log.chain(self.of_node(holder))
            for node in inner:
                if node.op != "call_function" or node.meta.get("nn_module_stack"):
                    continue
                stack = node.meta["nn_module_stack"] = dict(outer_stack)
                for index in reversed(self.log.chain(self.of_node(node))):
                    if index not in outer_calls:
                        path = self.log.calls[index].path
                        number = numbers[index]
                        name = f"{path}@{number}" if number else path  # as torch writes it
                        stack[f"L__self___{name}"] = name, hierarchy[path].class_name

    def _numbers_of_unscoped(self) -> dict[int, int]:
        """For each call without a scope: its number among the calls of its module."""
        numbers = dict[int, int]()
        counts = self._trace.scope_counts.copy()
        scoped = set(self._trace.scoped.values())
        for index, call in enumerate(self.log.calls):
            if index not in scoped:
                numbers[index] = counts[call.path]
                counts[call.path] += 1
        return numbers

    def exported(self, program: Any) -> None:
        """Record which calls the model's outputs depend on, before the decomposition."""
        self._parameters = frozenset(program.state_dict)
        modules = [program.graph_module, *bodies_run_in_place(program.graph_module)]
        graphs = [module.graph for module in modules]
        if all(self.numbers.read(node) is None for graph in graphs for node in graph.nodes):
            self.log.call_tensors.clear()  # they are of a failed attempt at tracing
        for module in modules:
            inner = nodes_in_bodies(module)
            for node in module.graph.nodes:
                # if no call was observed, this numbers the calls in the order of the graph
                for inner_node in inner.get(node, ()):
                    self.of_node(inner_node)
                self.of_node(node)
        for graph in graphs:
            for node in needed_nodes(graph):
                self.needed.update(self.log.chain(self.of_node(node)))

    def of_node(self, fx_node: Any) -> int:
        """The call of a node of any FX graph."""
        if fx_node is None:
            return NO_CALL
        call = fx_node.meta.get(self.call_key)
        if call is None:
            return self._of_stack(fx_node.meta.get("nn_module_stack"))
        return int(call)

    def assign(self, fx_node: Any, call: int) -> None:
        """Assign an FX node to a call, which takes precedence over its scopes."""
        if call != NO_CALL:
            fx_node.meta[self.call_key] = call

    def by_parameters(self, names: Iterable[str]) -> int:
        """The call of a node without scopes in a body, from its parameters.

        It is the first call of the module that holds all of them, which is added if the module was
        not called; `NO_CALL` if several modules hold them.
        """
        aliases = self.names.aliases
        holders = {name.rpartition(".")[0] for name in names if name in self._parameters}
        paths = {aliases.get(name, name) for name in holders}
        if len(paths) != 1:
            return NO_CALL
        path = paths.pop()
        if not self.log.count(path):
            return self.log.add(path, self.log.near(path))
        calls = (index for index, call in enumerate(self.log.calls) if call.path == path)
        return next(calls, NO_CALL)

    def _of_stack(self, stack: dict[str, tuple[str, Any]] | None) -> int:
        scopes = tuple((stack or {}).items())
        call = self._by_stack.get(scopes)
        if call is None:
            call = NO_CALL
            for key, (name, cls) in scopes:
                if key != name:  # torch fills in one name for everything if it lost the stack
                    call = self._of_scope(key, name, cls, call)
            self._by_stack[scopes] = call
        return call

    def _of_scope(self, key: str, name: str, cls: Any, parent: int) -> int:
        path, nth = self._read_scope(key, name)
        call = self._trace.scoped.get((path, nth))
        if call is None:  # no call was observed
            class_name = cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
            self.classes.setdefault(path, class_name)
            call = self._trace.scoped[path, nth] = self.log.add(path, parent)
        return call

    def _read_scope(self, key: str, name: str) -> tuple[str, int]:
        """The module path of a scope, and the number of the module's call.

        torch writes the number as ``name@1``, in the key or in both.
        """
        aliases = self.names.aliases
        by_id = self.names.by_id
        if name not in aliases:
            name = without_export_root(name, self._trace.root_name)
        first, at, count = key.rpartition("@")
        is_alias_with_at = name in aliases and key.endswith(name)
        is_numbered = bool(at) and count.isdigit() and not is_alias_with_at
        nth = int(count) if is_numbered else 0
        # In strict mode, the key is the id of the module, and the name how Dynamo reached it.
        module_id = first if is_numbered else key
        if module_id.isdecimal() and int(module_id) in by_id:
            return by_id[int(module_id)], nth
        if is_numbered and name not in aliases:
            name = name.removesuffix(f"@{count}")
        return aliases.get(name, name), nth
