"""Weights of convolutions and tables in 8 bits, for which ONNX Runtime has operators and no quantizer.

A convolution reads what a ``DequantizeLinear`` makes of its weight, with a scale for each channel. The rows of a table
are looked up by ``GatherBlockQuantized``, with a scale and zero point for each block of a row. Nothing is computed
before it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from htp_export.weights.products import weight_axes

_Array = npt.NDArray[Any]

CONVOLUTIONS = frozenset(("Conv", "ConvTranspose"))
"""Operators whose weights have channels."""

_LARGEST, _MIDDLE = 127, 128


def store_in_eight_bits(graph: ir.Graph, block_size: int, *, symmetric: bool) -> None:
    """Store the weights of the convolutions and tables of a graph in 8 bits, in place; all are initializers.

    ``block_size`` elements of a row of a table share a scale; ``symmetric`` blocks have no zero points.
    """
    made: dict[tuple[ir.Value, int], list[ir.Value]] = {}
    for node in list(graph):
        place = 1 if node.op_type in CONVOLUTIONS else 0
        weight, axes = node.inputs[place], weight_axes(node, place)
        assert weight is not None
        assert axes is not None
        tensor = weight.const_value
        assert tensor is not None
        channels = axes[1] if place else -1
        if (weight, channels) not in made:
            made[weight, channels] = (
                _by_channel(graph, weight, tensor, channels)
                if place
                else _by_block(graph, weight, tensor, block_size, symmetric)
            )
        stored = made[weight, channels]
        if place:
            node.replace_input_with(1, stored[0])
        else:
            _look_up(graph, node, stored, block_size)
        if not weight.uses():
            graph.initializers.pop(str(weight.name), None)


def _by_channel(graph: ir.Graph, weight: ir.Value, tensor: ir.TensorProtocol, channels: int) -> list[ir.Value]:
    """What a ``DequantizeLinear`` makes of a weight; one scale for each channel."""
    shape = tuple(int(size) for size in tensor.shape.numpy())
    others = tuple(axis for axis in range(len(shape)) if axis != channels)

    def scales() -> _Array:
        largest: _Array = np.abs(tensor.numpy()).max(axis=others)
        return np.where(largest == 0, 1, largest / _LARGEST).astype(np.float32)

    def levels() -> _Array:
        rounded: _Array = np.round(tensor.numpy() / np.expand_dims(scales(), others))
        return np.clip(rounded, -_LARGEST, _LARGEST).astype(np.int8)

    stored = [
        _lazy(graph, f"{weight.name}_Q8", levels, ir.DataType.INT8, shape),
        _lazy(graph, f"{weight.name}_scales", scales, ir.DataType.FLOAT, (shape[channels],)),
    ]
    node = ir.node("DequantizeLinear", stored, {"axis": channels}, name=f"{weight.name}_dequantize")
    node.outputs[0].name = f"{weight.name}_dequantized"
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)
    graph.insert_before(graph[0], node)
    return [node.outputs[0]]


def _by_block(
    graph: ir.Graph, weight: ir.Value, tensor: ir.TensorProtocol, size: int, symmetric: bool
) -> list[ir.Value]:
    """The levels, scales and zero points of the rows of a table."""
    rows, columns = (int(length) for length in tensor.shape.numpy())
    starts = np.arange(0, columns, size)

    def bounds() -> tuple[_Array, _Array]:
        array = tensor.numpy()
        least, most = (each.reduceat(array, starts, axis=1) for each in (np.minimum, np.maximum))
        if symmetric:
            most = np.maximum(np.abs(least), np.abs(most)) * (2 * _MIDDLE - 1) / _LARGEST / 2
            return -most, most
        return np.minimum(least, 0), np.maximum(most, 0)

    def scales() -> _Array:
        least, most = bounds()
        width = (most - least) / (2 * _MIDDLE - 1)
        return np.where(width == 0, 1, width).astype(np.float32)

    def points() -> _Array:
        return np.full((rows, len(starts)), _MIDDLE, np.uint8) if symmetric else _rounded(-bounds()[0] / scales())

    def levels() -> _Array:
        spread, shift = (np.repeat(each, size, axis=1)[:, :columns] for each in (scales(), points()))
        return _rounded(tensor.numpy() / spread + shift)

    blocks = (rows, len(starts))
    stored = [
        _lazy(graph, f"{weight.name}_Q8", levels, ir.DataType.UINT8, (rows, columns)),
        _lazy(graph, f"{weight.name}_scales", scales, ir.DataType.FLOAT, blocks),
    ]
    if not symmetric:  # the middle without
        stored.append(_lazy(graph, f"{weight.name}_zero_points", points, ir.DataType.UINT8, blocks))
    return stored


def _rounded(levels: _Array) -> _Array:
    return np.clip(np.round(levels), 0, 2 * _MIDDLE - 1).astype(np.uint8)


def _look_up(graph: ir.Graph, node: ir.Node, stored: list[ir.Value], block_size: int) -> None:
    """Replace a ``Gather`` by one of blocks."""
    data, *others = stored
    attributes = {"bits": 8, "block_size": block_size, "gather_axis": 0, "quantize_axis": 1}
    new = ir.node("GatherBlockQuantized", [data, node.inputs[1], *others], attributes, domain="com.microsoft")
    new.name, new.outputs[0].name = node.name, node.outputs[0].name
    ir.convenience.replace_nodes_and_values(graph, node, [node], [new], [node.outputs[0]], [new.outputs[0]])
    graph.opset_imports.setdefault("com.microsoft", 1)


def _lazy(
    graph: ir.Graph, name: str, make: Callable[[], _Array], dtype: ir.DataType, shape: tuple[int, ...]
) -> ir.Value:
    """An initializer that is computed when it is read."""
    tensor = ir.LazyTensor(lambda: ir.Tensor(make(), dtype=dtype), dtype, ir.Shape(shape), name=name)
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape), const_value=tensor)
    graph.register_initializer(value)
    return value
