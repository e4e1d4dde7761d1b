"""Nodes of serialized ONNX graphs, those of branches and loop bodies too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx


def bodies_of_proto(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The branches and loop bodies of a node."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def every_proto(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes, those of a node's bodies before the node: producers before consumers."""
    for node in nodes:
        for body in bodies_of_proto(node):
            yield from every_proto(body.node)
        yield node
