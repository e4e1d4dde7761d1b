"""Capture under ``dynamo=True``: FX module stacks say who ran what, onnx_ir says what became of it.

The exporter first translates the FX graph into ONNX node by node; at that moment every node knows its call
exactly. What follows (version conversion, constant folding, rewriting, common-subexpression elimination) replaces
values by others, always through two methods of onnx_ir. Watching those gives, for every tensor of the first graph,
the tensor of the last graph that holds the same value, whatever the optimiser did in between.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from htp_export.exporter.capture.bodies import Bodies
from htp_export.exporter.capture.body_functions import bodies_of_node, every_node
from htp_export.exporter.capture.body_internals import bodies_run_in_place, nodes_in_bodies
from htp_export.exporter.capture.calls import NO_CALL, CallLog, CallTensors, Given
from htp_export.exporter.capture.decomposition import Decomposition, Marks, Result
from htp_export.exporter.capture.guarded import Guarded
from htp_export.exporter.capture.onnx_graph import STAMP, copy_stamps, describe, reads_of, values_of
from htp_export.exporter.capture.record import Operation, Record
from htp_export.exporter.capture.reshapes import equal_tensors
from htp_export.exporter.capture.torch_internals import (
    changes_of,
    computes_a_size,
    fx_node_of,
    fx_tracer,
    without_export_root,
)
from htp_export.format.reasons import Reason
from htp_export.shapes.operator_kinds import SIZES_ONLY, is_standard

if TYPE_CHECKING:
    import onnx_ir as ir


_STACK_TRACE = "pkg.torch.onnx.stack_trace"  # torch's own metadata; bodies have no other trace of where they come from


class DynamoCapture(Guarded):
    """One export through ``torch.export``, as it happens.

    Args:
        path_of: A module (or the proxy that torch puts around it) → its path; None for what is none of the model's.
        aliases: Every name under which a module is registered → the first of its names.
        path_by_id: ``id(module)`` → its path.
    """

    def __init__(
        self, path_of: Callable[[Any], str | None], aliases: dict[str, str], path_by_id: Mapping[int, str]
    ) -> None:
        super().__init__()
        self.log = CallLog()
        self.aliases = aliases
        self._path_by_id = path_by_id
        self._bodies = Bodies(path_by_id)
        self.classes: dict[str, str] = {}
        self._path_of = path_of
        self._root_name: str | None = None
        self._tracer: Any = None
        self._scoped: dict[tuple[str, int], int] = {}  # module path and which of its scopes → call
        self._scope_counts: collections.Counter[str] = collections.Counter()
        self._made_something: set[int] = set()
        self._nodes_before: list[int] = []  # for each running call, how many FX nodes there were when it began
        self._marked = 0  # how many FX nodes there were when a module last began or returned
        self._needed: set[int] = set()
        self._parameters: frozenset[str] = frozenset()  # of the exported program, buffers included
        self._by_stack: dict[tuple[tuple[str, tuple[str, Any]], ...], int] = {}
        self._marks = Marks()
        self.decomposition = self._new_decomposition()
        self._values: dict[str, Any] = {}  # FX node → its value in the first ONNX graph
        self._call_tensors: dict[int, CallTensors] = {}
        self._graph: ir.Graph | None = None
        self._first: list[Operation] = []
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self._replaced: dict[ir.Value, ir.Value] = {}
        self._equal: dict[ir.Value, tuple[ir.Value, ...]] = {}
        self._followed: set[ir.Value | None] = set()  # once the model is tagged: its values, and what replaced them

    # --- while the model runs -----------------------------------------------------------------

    def enter(self, tracer: Any, module: Any, name: str | None, args: Any, kwargs: Any) -> bool:
        """Note that a module's ``forward`` begins; ``name`` is the tracer's name of the module.

        It is None for a module that was put in place after the tracing began: torch has no scope for it.

        Returns:
            Whether the module is one of the model's; only then `leave` is to be called.
        """
        path = self._path_of(module)
        if path is None:
            return False
        if not self.log.stack or tracer is not self._tracer:  # a new attempt at tracing starts from nothing
            self.log, self._root_name, self._tracer = CallLog(), name, tracer
            self._bodies.clear()
            self._scoped.clear()
            self._scope_counts.clear()
            self._made_something.clear()
            self._nodes_before.clear()
            self._marked = 0
        self._mark(tracer)
        index = self.log.enter(path)
        if name is not None:
            self._scoped[path, self._scope_counts[path]] = index
            self._scope_counts[path] += 1
        given = Given.of(module.forward, args, kwargs)
        self.log.record_inputs(given, functools.partial(self._result_of, tracer=tracer))
        self._nodes_before.append(len(tracer.graph.nodes))
        return True

    def leave(self, tracer: Any, result: Any) -> None:
        """Note that the innermost running module returns."""
        self._mark(tracer)
        if len(tracer.graph.nodes) > self._nodes_before.pop():
            self._made_something.add(self.log.stack[-1])
        self.log.exit(result, functools.partial(self._result_of, tracer=tracer))

    def enter_operator(self, function: Any, args: Any) -> bool:
        """Note that an operator runs that may have bodies; only if it is true, `leave_operator` is to be called."""
        tracer = fx_tracer()
        return self._bodies.enter(function, args, self.log, traced=tracer is not None and tracer is self._tracer)

    def leave_operator(self) -> None:
        """Note that the operator returns."""
        self._bodies.leave()

    def _result_of(self, tensor: Any, tracer: Any) -> Result | None:
        node = fx_node_of(tensor, tracer)
        return None if node is None else Result(self._marks.places.mark(node), changes_of(tensor))

    def _mark(self, tracer: Any) -> None:
        """Write the running call on the FX nodes made since a module last began or returned.

        Scopes do not have it for every module: torch opens none for a ``GraphModule``, and none for a module that was
        put in place while the model ran.
        """
        nodes = tracer.graph.nodes
        if self.log.stack:
            for node in itertools.islice(reversed(nodes), len(nodes) - self._marked):
                node.meta[self._marks.call] = self.log.stack[-1]
        self._marked = len(nodes)

    # --- the FX graph -----------------------------------------------------------------------------

    def mark_bodies(self, program: Any) -> None:
        """Write its call on each node of a branch or loop body of a program that was just made."""
        for node, inner in nodes_in_bodies(program.graph_module).items():
            holder = self._call_of(node)
            known = self._bodies.calls(holder, [each.meta.get("stack_trace") for each in inner])
            for each in inner:
                if not each.meta.get("nn_module_stack"):
                    call = known.get(each.meta.get("stack_trace") or "", NO_CALL)
                    each.meta.setdefault(self._marks.call, holder if call == NO_CALL else call)

    def resumed(self) -> DynamoCapture:
        """A capture that goes on from here, once the program is made; any number can, and none holds the model."""
        other = DynamoCapture(_no_path, self.aliases, self._path_by_id)
        other.log, other._bodies, other._marks = self.log.copy(), self._bodies.copy(), self._marks
        other.classes, other._scoped = self.classes.copy(), self._scoped.copy()
        other._root_name, other._made_something = self._root_name, self._made_something.copy()
        other.decomposition = other._new_decomposition()
        return other

    def exported(self, program: Any) -> None:
        """Note which calls did something that the model's result needs, before anything is decomposed away."""
        self._parameters = frozenset(program.state_dict)
        modules = [program.graph_module, *bodies_run_in_place(program.graph_module)]
        graphs = [module.graph for module in modules]
        if all(self._marks.places.read(node) is None for graph in graphs for node in graph.nodes):
            self.log.call_tensors.clear()  # calls of a failed attempt at tracing
        for module in modules:
            inner = nodes_in_bodies(module)
            for node in module.graph.nodes:
                for each in (*inner.get(node, ()), node):
                    self._call_of(each)  # where no Python call was seen, calls are numbered in the order of the graph
        for graph in graphs:
            self._note_needed(graph)
        self.decomposition = self._new_decomposition()
        self.decomposition.runs = True

    def _new_decomposition(self) -> Decomposition:
        return Decomposition(self._marks, self._call_of, lambda one, other: self.log.common(one, other))

    def _note_needed(self, graph: Any) -> None:
        wanted: set[Any] = set()
        for node in reversed(graph.nodes):
            if node.op == "output" or node in wanted or node.is_impure():
                wanted.update(node.all_input_nodes)
                self._needed.update(self.log.chain(self._call_of(node)))

    # --- the first ONNX graph -------------------------------------------------------------------

    def translated_nodes(self, values: dict[str, Any]) -> None:
        """Note the values that the nodes of an FX graph became; the outermost graph comes last."""
        self._values.update(values)

    def translated(self, model: ir.Model) -> None:
        """Note the ONNX graph as it was translated, before anything changed it."""
        self._graph = model.graph
        self._first = [
            Operation(
                self._call_of(source),
                reads_of(node),
                tuple(node.outputs),
                is_standard(node, *SIZES_ONLY),
                computes_a_size(source),
            )
            for node in every_node(model.graph)
            for source in [node.meta.get("node")]
        ]
        self._equal = equal_tensors(every_node(model.graph))
        self._inputs, self._outputs = list(model.graph.inputs), list(model.graph.outputs)
        self._stamp_bodies(model)
        self._call_tensors = {
            call: CallTensors(
                tuple((name, self._value_of(result, read=True)) for name, result in tensors.inputs),
                tuple(map(self._value_of, tensors.outputs)),
                tensors.containers,
            )
            for call, tensors in self.log.call_tensors.items()
        }

    def _stamp_bodies(self, model: ir.Model) -> None:
        """Write its call on each node of a body; torch makes a function of each body, and inlines it later."""
        for node in model.graph:
            holder = self._call_of(node.meta.get("node"))
            bodies = list(bodies_of_node(node, model.functions))
            traces = [inner.metadata_props.get(_STACK_TRACE) for body in bodies for inner in body.nodes]
            known = self._bodies.calls(holder, traces) if traces else {}
            for body in bodies:
                for inner in body.nodes:
                    call, evidence = known.get(inner.metadata_props.get(_STACK_TRACE) or "", NO_CALL), Reason.SCOPE
                    call = self._call_of(inner.meta.get("node")) if call == NO_CALL else call
                    if call == NO_CALL:
                        call, evidence = self._call_by_parameters(body.parameters(inner)), Reason.PARAMETERS
                    if call == NO_CALL and inner.meta.get("node") is not None:  # constants belong to their consumers
                        call, evidence = holder, Reason.FLOW
                    if call != NO_CALL:
                        inner.metadata_props[STAMP] = f"{call} {evidence}"  # outlives inlining, which copies nodes

    def _value_of(self, result: Result | None, *, read: bool = False) -> Any:
        """The value of the first ONNX graph that holds the result of a node of the traced FX graph, or None."""
        value = self._values.get(self.decomposition.name_of(result, read=read) or "")
        return None if isinstance(value, (list, tuple)) else value

    def _call_of(self, fx_node: Any) -> int:
        """The call of an FX node, of whatever graph."""
        if fx_node is None:
            return NO_CALL
        call = fx_node.meta.get(self._marks.call)
        return self._call_of_stack(fx_node.meta.get("nn_module_stack")) if call is None else int(call)

    def _call_of_stack(self, stack: dict[str, tuple[str, Any]] | None) -> int:
        scopes = tuple((stack or {}).items())
        call = self._by_stack.get(scopes)
        if call is None:
            call = NO_CALL
            for key, (name, cls) in scopes:
                if key != name:  # where torch lost the stack, it fills in one name for everything
                    call = self._call_of_scope(key, name, cls, call)
            self._by_stack[scopes] = call
        return call

    def _call_of_scope(self, key: str, name: str, cls: Any, parent: int) -> int:
        path, nth = self._read_scope(key, name)
        call = self._scoped.get((path, nth))
        if call is None:  # no Python call was seen: torch.export's strict mode, or an ExportedProgram
            self.classes.setdefault(path, cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}")
            call = self._scoped[path, nth] = self.log.add(path, parent)
        return call

    def _read_scope(self, key: str, name: str) -> tuple[str, int]:
        """The module's path and which of its calls: torch writes the second as ``name@1``, in the key or in both."""
        if name not in self.aliases:
            name = without_export_root(name, self._root_name)
        first, at, count = key.rpartition("@")
        again = bool(at) and count.isdigit() and not (name in self.aliases and key.endswith(name))
        nth = int(count) if again else 0
        module = first if again else key  # in strict mode, the id of the module; the name is how Dynamo reached it
        if module.isdecimal() and int(module) in self._path_by_id:
            return self._path_by_id[int(module)], nth
        name = name.removesuffix(f"@{count}") if again and name not in self.aliases else name
        return self.aliases.get(name, name), nth

    # --- while it is optimised --------------------------------------------------------------------

    def follow(self, model: ir.Model) -> None:
        """Go on after the model was tagged; what is known of the PyTorch model is let go."""
        self._path_of, self._bodies, self._tracer = _no_path, Bodies({}), None
        self._followed = set(values_of(model.graph))

    def replaced_later(self, old: ir.Value | None, new: ir.Value | None) -> None:
        """As `replaced`, for values of any model: those that do not stand for tensors of this one do not count."""
        if old in self._followed and new is not None:
            self._followed.add(new)
            self.replaced(old, new)

    def replaced(self, old: ir.Value | None, new: ir.Value | None) -> None:
        """Note that ``new`` now stands where ``old`` stood."""
        if self._graph is not None and old is not None and new is not None and old is not new:
            self._replaced[old] = new

    def converted(self, model: ir.Model) -> None:
        """Note that the graph may have been read back from bytes: tensors are found again by name."""
        if self._graph is None or model.graph is self._graph:
            return
        named = {value.name: value for value in values_of(model.graph)}
        for value in self._captured():
            last = self._last(value, ())
            if last.name in named:
                self.replaced(last, named[last.name])
        copy_stamps(self._graph, named)
        self._graph = model.graph

    def _call_by_parameters(self, names: Iterable[str]) -> int:
        """The call of work in a branch or loop body, where torch loses all scopes: that of its parameters' module.

        A module that ran in bodies alone has no call yet; it gets one.
        """
        holders = {name.rpartition(".")[0] for name in names if name in self._parameters}
        paths = {self.aliases.get(name, name) for name in holders}
        if len(paths) != 1:
            return NO_CALL
        path = paths.pop()
        calls = (index for index, call in enumerate(self.log.calls) if call.path == path)
        return next(calls, NO_CALL) if self.log.count(path) else self.log.add(path, self.log.near(path))

    def _captured(self) -> Iterator[ir.Value]:
        """Every tensor of the first graph that an export can give away."""
        yield from self._inputs
        yield from self._outputs
        for operation in self._first:
            yield from operation.outputs  # type: ignore[misc]

    def _last(self, value: ir.Value, stop: Any) -> ir.Value:
        seen = set()
        while value not in stop and value in self._replaced and value not in seen:
            seen.add(value)
            value = self._replaced[value]
        return value

    # --- the result -------------------------------------------------------------------------------

    def finish(self, model: ir.Model) -> tuple[Record, list[ir.Node]]:
        """What is known of the exported model, and its nodes in the order of ``Record.nodes``."""
        self.converted(model)
        nodes, record = describe(model, Record(self.log))
        alive = set(values_of(model.graph))
        record.operations = [replace(operation) for operation in self._first]  # they are changed
        record.call_tensors = self._call_tensors
        record.moved = self.decomposition.moved
        record.dead = self._made_something - self._needed
        record.inputs, record.outputs = set(self._inputs), list(self._outputs)
        for value in self._captured():
            last = self._last(value, alive)
            if last in alive:
                record.final[value] = last
        for value, others in self._equal.items():
            left = [record.final[other] for other in others if other in record.final]
            if left:
                record.final.setdefault(value, left[0])
        for first, now in zip(self._outputs, model.graph.outputs, strict=not self._followed):
            record.final.setdefault(first, now)
        for node, described in zip(nodes, record.nodes, strict=True):
            node.meta.setdefault(STAMP, node.metadata_props.pop(STAMP, None))
            stamp = node.meta[STAMP]
            if stamp is not None:
                call, _, evidence = stamp.partition(" ")
                described.hint, described.evidence = int(call), Reason(evidence)
        return record, nodes

    @staticmethod
    def withdraw(model: ir.Model) -> None:
        """Take out of a model what was written into it for `finish`."""
        for graph in (model.graph, *model.functions.values()):
            for node in every_node(graph):
                node.metadata_props.pop(STAMP, None)
                node.meta.pop(STAMP, None)


def _no_path(_: Any) -> None:
    return None
