"""Capture under ``dynamo=True``: calls from FX module stacks, tensors by replacements in onnx_ir.

When the FX graph is translated into ONNX, every node knows its call exactly. Later steps replace
values by others, always with two methods of onnx_ir. Observing these shows which tensor of the last
graph has each first value.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from htp_export.exporter.capture.calls import NO_CALL, CallTensors, Operation, Record, last_in_place
from htp_export.exporter.capture.decomposition import Decomposition
from htp_export.exporter.capture.faster_dynamo import SourcesInMemory
from htp_export.exporter.capture.fx_calls import FxCalls, NodeResult
from htp_export.exporter.capture.made_weights import MadeWeights
from htp_export.exporter.capture.modules import ModuleNames
from htp_export.exporter.capture.onnx_graph import (
    STAMP,
    BodyFunction,
    bodies_of_node,
    copy_stamps,
    describe,
    equal_tensors,
    every_node,
    nodes_of_model,
    reads_of,
)
from htp_export.exporter.capture.running import Guarded
from htp_export.exporter.capture.torch_internals import computes_a_size
from htp_export.format.tags import Reason
from htp_export.model.regions import all_values
from htp_export.shapes.operator_kinds import SIZES_ONLY, is_standard

if TYPE_CHECKING:
    import onnx_ir as ir


# torch's own metadata; bodies have no other trace of where they come from
_STACK_TRACE = "pkg.torch.onnx.stack_trace"


@dataclass
class _FirstGraph:
    """The ONNX graph as it was translated, before any change."""

    graph: ir.Graph  # the graph; another one after it was read back from bytes
    operations: list[Operation]  # its nodes
    inputs: list[ir.Value]
    outputs: list[ir.Value]
    # tensor → other tensors of the graph that are equal
    equal: dict[ir.Value, tuple[ir.Value, ...]]
    call_tensors: dict[int, CallTensors]  # as of `Record`
    weights: MadeWeights  # recipes of its constants

    @property
    def tensors(self) -> Iterator[ir.Value]:
        """Every tensor with a possible counterpart in the exported graph."""
        yield from self.inputs
        yield from self.outputs
        for operation in self.operations:
            yield from operation.outputs  # type: ignore[misc]


class DynamoCapture(Guarded):
    """One export through ``torch.export``, observed as it happens."""

    def __init__(self, calls: FxCalls) -> None:
        super().__init__()
        self.calls = calls  # the calls of its modules, and of the nodes of FX graphs
        self.decomposition = Decomposition(calls)  # of the exported FX graph
        self.sources = SourcesInMemory()
        self._values: dict[str, Any] = {}  # FX node → its value in the first ONNX graph
        self._first: _FirstGraph | None = None
        self._replaced: dict[ir.Value, ir.Value] = {}
        # after the model was tagged: its values, and their replacements
        self._followed: set[ir.Value | None] = set()

    @classmethod
    def of(cls, names: ModuleNames) -> DynamoCapture:
        """A capture of the export of a model with these module names."""
        return cls(FxCalls(names))

    @property
    def running(self) -> tuple[str, ...]:
        """The paths of the modules that run, outermost first."""
        return self.calls.log.running

    def resumed(self) -> DynamoCapture:
        """A new capture that continues after the export; it does not keep the model alive."""
        return DynamoCapture(self.calls.resumed())

    # --- the FX graph, and the first ONNX graph ---------------------------------------------------

    def exported(self, program: Any) -> None:
        """Record which calls the model's outputs depend on, before the program is decomposed."""
        self.sources.forget_others()
        self.calls.exported(program)
        self.decomposition = Decomposition(self.calls)
        self.decomposition.runs = True

    def translated_nodes(self, values: dict[str, Any]) -> None:
        """Record the values of the nodes of an FX graph; the outermost graph comes last."""
        self._values.update(values)

    def translated_program(self, program: Any) -> None:
        """Record the graph of an ``ONNXProgram`` as it was translated."""
        self.sources.forget_others()
        exported = program.exported_program
        state = program.model.graph.initializers if exported is None else exported.state_dict
        self.translated(program.model, state)

    def translated(self, model: ir.Model, state: Collection[str] = ()) -> None:
        """Record the ONNX graph as it was translated; ``state``: parameters and buffers."""
        nodes = list(every_node(model.graph))
        operations = [self._operation_of(node) for node in nodes]
        equal = equal_tensors(nodes)
        self._stamp_bodies(model)
        call_tensors = {
            call: self._values_of(tensors) for call, tensors in self.calls.log.call_tensors.items()
        }
        inputs = list(model.graph.inputs)
        outputs = list(model.graph.outputs)
        functions = model.functions.values()
        state_names = {name: self.calls.names.state_name(name) for name in state}
        weights = MadeWeights(model.graph, nodes, state_names, functions)
        self._first = _FirstGraph(
            model.graph, operations, inputs, outputs, equal, call_tensors, weights
        )

    def _operation_of(self, node: ir.Node) -> Operation:
        fx_node = node.meta.get("node")
        return Operation(
            self.calls.of_node(fx_node),
            reads_of(node),
            tuple(node.outputs),
            is_standard(node, *SIZES_ONLY),
            computes_a_size(fx_node),
            node.inputs[0] if is_standard(node, "Identity") else None,
        )

    def _values_of(self, tensors: CallTensors) -> CallTensors:
        inputs = tuple((name, self._value_of(result, read=True)) for name, result in tensors.inputs)
        return CallTensors(inputs, tuple(map(self._value_of, tensors.outputs)), tensors.containers)

    def _stamp_bodies(self, model: ir.Model) -> None:
        """Write the call on each node of a body.

        torch makes a function of each body, and inlines it later.
        """
        for node in model.graph:
            bodies = list(bodies_of_node(node, model.functions))
            if not bodies:
                continue
            holder = self.calls.of_node(node.meta.get("node"))
            traces: list[str | None] = []
            for body in bodies:
                traces += [inner.metadata_props.get(_STACK_TRACE) for inner in body.nodes]
            call_by_trace = self.calls.bodies.calls(holder, traces)
            for body in bodies:
                for inner in body.nodes:
                    call, evidence = self._call_in_body(inner, body, holder, call_by_trace)
                    if call != NO_CALL:
                        # metadata is kept when nodes are copied to be inlined, ``meta`` is not
                        inner.metadata_props[STAMP] = f"{call} {evidence}"

    def _call_in_body(
        self,
        node: ir.Node,
        body: BodyFunction,
        holder: int,
        call_by_trace: Mapping[str, int],
    ) -> tuple[int, Reason]:
        """The call of a node in a body, with its evidence: stack trace, scope, parameters, flow."""
        call = call_by_trace.get(node.metadata_props.get(_STACK_TRACE) or "", NO_CALL)
        fx_node = node.meta.get("node")
        if call == NO_CALL:
            call = self.calls.of_node(fx_node)
        if call != NO_CALL:
            return call, Reason.SCOPE
        call = self.calls.by_parameters(body.parameters(node))
        # constants, which have no FX node, belong to their consumers
        if call != NO_CALL or fx_node is None:
            return call, Reason.PARAMETERS
        return holder, Reason.FLOW

    def _value_of(self, result: NodeResult | None, *, read: bool = False) -> Any:
        """The value of the first ONNX graph for the result of a traced FX node, or None."""
        value = self._values.get(self.decomposition.name_of(result, read=read) or "")
        if isinstance(value, (list, tuple)):
            return None
        return value

    # --- optimisation --------------------------------------------------------------------

    def follow(self, model: ir.Model) -> None:
        """Continue after the model was tagged; the PyTorch model is released."""
        self.calls.release()
        self._followed = set(all_values(model.graph))

    def replaced_later(self, old: ir.Value | None, new: ir.Value | None) -> None:
        """As `replaced`, for values of any model; only values of the tagged model count."""
        if old in self._followed and new is not None:
            self._followed.add(new)
            self.replaced(old, new)

    def replaced(self, old: ir.Value | None, new: ir.Value | None) -> None:
        """Record that ``new`` replaces ``old``."""
        if self._first is not None and old is not None and new is not None and old is not new:
            self._replaced[old] = new

    def converted(self, model: ir.Model) -> None:
        """Record that the graph may have been read back from bytes: tensors are matched by name."""
        first = self._first
        if first is None or model.graph is first.graph:
            return
        named = {value.name: value for value in all_values(model.graph)}
        for value in (*first.tensors, *first.weights.known):
            last = self._last(value, ())
            if last.name in named:
                self.replaced(last, named[last.name])
        copy_stamps(first.graph, named)
        first.graph = model.graph

    def _last(self, value: ir.Value, stop: Container[ir.Value]) -> ir.Value:
        return last_in_place(value, self._replaced, stop)

    # --- the result -------------------------------------------------------------------------------

    def finish(self, model: ir.Model) -> tuple[Record, list[ir.Node]]:
        """The record of the exported model, and its nodes in the order of ``Record.nodes``."""
        self.converted(model)
        first = self._first
        if first is None:
            raise RuntimeError("torch has translated no graph")
        record = Record(self.calls.log, dead=self.calls.dead, moved=self.decomposition.moved)
        nodes = describe(model, record)
        # copies, because `relocate_operations` modifies them
        record.operations = [replace(operation) for operation in first.operations]
        record.call_tensors = first.call_tensors
        record.inputs = set(first.inputs)
        record.outputs = list(first.outputs)
        record.final = self._counterparts(first, model.graph)
        for node, described in zip(nodes, record.nodes, strict=True):
            node.meta.setdefault(STAMP, node.metadata_props.pop(STAMP, None))
            stamp = node.meta[STAMP]
            if stamp is not None:
                call, _, evidence = stamp.partition(" ")
                described.hint = int(call)
                described.evidence = Reason(evidence)
        return record, nodes

    def write_recipes(self, model: ir.Model) -> None:
        """Write the recipe of each initializer of the exported model."""
        if self._first is not None:
            alive = set(all_values(model.graph))
            self._first.weights.write(model, lambda value: self._last(value, alive))

    def record_assumed(self, model: ir.Model) -> None:
        """Record the values of parameters that torch's optimizer removed from the graph."""
        if self._first is not None:
            self._first.weights.parameters.record_assumed(model)

    def _counterparts(self, first: _FirstGraph, graph: ir.Graph) -> dict[Any, Any]:
        """Tensor of the first graph → the tensor that has its value now; absent without one."""
        alive = set(all_values(graph))
        ends = ((value, self._last(value, alive)) for value in first.tensors)
        final = {value: last for value, last in ends if last in alive}
        for value, others in first.equal.items():
            left = [final[other] for other in others if other in final]
            if left:
                final.setdefault(value, left[0])
        for output, now in zip(first.outputs, graph.outputs, strict=not self._followed):
            final.setdefault(output, now)
        return final

    @staticmethod
    def withdraw(model: ir.Model) -> None:
        """Remove the stamps that were written into a model for `finish`."""
        for node in nodes_of_model(model):
            node.metadata_props.pop(STAMP, None)
            node.meta.pop(STAMP, None)
