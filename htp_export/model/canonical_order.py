"""An order of nodes that depends on the graph alone: not on names, and not on the order in the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import onnx_ir as ir

from htp_export.shapes.operator_kinds import subgraphs

__all__ = ["bodies_of", "canonical_order"]


def canonical_order(graph: ir.Graph, key: Callable[[ir.Node], Any]) -> list[ir.Node]:
    """The nodes of a graph, each after those that it reads; those inside subgraphs are left out.

    From the outputs of the graph, one after the other, every node is reached through its inputs, one after the other,
    and follows the last of its producers. Outputs and inputs have an order that is part of what the graph computes. So
    the result is the same whatever nodes and tensors are called, and wherever independent nodes are in the file.

    Args:
        graph: The graph.
        key: Orders nodes whose results nothing needs; they come last. Those with equal keys stay as they are.

    Examples:
        >>> x = ir.val("x")
        >>> left, right = ir.node("Relu", [x]), ir.node("Tanh", [x])
        >>> add = ir.node("Add", [right.outputs[0], left.outputs[0]])
        >>> graph = ir.Graph([x], add.outputs, nodes=[left, right, add], opset_imports={"": 20})
        >>> [node.op_type for node in canonical_order(graph, lambda node: node.op_type)]
        ['Tanh', 'Relu', 'Add']
    """
    order: dict[ir.Node, None] = {}
    for value in graph.outputs:
        _reach(value.producer(), graph, order)
    unneeded = [node for node in graph if node not in order]
    for node in sorted((node for node in unneeded if not any(value.uses() for value in node.outputs)), key=key):
        _reach(node, graph, order)
    for node in unneeded:  # on a cycle, in a graph that is not valid
        _reach(node, graph, order)
    return list(order)


def bodies_of(node: ir.Node) -> Iterator[tuple[str, ir.Graph]]:
    """The subgraphs of a node, each with the name of its attribute, by these names."""
    for name in sorted(node.attributes):
        attribute = node.attributes[name]
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            yield name, attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from ((f"{name}.{place}", body) for place, body in enumerate(attribute.as_graphs()))


def _reach(start: ir.Node | None, graph: ir.Graph, order: dict[ir.Node, None]) -> None:
    """Add a node, after everything that it needs and that is not there yet."""
    if start is None or start.graph is not graph or start in order:
        return
    entered, waiting = {start}, [(start, iter(_producers(start, graph)))]
    while waiting:
        node, producers = waiting[-1]
        for producer in producers:
            if producer not in order and producer not in entered:
                entered.add(producer)
                waiting.append((producer, iter(_producers(producer, graph))))
                break
        else:
            order[node] = None
            waiting.pop()


def _producers(node: ir.Node, graph: ir.Graph) -> Sequence[ir.Node]:
    """The nodes of a graph that one of its nodes reads, those that its subgraphs read last."""
    read: Iterable[ir.Value | None] = node.inputs
    if subgraphs(node):
        read = (*node.inputs, *(value for _, body in bodies_of(node) for value in _read_in(body)))
    makers = (value.producer() for value in read if value is not None)
    return [maker for maker in makers if maker is not None and maker.graph is graph]


def _read_in(body: ir.Graph) -> Iterator[ir.Value]:
    """What a subgraph reads, in its canonical order: also what is its own, or lies several graphs above."""
    for node in canonical_order(body, lambda node: node.op_type):
        yield from (value for value in node.inputs if value is not None)
        for _, inner in bodies_of(node):
            yield from _read_in(inner)
    yield from body.outputs
