"""Capture under ``dynamo=False``: the tracer's blocks say who ran what, the values' numbers what became of it.

While PyTorch traces, each module's call has a block of nodes of its own. The exporter then dissolves the blocks,
rewrites the graph in place (merging equal work, removing no-ops), translates it into ONNX operators, and rewrites
again. Values keep their numbers while a graph is rewritten; where one is gone, the nodes that used to read it tell
which value stands in its place. Nothing of the graph is changed here, so that the file stays torch's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import onnx

from htp_export.exporter.capture.calls import NO_CALL, CallLog, CallTensors, Given, keys_of
from htp_export.exporter.capture.guarded import Guarded
from htp_export.exporter.capture.jit_calls import TracedNode, match, place_between
from htp_export.exporter.capture.jit_graph import (
    CONSTANTS,
    SHAPE_KINDS,
    Reading,
    nodes_of,
    numbers_of_inputs,
    numbers_of_outputs,
    read,
)
from htp_export.exporter.capture.jit_rewriting import follow
from htp_export.exporter.capture.jit_translation import Translation
from htp_export.exporter.capture.protos import bodies_of_proto, every_proto
from htp_export.exporter.capture.record import Key, Node, Operation, Record
from htp_export.exporter.capture.root_call import GivenCall, RootCall, RootChoice, choose
from htp_export.exporter.capture.script_modules import ScriptCalls
from htp_export.exporter.capture.torch_internals import keep_autocast_cache, run_after_hooks
from htp_export.exporter.capture.torchscript_internals import (
    flattened,
    is_listed,
    is_script_method,
    next_number,
    out_of_place,
    traced_number,
)
from htp_export.exporter.capture.versions import Versions
from htp_export.files.protobuf_bytes import SerializedModel, Weight


class TorchScriptCapture(Guarded):
    """One export through ``torch.jit.trace``, as it happens.

    Args:
        path_of: A module → its path; None for one that is not in the model.
        paths: The paths of the modules that were in it when the export began.
        scope_names: Module path → the name that the tracer gives its scope (``Linear::query``).
        state: Names of the model's parameters and buffers, which are the last of the traced graph's inputs.
        args: The arguments, as ``torch.onnx.export`` passes them on.
        names_inputs: Whether the user names the graph's inputs, counting on torch's order of them.
        refusal: Why an export failed in which the model was called as torch calls it; empty if there was none.

    Attributes:
        choice: How the model is called; None until it is traced.
    """

    def __init__(
        self,
        path_of: Callable[[Any], str | None],
        paths: Iterable[str],
        scope_names: dict[str, str],
        state: frozenset[str],
        args: Any,
        names_inputs: bool,
        refusal: str,
    ) -> None:
        super().__init__()
        self.log = CallLog()
        self.tag: Callable[[SerializedModel], Iterable[bytes | memoryview]] | None = None
        self._file: SerializedModel | None = None
        self.weights: dict[str, Weight] = {}
        self.choice: RootChoice | None = None
        self.root_runs = False
        self.whole: Callable[[], bytes] | None = None  # the bytes as torch makes them, where weights were left out
        self._args, self._names_inputs, self._refusal = args, names_inputs, refusal
        self._path_of = path_of
        self._paths = dict.fromkeys(paths)
        self._scope_names = scope_names
        self._state = state
        self._user_inputs = 0
        self._next_call = 0
        self._has_root_scope = True
        self._unscoped: set[int] = set()  # calls that have no scope
        self._between: dict[int, list[int]] = {}  # call → the numbers between which what has its caller's scope is its
        self._traced_nodes: list[TracedNode] = []
        self._traced_inputs: list[int] = []
        self._traced_outputs: tuple[int | None, ...] = ()
        self._numbers: dict[int, int] = {}  # number while tracing → number in the traced graph
        self._dead: set[int] = set()
        self._operations: list[Operation] = []
        self._outputs: list[Key] = []
        self._versions = Versions()
        self._first: Reading | None = None
        self._last = Reading()
        self._stages: list[dict[Any, int]] = []
        self._translation = Translation()
        self._graph: Any = None

    @property
    def root_call(self) -> RootCall | None:
        """How the model is called; None where torch alone says so."""
        return None if self.choice is None else self.choice.call

    # --- while the model runs -----------------------------------------------------------------

    def enter(self, module: Any, state: Any) -> str | None:
        """Note that a module's ``forward`` begins.

        Returns:
            The name of its scope; an empty one if the tracer has none for it, as it was put in place while the model
            ran; None if nothing is to be noted.
        """
        path = self._path_of(module) if state is not None else None
        if path is None or is_script_method(module.forward):
            return None
        name = self._scope_names.get(path) if is_listed(module) else ""
        if name is None:
            return None
        if not self.log.stack:
            self.log = CallLog()
            self._unscoped.clear()
            self._between.clear()
            self._next_call = 0
        is_root = not self.log.stack
        index = self.log.enter(path)
        if not name and not is_root:
            self._unscoped.add(index)
            self._between[index] = [next_number()]
        self._has_root_scope = bool(name) if is_root else self._has_root_scope
        return name

    def returns(self, module: Any, state: Any, given: Given, result: Any, changed: Callable[[Any], Any] | None) -> bool:
        """Note that the innermost running module's ``forward`` is over.

        The user's forward hooks run outside of the module's scope; what they compute is the module's work. Where there
        are some, the module returns once they have run.

        Args:
            module: The module.
            state: The tracer's state.
            given: What ``forward`` was given.
            result: What it returned.
            changed: Gives what the module is to give back in place of what it and the hooks returned; None for that.

        Returns:
            Whether hooks run before the module returns; else ``changed`` is left to the caller.
        """

        def after_hooks(returned: Any) -> Any:
            self.step("noting that a module returns", self.leave, state, given, returned, changed)
            return None if changed is None else changed(returned)

        if not run_after_hooks(self.changes, module, after_hooks):
            self.leave(state, given, result, changed)
            return False
        self._between.setdefault(self.log.stack[-1], [next_number()])
        return True

    def leave(self, state: Any, given: Given, result: Any, changed: Callable[[Any], Any] | None) -> None:
        """Note that the innermost running module returns; the arguments are those of `returns`."""
        # Only now: the tracer would make a tensor that it does not know a constant, and name it by the caller's scope.
        self.log.record_inputs(given, traced_number)
        index = self.log.stack[-1]
        self.log.exit(result, traced_number)
        if index in self._between:
            self._between[index].append(next_number())
        if self.log.stack:
            return
        graph = state.graph()
        self._traced_nodes = []
        self._note(graph.nodes(), NO_CALL if self._has_root_scope else index)
        place_between(self._traced_nodes, self._between, self.log)
        self._traced_inputs = [value.unique() for value in graph.inputs()]
        with contextlib.suppress(RuntimeError):  # the tracer refuses the result, and the export fails
            self._traced_outputs = keys_of(flattened(result if changed is None else changed(result)), traced_number)

    def _note(self, nodes: Any, call: int) -> None:
        """Note kind, scope, call and outputs of every traced node but constants, in order.

        The tracer puts what a module's call does into a block of its own, whose node names the module as the trace
        module map does; once tracing is over the blocks are dissolved. Blocks stand in the order of the calls.
        """
        for node in nodes:
            kind = node.kind()
            if kind == "prim::TracedModuleForward":
                name, inner = node.s("scope"), call
                for later in range(self._next_call, len(self.log.calls)):
                    if later not in self._unscoped and self._scope_names.get(self.log.calls[later].path) == name:
                        inner, self._next_call = later, later + 1
                        break
                for block in node.blocks():
                    self._note(block.nodes(), inner)
            elif kind not in CONSTANTS:
                numbers = numbers_of_outputs(node), numbers_of_inputs(node)
                self._traced_nodes.append(TracedNode(out_of_place(kind), node.scopeName(), call, *numbers))

    # --- the traced graph -----------------------------------------------------------------------

    def trace(self, run: Callable[[Any], Any], model: Any, formatted: Any) -> Any:
        """Trace the model: called as torch formats the arguments, or as they were given where that failed."""
        as_passed = GivenCall(model, self._args, in_signature_order=self._names_inputs)
        self.choice = choose(model, formatted, as_passed, self._refusal)
        changes = self.changes.inner()
        try:
            keep_autocast_cache(changes)
            result = run(self.choice.call.traced)
        finally:
            changes.take_back()
        self.choice = self.choice.after_trace
        return result

    def traced(self, graph: Any) -> None:
        """Note the graph as it was traced."""
        self._user_inputs = len(list(graph.inputs())) - len(self._state)
        reading = read(graph, self._user_inputs, scopes=True)
        inputs = zip(self._traced_inputs, (*reading.inputs, *reading.parameters), strict=False)
        self._began(reading, dict(inputs))

    def created(self, graph: Any, parameters: int) -> None:
        """Note the graph that is to be translated, if it was not traced but made of a module that was traced before.

        torch does so with quantized models.
        """
        if self._first or not self._traced_nodes:
            return
        self._user_inputs = len(list(graph.inputs())) - parameters
        reading = read(graph, self._user_inputs, scopes=True)
        # The first input of the trace is the module, whose method is traced.
        inputs = dict(zip(self._traced_inputs[1:], reading.inputs, strict=False))
        self._began(reading, inputs)

    def _began(self, reading: Reading, inputs: dict[int, int]) -> None:
        """Note the first graph, before anything in it was rewritten."""
        matched = match(self._traced_nodes, reading, inputs, self._traced_outputs)
        self._first = self._last = reading
        self._numbers = {**inputs, **matched.numbers}
        self._dead = matched.dead
        calls = [call for call, size in zip(matched.calls, reading.sizes, strict=True) for _ in range(size)]
        self._operations = [
            self._versions.operation(index, step, call, step.kind in SHAPE_KINDS)
            for index, (step, call) in enumerate(zip(reading.steps, calls, strict=True))
        ]
        self._outputs = [self._versions.state(number, len(calls)) for number in reading.outputs]

    # --- its translation --------------------------------------------------------------------------

    def _rewritten(self, graph: Any) -> None:
        """Note where a rewriting in place left the tensors."""
        self._follow(read(graph, self._user_inputs))

    def _follow(self, now: Reading) -> None:
        self._stages.append(follow(self._last, now))
        self._last = now

    def before_translation(self, graph: Any) -> None:
        """Note what became of the traced graph before it is translated into another."""
        self._translation.begin(graph)
        if self._first:
            now = read(graph, self._user_inputs)
            self._last = self._versions.settle(self._operations, self._outputs, self._first, now)
            self._follow(now)
        elif self.log.calls == []:
            self._scripted(graph)

    def _scripted(self, graph: Any) -> None:
        """Note the graph of a `ScriptModule`, which was not traced."""
        names = {value.unique(): value.debugName() for value in graph.inputs()}
        parameters = {number: name for number, name in names.items() if name in self._state}
        self._user_inputs = len(names) - len(parameters)
        self._first = self._last = reading = read(graph, self._user_inputs)
        self._outputs = [*reading.outputs]
        calls = ScriptCalls(self.log, self._paths).of_graph(graph, reading, parameters)
        for step, call in zip(reading.steps, calls, strict=True):
            self._operations.append(Operation(call, step.inputs, step.outputs, step.kind in SHAPE_KINDS))

    def translated_node(self, node: Any, result: Any) -> None:
        """Note which tensors of the new graph stand for those of one traced node."""
        self._translation.node(node, result)

    def translated_function(self, name: str, result: Any) -> None:
        """Note which tensors of the new graph stand for those of an ``autograd.Function``."""
        self._translation.function(name, result)

    def translated(self, graph: Any) -> None:
        """Note the ONNX graph as it was translated."""
        if not self._first:
            return
        self._translation.through_blocks(self._last.steps)
        now = read(graph, self._user_inputs)
        self._stages.append({**self._translation.numbers, **dict(zip(self._last.inputs, now.inputs, strict=True))})
        self._last = now

    def renumbered(self, before: Any, after: Any) -> None:
        """Note that a graph was copied node by node, with new numbers."""
        if not self._first:
            return
        self._rewritten(before)
        numbers = self._last.copied_to(after) or self._last.paired_with(read(after, self._user_inputs))
        self._stages.append(numbers)
        self._last = self._last.renamed(numbers)

    def named(self, graph: Any) -> None:
        """Note what became of the ONNX graph once it has the names that it has in the file."""
        if self._first:
            self._rewritten(graph)
            self._graph = graph

    def _names(self, protos: list[onnx.NodeProto], inputs: list[str]) -> dict[int, str]:
        """Number in the last graph → name in the file."""
        steps, nodes = self._last.steps, [proto for proto in protos if proto.op_type != "Constant"]
        names = dict(zip(self._last.inputs, inputs, strict=False))
        if all(len(a.outputs) == len(b.output) for a, b in zip(steps, nodes, strict=False)) and len(steps) == len(
            nodes
        ):
            for step, node in zip(steps, nodes, strict=True):
                names.update(zip(step.outputs, node.output, strict=True))
        elif self._graph is not None:  # the file has other nodes than the graph: modules exported as functions
            for node in nodes_of(self._graph):
                names.update((value.unique(), value.debugName()) for value in node.outputs())
        return names

    # --- the file -----------------------------------------------------------------------------------

    def has_only_standard_nodes(self, model_bytes: bytes) -> bool:
        """Whether no node is of a custom domain, which torch would have to look up."""
        self._file = SerializedModel(model_bytes, self.weights)
        proto = self._file.proto
        return not proto.functions and not any(node.domain for node in every_proto(proto.graph.node))

    def tagged(self, model_bytes: bytes) -> Iterable[bytes | memoryview]:
        """The file with tags, in pieces to be written one after the other."""
        self.choice = None
        file = self._file if self._file and self._file.data is model_bytes else None
        file = file or SerializedModel(model_bytes, self.weights)
        return self.tag(file) if self.tag else file.chunks()

    def _number_before(self, number: Any, call: int, producers: Mapping[Any, Operation]) -> Any:
        """Return the number that an input tensor of a call had before the call.

        The current number is read after the call. An operation of the call that returned the tensor itself
        (``x.to(x.dtype)``) or changed it in place assigned a new number; it read the tensor under the previous one.
        """
        producer = producers.get(number)
        while producer is not None and call in self.log.chain(producer.call):
            number = producer.inputs[0] if producer.inputs else None
            producer = producers.get(number)
        return number

    def _spans(self) -> dict[int, tuple[int, int]]:
        """Return for each call the index of its first operation, and the index after its last one."""
        spans: dict[int, tuple[int, int]] = {}
        for index, operation in enumerate(self._operations):
            for call in self.log.chain(operation.call):
                spans[call] = spans.get(call, (index, 0))[0], index + 1
        return spans

    def finish(self, file: SerializedModel) -> tuple[Record, list[onnx.NodeProto]]:
        """Return the record of the export, and the nodes in the order of ``Record.nodes``."""
        record = Record(self.log)
        record.operations, record.dead = self._operations, self._dead
        number, producers = self._numbers.get, {key: step for step in self._operations for key in step.outputs}
        spans = self._spans() if self._versions else {}
        for call, tensors in self.log.call_tensors.items():
            began, ended = spans.get(call, (0, 0))
            inputs = ((name, self._number_before(number(key), call, producers)) for name, key in tensors.inputs)
            record.call_tensors[call] = CallTensors(
                tuple((name, self._versions.state(key, began)) for name, key in inputs),
                tuple(self._versions.state(number(traced), ended) for traced in tensors.outputs),
                tensors.containers,
            )
        if self._first:
            record.inputs, record.outputs = set(self._first.inputs), self._outputs
        protos = list(every_proto(file.proto.graph.node))
        names = self._names(protos, file.inputs)
        for function in file.proto.functions:
            protos.extend(every_proto(function.node))
        for proto in protos:
            reads = [name for name in proto.input if name]
            for body in bodies_of_proto(proto):
                reads.extend(output.name for output in body.output)
            shape_only = proto.op_type in ("Shape", "Size")
            record.nodes.append(Node(tuple(reads), tuple(proto.output), shape_only=shape_only))
        there = {name for node in record.nodes for name in node.outputs} | set(file.inputs)
        for key in (*record.inputs, *(key for operation in self._operations for key in operation.outputs)):
            here: Any = key
            for stage in self._stages:
                here = stage.get(here)
            name = names.get(here)
            if name in there:
                record.final[key] = name
        record.graph_inputs = {name for name in file.inputs if name not in file.initializers}
        record.graph_outputs = set(file.outputs)
        return record, protos
