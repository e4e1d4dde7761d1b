"""Tensors across which no pattern may match."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import onnx_ir as ir

from htp_export.editing.editing import stand_in

__all__ = ["barriers", "take_barriers"]

_DOMAIN = "htp_export"
_OPERATOR = "Barrier"


@contextlib.contextmanager
def barriers(graph: ir.Graph, values: Iterable[ir.Value]) -> Iterator[None]:
    """Insert an opaque node after each tensor, so that no pattern matches across it, and remove it afterwards.

    It is removed after an error too. `take_barriers` removes it from another graph that a pass returns.
    """
    try:
        _put(graph, values)
        yield
    finally:
        take_barriers(graph)


def _put(graph: ir.Graph, values: Iterable[ir.Value]) -> None:
    for value in values:
        readers = list(value.uses())
        barrier = ir.node(_OPERATOR, [value], domain=_DOMAIN)
        behind = barrier.outputs[0]
        behind.shape, behind.type, behind.name = value.shape, value.type, f"{value.name}_behind"
        for node, place in readers:  # a result of the model stays one
            node.replace_input_with(place, behind)
        maker = value.producer()
        if maker is not None:
            graph.insert_after(maker, barrier)
        elif len(graph):
            graph.insert_before(graph[0], barrier)
        else:
            graph.append(barrier)
    graph.opset_imports[_DOMAIN] = 1


def take_barriers(graph: ir.Graph) -> None:
    """Remove every barrier from a graph."""
    for node in list(graph):
        if (node.domain, node.op_type) != (_DOMAIN, _OPERATOR):
            continue
        value = node.inputs[0]
        if value is None or not stand_in(node.outputs[0], value):  # it became a result of the model
            node.domain, node.op_type = "", "Identity"
        else:
            graph.remove(node, safe=True)
    graph.opset_imports.pop(_DOMAIN, None)
