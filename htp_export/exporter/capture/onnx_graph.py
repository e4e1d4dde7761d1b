"""The ONNX graph of a dynamo export, as a capture reads it: nodes, values, and the stamps on nodes of bodies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from htp_export.exporter.capture.body_functions import every_node
from htp_export.exporter.capture.record import Node, Record
from htp_export.shapes.operator_kinds import SIZES_ONLY, is_standard, operator_of, subgraphs, values_read

if TYPE_CHECKING:
    import onnx_ir as ir

STAMP = "htp.stamp"
"""Key in a node's metadata while it is exported: the call of a node in a body, and the evidence for it."""


def copy_stamps(graph: ir.Graph, named: Mapping[str | None, ir.Value]) -> None:
    """Write the calls of a graph's nodes on the nodes that make tensors of the same names, which have no metadata."""
    for node in every_node(graph):
        if STAMP in node.metadata_props:
            for output in node.outputs:
                value = named.get(output.name)
                producer = None if value is None else value.producer()
                if producer is not None:
                    producer.metadata_props[STAMP] = node.metadata_props[STAMP]


def describe(model: ir.Model, record: Record) -> tuple[list[ir.Node], Record]:
    """Every node of a model, and the record with the exported graph filled in: nodes, inputs, outputs."""
    nodes = list(every_node(model.graph))
    for function in model.functions.values():
        nodes.extend(every_node(function))
    record.nodes = [
        Node(reads_of(node), tuple(node.outputs), shape_only=is_standard(node, *SIZES_ONLY)) for node in nodes
    ]
    record.graph_inputs = {value for value in model.graph.inputs if value.name not in model.graph.initializers}
    record.graph_outputs = set(model.graph.outputs)
    return nodes, record


def values_of(graph: ir.Graph) -> Iterator[ir.Value]:
    """Every value of a graph that something made or gave: its inputs, initializers, and the outputs of its nodes."""
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in every_node(graph):
        yield from node.outputs


def reads_of(node: ir.Node) -> tuple[ir.Value, ...]:
    """What a node reads; for one with bodies, also what its bodies return."""
    reads = [value for value in values_read(operator_of(node), node.inputs) if value is not None]
    for body in subgraphs(node):
        reads.extend(body.outputs)
    return tuple(reads)
