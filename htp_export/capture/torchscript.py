"""Capture under ``dynamo=False``: the order of traced values says who ran what, their names say what became of it.

While PyTorch traces, values are numbered as they are made, so that a module's call is an interval of numbers. The
exporter then rewrites the graph in place (merging equal work, removing no-ops), translates it into ONNX operators,
and rewrites again; values keep their numbers within a stage, and the names set here carry them from one to the next.
Where a value is gone, the nodes that used to read it tell which value stands in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import onnx

from htp_export.capture.calls import NO_CALL, CallLog
from htp_export.capture.record import Key, Node, Operation, Record
from htp_export.wire import SerializedModel

# Operations on shapes alone: traced as integers, or ONNX's own.
SHAPE_KINDS = frozenset({"aten::size", "aten::dim", "aten::numel", "aten::len", "onnx::Shape", "onnx::Size"})


@dataclass(frozen=True, slots=True)
class Step:
    """One node of a JIT graph at one moment."""

    kind: str
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]


def read(graph: Any, key: Callable[[Any], Key]) -> list[Step]:
    """The nodes of a JIT graph, those inside blocks before the node that has the blocks."""
    steps: list[Step] = []
    for node in graph.nodes():
        reads = [key(value) for value in node.inputs()]
        for block in node.blocks():
            steps.extend(read(block, key))
            reads.extend(key(value) for value in block.outputs())
        steps.append(Step(node.kind(), tuple(reads), tuple(key(value) for value in node.outputs())))
    return steps


def follow(before: list[Step], after: list[Step], ends: Iterable[tuple[Key, Key]]) -> dict[Key, Key | None]:
    """Where a rewriting of a graph in place left each tensor: the tensor that now holds its value, None if none does.

    Args:
        before: The graph's nodes before.
        after: The graph's nodes after; tensors that are still there have the same key.
        ends: Pairs of graph outputs, before and after.

    A node that is in both graphs and reads another tensor in a place shows what that place's tensor became. From
    there backwards: two equal operations of which one was dropped had equal inputs.
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
        gone, kept = made_before[old_key], made_before.get(new_key)
        if kept is not None and gone.kind == kept.kind and len(gone.inputs) == len(kept.inputs):
            queue.extend((a, b) for a, b in zip(gone.inputs, kept.inputs, strict=True) if a != b)
    moved: dict[Key, Key | None] = dict(became)
    for old_key, new_key in became.items():
        if _took_over(old_key, new_key, made_before, made_after):
            moved[new_key] = None  # the node that made it now makes what was computed from it
    return moved


def _took_over(old: Key, new: Key, before: dict[Key, Step], after: dict[Key, Step]) -> bool:
    """Whether ``new``, from which ``old`` was computed, is now made by a changed node: it does both nodes' work."""
    made, remade = before.get(new), after.get(new)
    if made is None or remade is None or new not in before[old].inputs:
        return False
    return made.inputs != remade.inputs or made.kind != remade.kind


class TorchScriptCapture:
    """One export through ``torch.jit.trace``, as it happens.

    Args:
        paths: For each module of the model, ``id(module.__dict__)`` → its path.
        parameters: How many of the traced graph's inputs, the last ones, are parameters and buffers.
    """

    def __init__(self, paths: dict[int, str], parameters: int) -> None:
        self.log = CallLog()
        self.file: SerializedModel | None = None
        self._paths = paths
        self._parameters = parameters
        self._events: list[tuple[int, int]] = []  # (newest value's number, call that runs from there on)
        self._operations: list[Operation] = []
        self._user_inputs = 0
        self._outputs: list[Key] = []
        self._last_outputs: list[Key] = []
        self._steps: list[Step] = []
        self._stages: list[dict[Key, Key | None]] = []
        self._same: dict[Key, Key] = {}
        self._numbers: dict[int, Key] = {}
        self._names: dict[Key, Key] = {}

    # --- while the model runs -----------------------------------------------------------------

    def call(self, module: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module's call, noting it and what is traced meanwhile."""
        from htp_export.capture.torch_internals import last_value, tracing_state

        path, state = self._paths.get(id(module.__dict__)), tracing_state()
        if path is None or state is None:
            return run(module, *args, **kwargs)
        if not self.log.stack:
            self.log, self._events = CallLog(), []
        index = self.log.enter(path)
        self._events.append((last_value(state), index))
        result = run(module, *args, **kwargs)
        self.log.leave((args, kwargs), result)
        self._events.append((last_value(state), self.log.stack[-1] if self.log.stack else NO_CALL))
        return result

    # --- the traced graph -----------------------------------------------------------------------

    def traced(self, graph: Any) -> None:
        """Note the graph as it was traced."""
        self._user_inputs = len(list(graph.inputs())) - self._parameters
        self._steps, self._outputs = self._read(graph, lambda value: value.unique())
        events, at, call = self._events, 0, NO_CALL
        for step in self._steps:
            newest = step.outputs[-1] if step.outputs else -1
            while at < len(events) and events[at][0] < newest:
                call, at = events[at][1], at + 1
            self._operations.append(Operation(call, step.inputs, step.outputs, step.kind in SHAPE_KINDS))

    def _read(self, graph: Any, name: Callable[[Any], Key]) -> tuple[list[Step], list[Key]]:
        users = {value.unique(): ("input", place) for place, value in zip(range(self._user_inputs), graph.inputs())}

        def key(value: Any) -> Key:
            return users.get(value.unique()) or name(value)

        return read(graph, key), [key(value) for value in graph.outputs()]

    def _stage(self, graph: Any, name: Callable[[Any], Key]) -> None:
        """Note where a rewriting in place left the tensors of the stage before."""
        steps, outputs = self._read(graph, name)
        there = {key for step in steps for key in step.outputs}
        moved = follow(self._steps, steps, zip(self._last_outputs, outputs, strict=False))
        self._stages.append({key: moved.get(key, key if key in there else None) for s in self._steps for key in s.outputs})
        self._steps, self._last_outputs = steps, outputs

    # --- its translation --------------------------------------------------------------------------

    def before_translation(self, graph: Any) -> None:
        """Note what became of traced values, and name them so that they are known after the translation."""
        if not self._steps:
            return
        self._last_outputs = self._outputs
        self._stage(graph, lambda value: value.unique())
        for node in _nodes(graph):
            for value in node.outputs():
                value.setDebugName(f"htp{value.unique()}_")

    def translated_node(self, node: Any, inputs: Any, result: Any) -> None:
        """Note the tensors that a translation gave back unchanged (dropout in eval mode, casts to the same type)."""
        results = result if isinstance(result, (tuple, list)) else (result,)
        for value, output in zip(results, node.outputs(), strict=False):
            if value is not None and any(value is given for given in inputs):
                self._same[output.debugName()] = value.debugName()

    def translated(self, graph: Any) -> None:
        """Note the ONNX graph as it was translated, and name its values to follow them further."""
        if not self._steps:
            return
        for node in _nodes(graph):
            for value in node.outputs():
                if not value.debugName().startswith("htp"):
                    value.setDebugName(f"htpn{value.unique()}_")
        inputs = {value.debugName(): ("input", place) for place, value in zip(range(self._user_inputs), graph.inputs())}
        before = self._steps
        self._steps, self._last_outputs = self._read(graph, lambda value: value.debugName())
        there = {key for step in self._steps for key in step.outputs}
        stage: dict[Key, Key | None] = {}
        for step in before:
            for key in step.outputs:
                name: Key = f"htp{key}_"
                seen = set()
                while name not in there and name in self._same and name not in seen:
                    seen.add(name)
                    name = self._same[name]
                stage[key] = name if name in there else inputs.get(name)
        self._stages.append(stage)

    def optimized(self, graph: Any) -> None:
        """Note what became of the ONNX graph's values, and take the names off again."""
        if not self._steps:
            return
        self._stage(graph, lambda value: value.debugName())
        for node in _nodes(graph):
            for value in node.outputs():
                name = value.debugName()
                if name.startswith("htp"):
                    self._numbers[value.unique()] = name
                    value.setDebugName("")

    def named(self, graph: Any) -> None:
        """Note the names that values have in the file."""
        for place, value in zip(range(self._user_inputs), graph.inputs()):
            self._names["input", place] = value.debugName()
        for node in _nodes(graph):
            for value in node.outputs():
                number = value.unique()
                if number in self._numbers:
                    self._names[self._numbers[number]] = value.debugName()

    # --- the file -----------------------------------------------------------------------------------

    def has_only_standard_nodes(self, model_bytes: bytes) -> bool:
        """Whether no node is of a custom domain, which torch would have to look up."""
        self.file = SerializedModel(model_bytes)
        return not self.file.functions and not any(node.domain for node in _protos(self.file.nodes))

    def finish(self) -> tuple[Record, list[onnx.NodeProto]]:
        """What is known of the exported model, and its nodes in the order of ``Record.nodes``."""
        assert self.file is not None
        record = Record(self.log)
        record.operations = self._operations
        record.inputs = {("input", place) for place in range(self._user_inputs)}
        record.outputs = self._outputs
        protos = list(_protos(self.file.nodes))
        for function in self.file.functions:
            protos.extend(_protos(function.node))
        for proto in protos:
            reads = [name for name in proto.input if name]
            for body in _bodies(proto):
                reads.extend(output.name for output in body.output)
            shape_only = proto.op_type in ("Shape", "Size")
            record.nodes.append(Node(tuple(reads), tuple(proto.output), shape_only=shape_only))
        there = {name for node in record.nodes for name in node.outputs} | set(self.file.inputs)
        for key in (*record.inputs, *(key for operation in self._operations for key in operation.outputs)):
            here: Key | None = key
            for stage in self._stages:
                if here is None or (isinstance(here, tuple)):
                    break
                here = stage.get(here)
            name = self._names.get(here) if here is not None else None
            if name in there:
                record.final[key] = name
        record.graph_inputs = {name for name in self.file.inputs if name not in self.file.initializers}
        record.graph_outputs = set(self.file.outputs)
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
