"""The ONNX graph of a dynamo export, as a capture reads it: nodes and bodies, what they read, and equal tensors."""

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
"""Key in a node's metadata while it is exported: the call of a node in a body, and the evidence for it."""


def every_node(graph: Any) -> Iterator[ir.Node]:
    """Nodes of a graph or function, those of a node's bodies before the node: producers before consumers."""
    for node in graph:
        for body in subgraphs(node):
            yield from every_node(body)
        yield node


def nodes_of_model(model: ir.Model) -> Iterator[ir.Node]:
    """The same for a model, whose functions come last."""
    for graph in (model.graph, *model.functions.values()):
        yield from every_node(graph)


def reads_of(node: ir.Node) -> tuple[ir.Value, ...]:
    """What a node reads; for one with bodies, also what its bodies return."""
    reads = [value for value in values_read(operator_of(node), node.inputs) if value is not None]
    for body in subgraphs(node):
        reads.extend(body.outputs)
    return tuple(reads)


def describe(model: ir.Model, record: Record) -> list[ir.Node]:
    """Fill the exported graph into a record, and return the nodes of the model in the order of ``Record.nodes``."""
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
    """Write the calls of a graph's nodes on the nodes that make tensors of the same names, which have no metadata."""
    for node in every_node(graph):
        if STAMP in node.metadata_props:
            for output in node.outputs:
                value = named.get(output.name)
                producer = None if value is None else value.producer()
                if producer is not None:
                    producer.metadata_props[STAMP] = node.metadata_props[STAMP]


def equal_tensors(nodes: Iterable[ir.Node]) -> dict[ir.Value, tuple[ir.Value, ...]]:
    """Tensors of a graph that are equal whatever the inputs are: each → the others, in the order of production.

    A tensor that is reshaped, and then gets a shape back that it had before, is the tensor that had
    this shape; so is one that is padded by nothing. ``nodes`` have producers before consumers.
    """
    source: dict[ir.Value, ir.Value] = {}
    groups: dict[tuple[ir.Value, tuple[str, ...]], list[ir.Value]] = {}
    for node in nodes:
        source_value = node.inputs[0] if node.inputs and _keeps_elements(node) else None
        if source_value is None:
            continue
        first = source.setdefault(source_value, source_value)
        if first is source_value and (sizes := _sizes(source_value)) is not None:
            groups.setdefault((source_value, sizes), [source_value])
        result = node.outputs[0]
        source[result] = first
        if (sizes := _sizes(result)) is not None:
            groups.setdefault((first, sizes), []).append(result)
    return {
        value: tuple(member for member in group if member is not value)
        for group in groups.values()
        if len(group) > 1
        for value in group
    }


def _keeps_elements(node: ir.Node) -> bool:
    """Whether the result of a node has the elements of its first input, in the same order."""
    if not is_standard(node, "Pad"):
        return is_standard(node, "Identity", *RESHAPING)
    sizes = node.inputs[1] if len(node.inputs) > 1 else None
    padding = None if sizes is None else constant_tensor(sizes)
    return padding is not None and not padding.numpy().any()


def _sizes(value: ir.Value) -> tuple[str, ...] | None:
    """The dimensions of a tensor; None where one is not known, not even as a symbol."""
    dims = (
        None
        if value.shape is None
        else [dim if isinstance(dim, int) else dim.value for dim in value.shape]
    )
    return None if dims is None or None in dims else tuple(map(str, dims))


@dataclass(frozen=True)
class BodyFunction:
    """A function that stands for a branch or loop body of a graph that was just translated: torch inlines it later."""

    nodes: tuple[ir.Node, ...]  # its nodes; those of functions that it calls are not among them
    # FX node → names of the initializers that the ONNX nodes made of it read
    read: Mapping[Any, frozenset[str]]

    def parameters(self, node: ir.Node) -> frozenset[str]:
        """The initializers that a node reads, or another node that torch made of the same node of the FX graph."""
        return self.read.get(node.meta.get("node"), frozenset())


def bodies_of_node(
    node: ir.Node,
    functions: Mapping[Any, ir.Function],
    initializer_names: Mapping[Any, str] | None = None,
) -> Iterator[BodyFunction]:
    """The bodies of a node, and the bodies inside them; ``initializer_names``: inputs of the function around it."""
    for body in subgraphs(node):
        for call in every_node(body):
            function = functions.get(call.op_identifier())
            if function is None:
                continue
            formals = zip(function.inputs, call.inputs, strict=False)
            names = {
                formal: name
                for formal, value in formals
                if (name := _initializer(value, initializer_names))
            }
            nodes = tuple(every_node(function))
            read: dict[Any, frozenset[str]] = {}
            for inner in nodes:
                key = inner.meta.get("node")
                if key is not None and not subgraphs(inner):
                    initializers = frozenset(
                        name for value in inner.inputs if (name := _initializer(value, names))
                    )
                    read[key] = read.get(key, frozenset()) | initializers
            yield BodyFunction(nodes, read)
            for inner in function:
                yield from bodies_of_node(inner, functions, names)


def _initializer(value: ir.Value | None, names: Mapping[Any, str] | None) -> str:
    """The name of the initializer that a value is, or stands for; empty where it is none."""
    if value is None:
        return ""
    return (names or {}).get(value) or (str(value.name) if value.is_initializer() else "")
