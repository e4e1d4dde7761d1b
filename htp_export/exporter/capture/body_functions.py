"""The branches and loop bodies of an ONNX graph that was just translated: torch makes functions of them at first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from htp_export.model.regions import subgraphs

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class BodyFunction:
    """One function that stands for a body.

    Attributes:
        nodes: Its nodes; those of functions that it calls are not among them.
        read: FX node → names of the initializers that the ONNX nodes made of it read.
    """

    nodes: tuple[ir.Node, ...]
    read: Mapping[Any, frozenset[str]]

    def parameters(self, node: ir.Node) -> frozenset[str]:
        """The initializers that a node reads, or another node that torch made of the same node of the FX graph."""
        return self.read.get(node.meta.get("node"), frozenset())


def bodies_of_node(node: ir.Node, functions: Mapping[Any, ir.Function]) -> Iterator[BodyFunction]:
    """The bodies of a node, and the bodies inside them.

    Args:
        node: A node of the main graph.
        functions: The model's functions.
    """
    yield from _bodies(node, functions, {})


def _bodies(
    node: ir.Node, functions: Mapping[Any, ir.Function], initializer_names: Mapping[Any, str]
) -> Iterator[BodyFunction]:
    for body in subgraphs(node):
        for call in every_node(body):
            function = functions.get(call.op_identifier())
            if function is None:
                continue
            formals = zip(function.inputs, call.inputs, strict=False)
            names = {formal: name for formal, value in formals if (name := _initializer(value, initializer_names))}
            nodes = tuple(every_node(function))
            read: dict[Any, frozenset[str]] = {}
            for inner in nodes:
                key = inner.meta.get("node")
                if key is not None and not any(True for _ in subgraphs(inner)):
                    initializers = frozenset(name for value in inner.inputs if (name := _initializer(value, names)))
                    read[key] = read.get(key, frozenset()) | initializers
            yield BodyFunction(nodes, read)
            for inner in function:
                yield from _bodies(inner, functions, names)


def _initializer(value: ir.Value | None, names: Mapping[Any, str]) -> str:
    """The name of the initializer that a value is, or stands for; empty where it is none."""
    if value is None:
        return ""
    return names.get(value) or (str(value.name) if value.is_initializer() else "")


def every_node(graph: Any) -> Iterator[ir.Node]:
    """Nodes of a graph or function, those of a node's bodies before the node: producers before consumers."""
    for node in graph:
        for body in subgraphs(node):
            yield from every_node(body)
        yield node
