"""Capture under ``dynamo=False``: the tracer's blocks say who ran what, the values' numbers what became of it.

While PyTorch traces, each module's call has a block of nodes of its own. The exporter then dissolves the blocks,
rewrites the graph in place (merging equal work, removing no-ops), translates it into ONNX operators, and rewrites
again. Values keep their numbers while a graph is rewritten; where one is gone, the nodes that used to read it tell
which value stands in its place. Nothing of the graph is changed here, so that the file stays torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import onnx

from htp_export.capture.calls import NO_CALL, CallLog
from htp_export.capture.record import Key, Node, Operation, Record
from htp_export.capture.root_call import RootCall
from htp_export.wire import SerializedModel

# Operations on shapes alone: traced as integers, or ONNX's own.
SHAPE_KINDS = frozenset({"aten::size", "aten::dim", "aten::numel", "aten::len", "onnx::Shape", "onnx::Size"})


@dataclass(frozen=True, slots=True)
class Step:
    """One node of a JIT graph at one moment.

    Attributes:
        kind: What it does, ``aten::linear``.
        inputs: Keys of what it reads, what its blocks return included.
        outputs: Keys of what it makes.
        returned: For a node whose one block makes its outputs, the block's; empty for others.
    """

    kind: str
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    returned: tuple[Key, ...] = ()


def read(graph: Any, key: Callable[[Any], Key]) -> list[Step]:
    """The nodes of a JIT graph, those inside blocks before the node that has the blocks."""
    steps: list[Step] = []
    for node in graph.nodes():
        reads = [key(value) for value in node.inputs()]
        outputs = tuple([key(value) for value in node.outputs()])
        returned: list[Key] = []
        for block in node.blocks():
            steps.extend(read(block, key))
            returned.extend(key(value) for value in block.outputs())
        kind = node.kind().removesuffix("_")  # an operation in place, and the one that is put in its place
        one_to_one = tuple(returned) if len(returned) == len(outputs) else ()
        steps.append(Step(kind, (*reads, *returned), outputs, one_to_one))
    return steps


def _sizes(graph: Any) -> Iterator[int]:
    """For each node of a JIT graph, how many steps `read` makes of it."""
    for node in graph.nodes():
        yield 1 + sum(sum(_sizes(block)) for block in node.blocks())


def _subsequence(traced: list[tuple[str, str, int]], kept: list[tuple[str, str]]) -> tuple[list[int], set[int]]:
    """The calls of the nodes that were kept of what was traced, and those of the nodes that were dropped as dead."""
    calls, dropped, at = [], set(), 0
    for kind, scope in kept:
        while at < len(traced) and traced[at][:2] != (kind, scope):
            if traced[at][0] != "prim::Constant":
                dropped.add(traced[at][2])
            at += 1
        calls.append(traced[at][2] if at < len(traced) else NO_CALL)
        at += 1
    return calls, dropped.union(call for kind, _, call in traced[at:] if kind != "prim::Constant")


def follow(before: list[Step], after: list[Step], ends: Iterable[tuple[Key, Key]]) -> dict[Key, Key | None]:
    """Where a rewriting of a graph in place left each tensor: the tensor that now holds its value, None if none does.

    Args:
        before: The graph's nodes before.
        after: The graph's nodes after; tensors that are still there have the same key.
        ends: Pairs of graph outputs, before and after.

    A node that is in both graphs and reads another tensor in a place shows what that place's tensor became. From
    there backwards: where one operation stands in for another of its kind, so do the tensors that they read.
    """
    made_before = {key: step for step in before for key in step.outputs}
    made_after = {key: step for step in after for key in step.outputs}
    became: dict[Key, Key] = {}
    queue: list[tuple[Key, Key]] = [pair for pair in ends if pair[0] != pair[1]]
    for step in after:
        old = made_before.get(step.outputs[0]) if step.outputs else None
        if old is not None and old.kind == step.kind and len(old.inputs) == len(step.inputs):
            queue.extend((a, b) for a, b in zip(old.inputs, step.inputs, strict=True) if a != b)
    while queue:
        old_key, new_key = queue.pop()
        if old_key in made_after or old_key in became or old_key not in made_before:
            continue
        became[old_key] = new_key
        gone, kept = made_before[old_key], made_before.get(new_key) or made_after.get(new_key)
        if kept is not None and gone.kind == kept.kind and len(gone.inputs) == len(kept.inputs):
            queue.extend((a, b) for a, b in zip(gone.inputs, kept.inputs, strict=True) if a != b)
    moved: dict[Key, Key | None] = {key: _last(key, became, made_after) for key in became}
    for old_key, new_key in became.items():
        made, remade = made_before.get(new_key), made_after.get(new_key)
        if made and remade and new_key in made_before[old_key].inputs and _changed(made, remade, became):
            moved[new_key] = None  # the node that made it does the work of the next node too, and makes its result
    return moved


def _last(key: Key, became: dict[Key, Key], stop: dict[Key, Step]) -> Key:
    """Where a chain of replacements ends."""
    seen = set()
    while key not in stop and key in became and key not in seen:
        seen.add(key)
        key = became[key]
    return key


def _changed(made: Step, remade: Step, became: dict[Key, Key]) -> bool:
    """Whether a node reads other tensors than before, or is another operation."""
    if made.kind != remade.kind or len(made.inputs) != len(remade.inputs):
        return True
    return any(a != b and became.get(a) != b for a, b in zip(made.inputs, remade.inputs, strict=True))


class TorchScriptCapture:
    """One export through ``torch.jit.trace``, as it happens.

    Args:
        paths: For each module of the model, ``id(module.__dict__)`` → its path.
        scope_names: Module path → the name that the tracer gives its scope (``Linear::query``).
        parameters: How many of the traced graph's inputs, the last ones, are parameters and buffers.
        names_inputs: Whether the user names the graph's inputs, counting on torch's order of them.
    """

    def __init__(self, paths: dict[int, str], scope_names: dict[str, str], parameters: int, names_inputs: bool) -> None:
        self.log = CallLog()
        self.tag: Callable[[SerializedModel], Iterable[bytes | memoryview]] | None = None
        self._file: SerializedModel | None = None
        self.root_call: RootCall | None = None
        self.names_inputs = names_inputs
        self._paths = paths
        self._parameters = parameters
        self._scope_names = scope_names
        self._next_call = 0
        self._dead: set[int] = set()
        self._traced_nodes: list[tuple[str, str, int]] = []
        self._operations: list[Operation] = []
        self._user_inputs = 0
        self._outputs: list[Key] = []
        self._ends: list[Key] = []
        self._steps: list[Step] = []
        self._stages: list[dict[Key, Key | None]] = []
        self._translation: dict[Key, Key] = {}
        self._names: dict[Key, Key] = {}

    # --- while the model runs -----------------------------------------------------------------

    def call(self, module: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module's call, noting it."""
        from htp_export.capture.torch_internals import tracing_state

        path, state = self._paths.get(id(module.__dict__)), tracing_state()
        if path is None or state is None:
            return run(module, *args, **kwargs)
        if not self.log.stack:
            self.log = CallLog()
        self.log.enter(path)
        if self.root_call is not None and len(self.log.stack) == 1:
            result = self.root_call.run(lambda *a, **k: run(module, *a, **k), args)
        else:
            result = run(module, *args, **kwargs)
        self.log.leave((args, kwargs), result)
        if not self.log.stack:
            self._traced_nodes = list(self._in_order(state.graph().nodes(), NO_CALL))
        return result

    def _in_order(self, nodes: Any, call: int) -> Iterator[tuple[str, str, int]]:
        """Kind, scope and call of every traced node, in order.

        The tracer puts what a module's call does into a block of its own, whose node names the module as the trace
        module map does; once tracing is over the blocks are dissolved. Blocks stand in the order of the calls.
        """
        for node in nodes:
            kind = node.kind()
            if kind != "prim::TracedModuleForward":
                yield kind, node.scopeName(), call
                continue
            name, inner = node.s("scope"), call
            for later in range(self._next_call, len(self.log.calls)):
                if self._scope_names.get(self.log.calls[later].path) == name:
                    inner, self._next_call = later, later + 1
                    break
            for block in node.blocks():
                yield from self._in_order(block.nodes(), inner)

    # --- the traced graph -----------------------------------------------------------------------

    def traced(self, graph: Any) -> None:
        """Note the graph as it was traced."""
        self._user_inputs = len(list(graph.inputs())) - self._parameters
        self._steps, self._outputs = self._read(graph)
        self._ends = self._outputs
        nodes = list(graph.nodes())
        kept, dropped = _subsequence(self._traced_nodes, [(node.kind(), node.scopeName()) for node in nodes])
        calls = [call for call, size in zip(kept, _sizes(graph), strict=True) for _ in range(size)]
        self._operations = [
            Operation(call, step.inputs, step.outputs, step.kind in SHAPE_KINDS)
            for step, call in zip(self._steps, calls, strict=True)
        ]
        self._dead = dropped

    def _read(self, graph: Any) -> tuple[list[Step], list[Key]]:
        users = {value.unique(): ("input", place) for place, value in zip(range(self._user_inputs), graph.inputs())}

        def key(value: Any) -> Key:
            number = value.unique()
            return users.get(number, number)

        return read(graph, key), [key(value) for value in graph.outputs()]

    def _rewritten(self, graph: Any) -> None:
        """Note where a rewriting in place left the tensors."""
        steps, outputs = self._read(graph)
        there = {key for step in steps for key in step.outputs}
        moved = follow(self._steps, steps, zip(self._ends, outputs, strict=False))
        keys = (key for step in self._steps for key in step.outputs)
        self._stages.append({key: moved.get(key, key if key in there else None) for key in keys})
        self._steps, self._ends = steps, outputs

    # --- its translation --------------------------------------------------------------------------

    def before_translation(self, graph: Any) -> None:
        """Note what became of the traced graph before it is translated into another."""
        if self._steps:
            self._rewritten(graph)

    def translated_node(self, node: Any, result: Any) -> None:
        """Note which tensors of the new graph stand for those of one traced node."""
        results = result if isinstance(result, (tuple, list)) else (result,)
        for output, value in zip(node.outputs(), results, strict=False):
            if hasattr(value, "unique"):
                self._translation[output.unique()] = value.unique()

    def translated(self, graph: Any) -> None:
        """Note the ONNX graph as it was translated."""
        if self._steps:
            for step in self._steps:  # a block that was dissolved: torch.autograd.Function
                for output, inner in zip(step.outputs, step.returned, strict=bool(step.returned)):
                    if output not in self._translation and inner in self._translation:
                        self._translation[output] = self._translation[inner]
            self._steps, self._ends = self._read(graph)
            users = {value.unique(): ("input", i) for i, value in zip(range(self._user_inputs), graph.inputs())}
            self._stages.append({old: users.get(new, new) for old, new in self._translation.items()})

    def renumbered(self, before: Any, after: Any) -> None:
        """Note that a graph was copied node by node, with new numbers."""
        if self._steps:
            self._rewritten(before)
            old, (self._steps, self._ends) = self._steps, self._read(after)
            pairs = zip(old, self._steps, strict=True)
            self._stages.append({a: b for was, now in pairs for a, b in zip(was.outputs, now.outputs, strict=True)})

    def named(self, graph: Any) -> None:
        """Note what became of the ONNX graph, and the names that its tensors have in the file."""
        if self._steps:
            self._rewritten(graph)
            for place, value in zip(range(self._user_inputs), graph.inputs()):
                self._names["input", place] = value.debugName()
            for node in _nodes(graph):
                self._names.update((value.unique(), value.debugName()) for value in node.outputs())

    # --- the file -----------------------------------------------------------------------------------

    def has_only_standard_nodes(self, model_bytes: bytes) -> bool:
        """Whether no node is of a custom domain, which torch would have to look up."""
        self._file = SerializedModel(model_bytes)
        return not self._file.functions and not any(node.domain for node in _protos(self._file.nodes))

    def tagged(self, model_bytes: bytes) -> Iterable[bytes | memoryview]:
        """The file with tags, in pieces to be written one after the other."""
        file = self._file if self._file and self._file.data is model_bytes else SerializedModel(model_bytes)
        return self.tag(file) if self.tag else [model_bytes]

    def finish(self, file: SerializedModel) -> tuple[Record, list[onnx.NodeProto]]:
        """What is known of the exported model, and its nodes in the order of ``Record.nodes``."""
        record = Record(self.log)
        record.operations, record.dead = self._operations, self._dead
        record.inputs = {("input", place) for place in range(self._user_inputs)}
        record.outputs = self._outputs
        protos = list(_protos(file.nodes))
        for function in file.functions:
            protos.extend(_protos(function.node))
        for proto in protos:
            reads = [name for name in proto.input if name]
            for body in _bodies(proto):
                reads.extend(output.name for output in body.output)
            shape_only = proto.op_type in ("Shape", "Size")
            record.nodes.append(Node(tuple(reads), tuple(proto.output), shape_only=shape_only))
        there = {name for node in record.nodes for name in node.outputs} | set(file.inputs)
        for key in (*record.inputs, *(key for operation in self._operations for key in operation.outputs)):
            here: Key | None = key
            for stage in self._stages:
                if here is None or (isinstance(here, tuple)):
                    break
                here = stage.get(here)
            name = self._names.get(here) if here is not None else None
            if name in there:
                record.final[key] = name
        record.graph_inputs = {name for name in file.inputs if name not in file.initializers}
        record.graph_outputs = set(file.outputs)
        return record, protos


def _nodes(graph: Any) -> Iterator[Any]:
    for node in graph.nodes():
        for block in node.blocks():
            yield from _nodes(block)
        yield node


def _bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def _protos(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes, those of a node's bodies before the node: producers before consumers."""
    for node in nodes:
        for body in _bodies(node):
            yield from _protos(body.node)
        yield node
