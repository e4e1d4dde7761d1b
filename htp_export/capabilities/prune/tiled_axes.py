"""Axes of which several indices have one channel: of groups of a convolution, of gates, of a block of pixels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import onnx_ir as ir

from htp_export.capabilities.prune.coupled_axes import Axis
from htp_export.shapes.operator_kinds import operator_of
from htp_export.shapes.symbolic import Symbolic

Tiles: TypeAlias = Mapping[Axis, tuple[int, int]]
"""Axes of which some indices have one channel: axis → how often the channels repeat, and neighbours with one channel.

An axis with (2, 3) and two channels is ``aaabbbaaabbb``: the shape [2, channels, 3], flattened.
"""

RECURRENT = {"LSTM": 4, "GRU": 3, "RNN": 1}
"""Recurrent operator → the gates of a hidden unit, which have rows of the weights."""


def tiles_of(node: ir.Node, shapes: Symbolic) -> Iterator[Tiles]:
    """Axes of a node of which some indices have one channel, such as one of each group of a convolution.

    Examples:
        >>> x, y = ir.val("x", ir.DataType.FLOAT, [1, 8, 2, 2]), ir.val("y", ir.DataType.FLOAT, [1, 2, 4, 4])
        >>> node = ir.node("DepthToSpace", [x], {"blocksize": 2}, outputs=[y])
        >>> shapes = Symbolic(ir.Graph([x], [y], nodes=[node], opset_imports={"": 20}))
        >>> [{(value.name, axis): tile for (value, axis), tile in tiles.items()} for tiles in tiles_of(node, shapes)]
        [{('x', 1): (4, 1), ('y', 1): (1, 1)}]
    """
    rule = _TILED.get(operator_of(node))
    if rule is not None:
        yield from rule(node, shapes)


def is_cut_by_groups(node: ir.Node, shapes: Symbolic) -> bool:
    """Whether whole groups of a convolution are cut out, as each has one channel on a side; else some of each."""
    return 1 in _sizes_of_group(node, shapes)


def _sizes_of_group(node: ir.Node, shapes: Symbolic) -> tuple[int, int]:
    """The channels that a group of a convolution reads, and those that it computes; 0 for an unknown number."""
    group = node.attributes.get_int("group", 1)
    found = [shapes.shape(value) for value in (node.inputs[0], node.outputs[0])]
    sizes = [shape[1] if shape else 0 for shape in found]
    read, computed = (size // group if isinstance(size, int) else 0 for size in sizes)
    return read, computed


def _grouped_convolution(node: ir.Node, shapes: Symbolic) -> Iterator[Tiles]:
    group = node.attributes.get_int("group", 1)
    read, computed = _sizes_of_group(node, shapes)
    if group == 1 or not read or not computed:
        return
    (x, weight), y = node.inputs[:2], node.outputs[0]
    assert x is not None
    assert weight is not None
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    results: list[Axis] = [(y, 1)] if bias is None else [(y, 1), (bias, 0)]
    turned = node.op_type == "ConvTranspose"
    if is_cut_by_groups(node, shapes):
        yield {(x, 1): (1, read), (weight, 0): (1, read if turned else computed)} | dict.fromkeys(
            results, (1, computed)
        )
    elif turned:
        yield {(x, 1): (group, 1), (weight, 0): (group, 1)}
        yield {(weight, 1): (1, 1)} | dict.fromkeys(results, (group, 1))
    else:
        yield {(x, 1): (group, 1), (weight, 1): (1, 1)}
        yield {(weight, 0): (group, 1)} | dict.fromkeys(results, (group, 1))


def _recurrent(node: ir.Node, shapes: Symbolic) -> Iterator[Tiles]:
    """What is read, and the hidden states; weights have rows of all gates, biases those of both products."""
    gates = RECURRENT[node.op_type]
    values = [*node.inputs, *[None] * (8 - len(node.inputs))]
    x, w, r, b, _, h, c, peepholes = values
    hidden = [(w, 1, gates), (r, 1, gates), (r, 2, 1), (b, 1, 2 * gates), (h, 2, 1), (c, 2, 1), (peepholes, 1, 3)]
    hidden += [(value, 3 if place == 0 else 2, 1) for place, value in enumerate(node.outputs)]
    if node.attributes.get_int("layout", 0) == 0:  # ONNX Runtime has no other
        yield {(value, axis): (1, 1) for value, axis in ((x, 2), (w, 2)) if value is not None}
        yield {(value, axis): (times, 1) for value, axis, times in hidden if value is not None}


def _depth_to_space(node: ir.Node, shapes: Symbolic) -> Iterator[Tiles]:
    (x,), y = node.inputs, node.outputs[0]
    assert x is not None
    times = node.attributes.get_int("blocksize", 1) ** 2
    if node.op_type == "SpaceToDepth":
        yield {(x, 1): (1, 1), (y, 1): (times, 1)}
    else:
        yield {(x, 1): (1, times) if node.attributes.get_string("mode", "DCR") == "CRD" else (times, 1), (y, 1): (1, 1)}


_TILED: Mapping[str, Callable[[ir.Node, Symbolic], Iterator[Tiles]]] = {
    **dict.fromkeys(("Conv", "ConvTranspose", "com.microsoft::FusedConv"), _grouped_convolution),
    **dict.fromkeys(RECURRENT, _recurrent),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), _depth_to_space),
}
