"""Capture under ``dynamo=False``: calls from the tracer's blocks, tensors by their numbers.

The exporter dissolves the blocks, rewrites the traced graph in place, translates it into ONNX
operators, and rewrites again. Values keep their numbers meanwhile; if one is removed, its former
consumers show which value replaced it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import onnx

from htp_export.exporter.capture.calls import CallTensors, Key, Node, Operation, Record
from htp_export.exporter.capture.jit_calls import Matching, ScriptCalls, Trace
from htp_export.exporter.capture.jit_rewriting import Stages, Translation, Versions
from htp_export.exporter.capture.jit_weights import JitWeights
from htp_export.exporter.capture.modules import ModuleNames
from htp_export.exporter.capture.root_module_call import RootCall, RootCalls
from htp_export.exporter.capture.running import Guarded, hurries
from htp_export.exporter.capture.saving import KeptWeights
from htp_export.exporter.capture.torch_internals import (
    has_hooks,
    keep_autocast_cache,
    run_after_hooks,
)
from htp_export.exporter.capture.torchscript_internals import (
    SHAPE_KINDS,
    Reading,
    nodes_of,
    read,
    read_copy,
    source_range,
    state_of,
)
from htp_export.exporter.capture.traced_state import TracedState
from htp_export.exporter.model_lines import line_of_range
from htp_export.files.protobuf_bytes import SerializedModel, subgraph_protos
from htp_export.format.recipes import Recipe
from htp_export.format.torch_metadata import traced_line
from htp_export.process.restoring import Changes


@dataclass
class _FirstGraph:
    """The JIT graph before any rewriting."""

    reading: Reading  # the graph
    operations: list[Operation]  # its nodes
    outputs: list[Key]  # keys of its outputs
    numbers: dict[int, int]  # number while tracing → number in the graph
    dead: set[int]  # calls that ran nodes, none of which is in the graph


class TorchScriptCapture(Guarded):
    """One export through ``torch.jit.trace``, observed as it happens."""

    def __init__(self, names: ModuleNames, model: Any, root: RootCalls) -> None:
        super().__init__()
        # the calls of its modules, and the way in which the model is called
        self.trace = Trace(names)
        self.root = root
        # converts the file that torch serialized into the pieces of the file with tags
        self.tag: Callable[[SerializedModel], Iterable[bytes | memoryview]] | None = None
        self.kept: KeptWeights | None = None  # the weights that torch does not serialize
        self._paths = list(dict.fromkeys(names.paths.values()))
        # name in the traced graph → name in recipes
        state = state_of(model)
        self._state = {name: names.state_name(name) for name in state}
        entries = {self._state[name]: tensor for name, tensor in state.items()}
        self.state: TracedState | None = TracedState(entries)
        self._user_inputs = 0
        self._first: _FirstGraph | None = None
        # the operations of the first graph, one for each ONNX node
        self._operations: list[Operation] = []
        self._versions = Versions()
        self._stages = Stages(Reading())
        self.translation = Translation()
        self._graph: Any = None
        self._weights: JitWeights | None = None
        # recipes of initializers that are not the parameters of their names
        self.recipes: dict[str, Recipe] = {}
        # name of a node's first output in the file → the line of the model's code that created it
        self.sources: dict[str, str] = {}

    @property
    def running(self) -> tuple[str, ...]:
        """The paths of the modules that run, outermost first."""
        return self.trace.log.running

    # --- while the model runs -----------------------------------------------------------------

    def begins_trace(self, model: Any, formatted: Any) -> tuple[Any, Changes]:
        """Choose the call of the model: see `RootCalls`.

        Returns the arguments that become inputs of the trace, and changes to be undone at its end.
        """
        traced = self.root.choose(model, formatted)
        changes = self.changes.inner()
        keep_autocast_cache(changes)
        self.trace.dissolves = hurries.get()
        return traced, changes

    def called(self, call: RootCall, arguments: tuple[Any, ...]) -> None:
        """Record that the model's ``forward`` begins, and which arguments replace numbers."""
        self.trace.given_numbers(call.numbers(arguments))

    def reads_numbers(self, tensor: Any) -> None:
        """Record that Python reads the numbers of a tensor while the model runs."""
        if self.state is not None:
            self.state.read(tensor)

    def returns(
        self,
        module: Any,
        state: Any,
        given: CallTensors,
        result: Any,
        changed: Callable[[Any], Any] | None,
    ) -> bool:
        """Record that the ``forward`` of the innermost module ends; arguments as of `Trace.leave`.

        The user's forward hooks run outside the module's scope, but are the module's work. Returns
        whether there are any, so that the module returns after them; else the caller applies
        ``changed``.
        """
        if len(self.trace.log.stack) == 1:  # the model itself
            self.trace.dissolves = self.trace.dissolves and self._may_dissolve(module)
        if not has_hooks(module):
            self.trace.leave(state, given, result, changed)
            return False

        def after_hooks(returned: Any) -> Any:
            self.step(
                "recording that a module returns", self.trace.leave, state, given, returned, changed
            )
            if changed is None:
                return None
            return changed(returned)

        run_after_hooks(self.changes, module, after_hooks)
        self.trace.runs_hooks()
        return True

    def _may_dissolve(self, model: Any) -> bool:
        """Whether the graph is the same if blocks of modules are dissolved before the trace ends.

        Hooks may read the blocks afterwards. If a parameter has the name of a variable of the user,
        torch renames the value of the variable; the number in its new name may depend on copies.
        """
        variables = self.trace.variables
        if variables is None or has_hooks(model):
            return False
        for name in self._state:
            base, _, number = name.rpartition(".")
            if name in variables or (number.isdecimal() and base in variables):
                return False
        return True

    # --- the first graph --------------------------------------------------------------------------

    def traced(self, graph: Any) -> None:
        """Record the graph as it was traced."""
        if self.state is not None:
            self.state.traced(graph)
        self._user_inputs = graph.param_node().outputsSize() - len(self._state)
        reading = read(graph, self._user_inputs)
        inputs = (*reading.inputs, *reading.parameters)
        self._set_first(reading, dict(zip(self.trace.inputs, inputs, strict=False)))

    def created(self, graph: Any, parameters: Sequence[Any]) -> None:
        """Record a graph (and its parameters) that torch created from a traced module.

        It does so for quantized models.
        """
        if self._first or not self.trace.nodes:
            return
        self._user_inputs = graph.param_node().outputsSize() - len(parameters)
        reading = read(graph, self._user_inputs)
        # The first input of the trace is the module, whose method is traced.
        self._set_first(reading, dict(zip(self.trace.inputs[1:], reading.inputs, strict=False)))

    def _set_first(self, reading: Reading, inputs: dict[int, int]) -> None:
        matched = Matching(self.trace, reading, inputs)
        calls: list[int] = []  # of each step: those inside a node's blocks are the node's
        for call, size in zip(matched.calls, reading.sizes, strict=True):
            calls.extend([call] * size)
        operations = [
            self._versions.operation(index, step, call, step.kind in SHAPE_KINDS)
            for index, (step, call) in enumerate(zip(reading.steps, calls, strict=True))
        ]
        outputs = [self._versions.state(number, len(calls)) for number in reading.outputs]
        self._first = _FirstGraph(reading, operations, outputs, matched.numbers, matched.dead)

    def _scripted(self, graph: Any) -> None:
        """Record the graph of a `ScriptModule`, which was not traced."""
        names = {value.unique(): value.debugName() for value in graph.inputs()}
        parameters = {number: name for number, name in names.items() if name in self._state}
        self._user_inputs = len(names) - len(parameters)
        reading = read(graph, self._user_inputs)
        calls = ScriptCalls(self.trace.log, self._paths).of_graph(graph, reading, parameters)
        operations = [
            Operation(call, step.inputs, step.outputs, step.kind in SHAPE_KINDS)
            for step, call in zip(reading.steps, calls, strict=True)
        ]
        self._first = _FirstGraph(reading, operations, [*reading.outputs], {}, set())
        self._stages = Stages(reading)

    # --- rewriting and translation ----------------------------------------------------------------

    def before_translation(self, graph: Any) -> None:
        """Record the rewritten graph before it is translated into ONNX operators."""
        first = self._first
        if first is not None:
            now = read(graph, self._user_inputs)
            self.translation.begin(graph, now.steps)
            settled = self._versions.settle(first.operations, first.outputs, first.reading, now)
            self._stages = Stages(settled)
            self._stages.rewritten(now)
        elif not self.trace.log.calls:
            self._scripted(graph)

    def translated(self, graph: Any) -> None:
        """Record the ONNX graph as it was translated."""
        if self._first:
            self.translation.through_blocks(self._stages.last.steps)
            now = read(graph, self._user_inputs)
            self._operations = self._stages.translated(
                self.translation.numbers, now, self._first.operations
            )

    def renumbered(self, before: Any, after: Any) -> None:
        """Record that a graph was copied node by node, with new numbers."""
        if self._first:
            original = read(before, self._user_inputs)
            self._stages.rewritten(original)
            self._stages.copied(read_copy(after, original))

    def folds(self, graph: Any, parameters: Any) -> None:
        """Record the recipes of the constants of the ONNX graph, before they are folded."""
        self._weights = self._weights or JitWeights(graph, parameters, self._state)

    def named(self, graph: Any) -> None:
        """Record the final ONNX graph, with the names in the file."""
        now = read(graph, self._user_inputs)
        self.recipes = {} if self._weights is None else self._weights.finish(graph, now.steps)
        self.sources = dict(_sources(graph))
        if self._first:
            self._stages.rewritten(now)
            self._graph = graph

    # --- the file ---------------------------------------------------------------------------------

    def tagged(self, model_bytes: bytes) -> Iterable[bytes | memoryview]:
        """The file with tags, in pieces to be written one after the other."""
        self.root.call = self.root.before = None
        file = SerializedModel(model_bytes, {} if self.kept is None else self.kept.weights)
        if self.tag:
            return self.tag(file)
        return file.chunks()

    def finish(self, file: SerializedModel) -> tuple[Record, list[onnx.NodeProto]]:
        """Return the record of the export, and the nodes in the order of ``Record.nodes``."""
        record = Record(self.trace.log)
        protos = list(_every_proto(file.proto.graph.node))
        names = self._names(protos, file.inputs)
        for function in file.proto.functions:
            protos.extend(_every_proto(function.node))
        record.nodes = [_node_of(proto) for proto in protos]
        record.graph_inputs = {name for name in file.inputs if name not in file.initializers}
        record.graph_outputs = set(file.outputs)
        first = self._first
        if first is not None:
            record.operations = self._operations
            record.dead = first.dead
            record.inputs = set(first.reading.inputs)
            record.outputs = first.outputs
            record.call_tensors = self._call_tensors(first)
        in_file = {name for node in record.nodes for name in node.outputs} | set(file.inputs)
        results = (key for operation in record.operations for key in operation.outputs)
        for key in (*record.inputs, *results):
            name = names.get(self._stages.now(key))
            if name in in_file:
                record.final[key] = name
        return record, protos

    def _names(self, protos: list[onnx.NodeProto], inputs: list[str]) -> dict[int, str]:
        """Number of a tensor in the last graph → its name in the file."""
        last = self._stages.last
        nodes = [proto for proto in protos if proto.op_type != "Constant"]
        names = dict(zip(last.inputs, inputs, strict=False))
        sizes = [len(step.outputs) for step in last.steps]
        if sizes == [len(node.output) for node in nodes]:
            for step, node in zip(last.steps, nodes, strict=True):
                names.update(zip(step.outputs, node.output, strict=True))
        elif self._graph is not None:
            # with modules exported as functions, the file has other nodes than the graph
            for node in nodes_of(self._graph):
                names.update((value.unique(), value.debugName()) for value in node.outputs())
        return names

    def _call_tensors(self, first: _FirstGraph) -> dict[int, CallTensors]:
        """The input and output tensors of each call, in their states at that time."""
        producers = {key: step for step in first.operations for key in step.outputs}
        spans = self._spans(first.operations) if self._versions else {}
        by_call = {}
        for call, tensors in self.trace.log.call_tensors.items():
            began, ended = spans.get(call, (None, None))
            inputs = []
            for name, traced in tensors.inputs:
                number = self._number_before(first.numbers.get(traced), call, producers)
                inputs.append((name, self._versions.state(number, began)))
            outputs = tuple(
                self._versions.state(first.numbers.get(traced), ended) for traced in tensors.outputs
            )
            by_call[call] = CallTensors(tuple(inputs), outputs, tensors.containers, tensors.numbers)
        return by_call

    def _number_before(
        self,
        number: Any,
        call: int,
        producers: Mapping[Any, Operation],
    ) -> Any:
        """The number that an input tensor of a call had before; ``number`` is read after the call.

        An operation of the call that returned the tensor itself (``x.to(x.dtype)``) or changed it
        in place assigned a new number; its input has the previous one. An operation with several
        results reads them in the same order: ``torch.broadcast_tensors``.
        """
        producer = producers.get(number)
        place = 0
        several = 1
        while producer is not None and call in self.trace.log.chain(producer.call):
            if len(producer.outputs) > 1:
                place = producer.outputs.index(number)
                several = len(producer.outputs)
            if len(producer.inputs) == several:
                number = producer.inputs[place]
                place = 0
                several = 1
            else:
                number = producer.inputs[0] if producer.inputs else None
            producer = producers.get(number)
        return number

    def _spans(self, operations: list[Operation]) -> dict[int, tuple[int, int]]:
        """For each call, the index of its first operation, and the index after its last one."""
        spans: dict[int, tuple[int, int]] = {}
        for index, operation in enumerate(operations):
            for call in self.trace.log.chain(operation.call):
                spans[call] = spans.get(call, (index, 0))[0], index + 1
        return spans


def _sources(graph: Any) -> Iterator[tuple[str, str]]:
    """Name of a node's first output → the line of the model's code that created the node."""

    @cache
    def source(stack: str) -> str | None:
        line = line_of_range(stack, [__file__])
        return None if line is None else traced_line(line)

    for node in nodes_of(graph):
        if node.outputsSize():
            # layers in a loop have equal stacks
            line = source(source_range(node))
            if line is not None:
                yield node.outputsAt(0).debugName(), line


def _node_of(proto: onnx.NodeProto) -> Node:
    inputs = [name for name in proto.input if name]
    for body in subgraph_protos(proto):
        inputs.extend(output.name for output in body.output)
    is_size = proto.op_type in ("Shape", "Size")
    return Node(tuple(inputs), tuple(proto.output), shape_only=is_size)


def _every_proto(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes, each after the nodes of its bodies: producers before consumers."""
    for node in nodes:
        for body in subgraph_protos(node):
            yield from _every_proto(body.node)
        yield node
