"""Many inputs of a node replaced at once."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

__all__ = ["replace_inputs"]

_FEW = 32


def replace_inputs(node: ir.Node, replaced: Mapping[ir.Value, ir.Value | None]) -> None:
    """Let a node read other values.

    ``Node.replace_input_with`` copies all inputs of the node for each one that it replaces. The call of a function has
    an input for each weight in it, thousands where a module holds a whole model; so the inputs of such a node are put
    in place together, by the members of onnx_ir's classes that ``replace_input_with`` itself uses.

    Args:
        node: The node.
        replaced: Value → what the node reads in its place, at each input that is this value.

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
