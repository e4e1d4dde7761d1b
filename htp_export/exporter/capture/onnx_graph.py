"""The ONNX graph of a dynamo export, for a capture: nodes, bodies, their inputs, equal tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from htp_export.exporter.capture.calls import Node, Record
from htp_export.shapes.known import constant_tensor
from htp_export.shapes.operator_kinds import (
    RESHAPING,
    SIZES_ONLY,
    is_standard,
    operator_of,
    subgraphs,
    values_read,
)

if TYPE_CHECKING:
    import onnx_ir as ir

STAMP = "htp.stamp"
"""Metadata key during an export: the call of a node in a body, and the evidence for it."""


def every_node(graph: Any) -> Iterator[ir.Node]:
    """Nodes of a graph or function, each after the nodes of its bodies."""
    for node in graph:
        for body in subgraphs(node):
            yield from every_node(body)
        yield node


def nodes_of_model(model: ir.Model) -> Iterator[ir.Node]:
    """All nodes of a model, in the order of `every_node`; functions come last."""
    for graph in (model.graph, *model.functions.values()):
        yield from every_node(graph)


def reads_of(node: ir.Node) -> tuple[ir.Value, ...]:
    """The inputs of a node, and the outputs of its bodies."""
    reads = [value for value in values_read(operator_of(node), node.inputs) if value is not None]
    for body in subgraphs(node):
        reads.extend(body.outputs)
    return tuple(reads)


def describe(model: ir.Model, record: Record) -> list[ir.Node]:
    """Fill the exported graph into a record; return its nodes in the order of ``Record.nodes``."""
    nodes = list(nodes_of_model(model))
    record.nodes = [
        Node(reads_of(node), tuple(node.outputs), shape_only=is_standard(node, *SIZES_ONLY))
        for node in nodes
    ]
    record.graph_inputs = {
        value for value in model.graph.inputs if value.name not in model.graph.initializers
    }
    record.graph_outputs = set(model.graph.outputs)
    return nodes


def copy_stamps(graph: ir.Graph, named: Mapping[str | None, ir.Value]) -> None:
    """Copy the stamps of nodes to the nodes of a copied graph that produce tensors of equal names.

    A graph that was read back from bytes has no metadata.
    """
    for node in every_node(graph):
        if STAMP not in node.metadata_props:
            continue
        for output in node.outputs:
            counterpart = named.get(output.name)
            producer = None if counterpart is None else counterpart.producer()
            if producer is not None:
                producer.metadata_props[STAMP] = node.metadata_props[STAMP]


def equal_tensors(nodes: Iterable[ir.Node]) -> dict[ir.Value, tuple[ir.Value, ...]]:
    """Tensor → other tensors that are equal for all inputs, in the order of production.

    A tensor that is reshaped, and then reshaped back to an earlier shape, equals the tensor that
    had this shape; a tensor padded by nothing equals its input. ``nodes`` have producers before
    consumers.
    """
    first_of: dict[ir.Value, ir.Value] = {}  # tensor → the first one with the same elements
    # (first tensor, sizes) → the tensors with its elements and these sizes
    groups: dict[tuple[ir.Value, tuple[str, ...]], list[ir.Value]] = {}
    for node in nodes:
        if not node.inputs or not _keeps_elements(node):
            continue
        source = node.inputs[0]
        if source is None:
            continue
        first = first_of.setdefault(source, source)
        if first is source:
            sizes = _sizes(source)
            if sizes is not None:
                groups.setdefault((source, sizes), [source])
        result = node.outputs[0]
        first_of[result] = first
        sizes = _sizes(result)
        if sizes is not None:
            groups.setdefault((first, sizes), []).append(result)
    equal: dict[ir.Value, tuple[ir.Value, ...]] = {}
    for group in groups.values():
        if len(group) > 1:
            for tensor in group:
                equal[tensor] = tuple(other for other in group if other is not tensor)
    return equal


def _keeps_elements(node: ir.Node) -> bool:
    """Whether the result of a node has the elements of its first input, in the same order."""
    if not is_standard(node, "Pad"):
        return is_standard(node, "Identity", *RESHAPING)
    sizes = node.inputs[1] if len(node.inputs) > 1 else None
    padding = None if sizes is None else constant_tensor(sizes)
    return padding is not None and not padding.numpy().any()


def _sizes(value: ir.Value) -> tuple[str, ...] | None:
    """The dimensions of a tensor; None if one is unknown, even as a symbol."""
    if value.shape is None:
        return None
    sizes = []
    for dim in value.shape:
        size = dim if isinstance(dim, int) else dim.value
        if size is None:
            return None
        sizes.append(str(size))
    return tuple(sizes)


@dataclass(frozen=True)
class BodyFunction:
    """The function of a branch or loop body in a translated graph; torch inlines it later."""

    nodes: tuple[ir.Node, ...]  # its nodes, without those of functions that it calls
    # FX node → names of the initializers that its ONNX nodes read
    read: Mapping[Any, frozenset[str]]

    def parameters(self, node: ir.Node) -> frozenset[str]:
        """The initializers that a node reads, or another node translated from the same FX node."""
        return self.read.get(node.meta.get("node"), frozenset())


def bodies_of_node(
    node: ir.Node,
    functions: Mapping[Any, ir.Function],
    initializer_names: Mapping[Any, str] | None = None,
) -> Iterator[BodyFunction]:
    """The bodies of a node, with inner ones.

    ``initializer_names``: inputs of the outer function → initializers that they receive.
    """
    for body in subgraphs(node):
        for call in every_node(body):
            function = functions.get(call.op_identifier())
            if function is None:
                continue
            names: dict[Any, str] = {}  # input of the function → initializer that it receives
            for formal, value in zip(function.inputs, call.inputs, strict=False):
                name = _initializer(value, initializer_names)
                if name:
                    names[formal] = name
            yield _body_function(function, names)
            for inner in function:
                yield from bodies_of_node(inner, functions, names)


def _body_function(function: ir.Function, names: Mapping[Any, str]) -> BodyFunction:
    nodes = tuple(every_node(function))
    read: dict[Any, frozenset[str]] = {}
    for node in nodes:
        fx_node = node.meta.get("node")
        if fx_node is not None and not subgraphs(node):
            initializers = {_initializer(value, names) for value in node.inputs} - {""}
            read[fx_node] = read.get(fx_node, frozenset()) | initializers
    return BodyFunction(nodes, read)


def _initializer(value: ir.Value | None, names: Mapping[Any, str] | None) -> str:
    """The name of the initializer that a value is, or receives; empty without one."""
    if value is None:
        return ""
    if names is not None and value in names:
        return names[value]
    return str(value.name) if value.is_initializer() else ""
