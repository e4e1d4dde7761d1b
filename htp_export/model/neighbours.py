"""The nodes beside a tensor: its producer, and its only consumer; and what a node reads, replaced."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from htp_export.shapes.operator_kinds import is_standard

_FEW = 32
"""Up to so many inputs are replaced one by one, each in time by the number of the node's inputs."""


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


def replace_inputs(node: ir.Node, replaced: Mapping[ir.Value, ir.Value | None]) -> None:
    """Let a node read other values, each at all inputs that are this value.

    ``Node.replace_input_with`` copies all inputs of the node each time, and the call of a function may have thousands:
    these are put in place together, by the members of onnx_ir's classes that ``replace_input_with`` itself uses.

    Examples:
        >>> x, y = ir.val("x"), ir.val("y")
        >>> node = ir.node("Add", [x, x])
        >>> replace_inputs(node, {x: y})
        >>> node.inputs == (y, y), list(x.uses()), len(list(y.uses()))
        (True, [], 2)
    """
    places = [place for place, value in enumerate(node.inputs) if value is not None and value in replaced]
    if len(places) <= _FEW:
        for place in places:
            node.replace_input_with(place, replaced[node.inputs[place]])  # type: ignore[index]
        return
    inputs = list(node.inputs)
    for place in places:
        before = inputs[place]
        inputs[place] = after = replaced[before]  # type: ignore[index]
        before._remove_usage(node, place)  # type: ignore[union-attr]
        if after is not None:
            after._add_usage(node, place)
    node._inputs = tuple(inputs)
