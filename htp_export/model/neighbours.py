"""The nodes beside a tensor: its producer, and its only consumer."""

from __future__ import annotations

import onnx_ir as ir

from htp_export.shapes.operator_kinds import is_standard

__all__ = ["only_consumer", "producer_of"]


def producer_of(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The producer of a tensor; if operators are given, only a node of ONNX's own operators of these types.

    Examples:
        >>> relu = ir.node("Relu", [ir.val("x")])
        >>> producer_of(relu.outputs[0], "Relu") is relu, producer_of(relu.outputs[0], "Tanh"), producer_of(None)
        (True, None, None)
    """
    node = None if value is None else value.producer()
    return node if not op_types or is_standard(node, *op_types) else None


def only_consumer(value: ir.Value, *op_types: str) -> ir.Node | None:
    """The one node that reads a tensor, once; None if there are others, or if the tensor is an output of its graph.

    If operators are given, only a node of ONNX's own operators of these types.
    """
    uses = value.uses()
    if len(uses) != 1 or value.is_graph_output():
        return None
    node = next(iter(uses)).node
    return node if not op_types or is_standard(node, *op_types) else None
