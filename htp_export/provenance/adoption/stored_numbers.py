"""The numbers that the weights of a file stand for, whatever the format in which they are stored."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from htp_export.model.operators import is_standard
from htp_export.runtime.arrays import Array

__all__ = ["numbers_of", "stored_numbers"]

_SMALLEST = 4  # elements; smaller ones are constants of the graph


def numbers_of(tensor: ir.TensorProtocol | None) -> Array | None:
    """The numbers of a tensor as an array that numpy can compute with; None for what is no weight.

    Weights are floats, and integers of at most eight bits: longer ones are positions and sizes.
    """
    if tensor is None or tensor.size < _SMALLEST or not _is_weight(tensor.dtype):
        return None
    array = np.asarray(tensor.numpy())
    return array if array.dtype.isbuiltin == 1 else array.astype(np.float32)


def _is_weight(dtype: ir.DataType) -> bool:
    return dtype.is_floating_point() or (dtype.is_integer() and dtype.bitwidth <= 8)


def stored_numbers(graph: ir.Graph) -> Iterator[tuple[list[ir.Value], Array]]:
    """The weights of a graph: the tensors that stand for one, and its numbers.

    Weights that are quantized block by block are those of ONNX Runtime's ``MatMulNBits`` and ``GatherBlockQuantized``,
    and of ``DequantizeLinear``.
    """
    taken = set[ir.Value]()
    for node in graph:
        found = _dequantized(node)
        if found is not None:
            values, numbers = found
            taken.update(values)
            yield values, numbers
    for value in graph.initializers.values():
        if value not in taken:
            array = numbers_of(value.const_value)
            if array is not None:
                yield [value], array


def _dequantized(node: ir.Node) -> tuple[list[ir.Value], Array] | None:
    if node.domain == "com.microsoft" and node.op_type == "MatMulNBits":
        return _of_blocks(node, 1, 2, 3)
    if node.domain == "com.microsoft" and node.op_type == "GatherBlockQuantized":
        return _of_blocks(node, 0, 2, 3)
    if is_standard(node, "DequantizeLinear"):
        return _of_axis(node)
    return None


def _weight(node: ir.Node, place: int) -> ir.TensorProtocol | None:
    value = node.inputs[place] if place < len(node.inputs) else None
    return value.const_value if value is not None else None


def _number(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None or attribute.is_ref() else int(attribute.as_int())


def _of_blocks(node: ir.Node, data: int, scales: int, zeros: int) -> tuple[list[ir.Value], Array] | None:
    """Rows in blocks of some bits, low bits first; a zero point of half the range where none is given."""
    stored, factors, points = _weight(node, data), _weight(node, scales if data else 2), _weight(node, zeros)
    scaled = node.inputs[scales] if scales < len(node.inputs) else None
    bits, size = _number(node, "bits", 4), _number(node, "block_size", 0)
    if stored is None or factors is None or scaled is None or bits not in (2, 4, 8) or size < 1:
        return None
    rows = stored.shape.numpy()[0]
    packed = np.asarray(stored.numpy())
    levels = _unpacked(packed, bits, rows) if packed.dtype == np.uint8 else packed.astype(np.float32).reshape(rows, -1)
    per_block = np.asarray(factors.numpy()).astype(np.float32).reshape(rows, -1)
    columns = _number(node, "K", levels.shape[1])
    blocks = per_block.shape[1]
    if blocks * size < columns or levels.shape[1] < columns:
        return None
    middle: Array | float = float(1 << (bits - 1)) if packed.dtype == np.uint8 else 0.0
    if points is not None:
        given = np.asarray(points.numpy())
        unpacked = _unpacked(given, bits, rows)[:, :blocks] if given.dtype == np.uint8 else given.reshape(rows, -1)
        middle = np.repeat(unpacked.astype(np.float32), size, axis=1)[:, :columns]
    numbers = (levels[:, :columns] - middle) * np.repeat(per_block, size, axis=1)[:, :columns]
    value = node.inputs[data]
    return ([value] if value is not None else []), numbers


def _unpacked(packed: Array, bits: int, rows: int) -> Array:
    flat = packed.reshape(rows, -1)
    parts = [(flat >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(rows, -1).astype(np.float32)


def _of_axis(node: ir.Node) -> tuple[list[ir.Value], Array] | None:
    """A weight with scales for the whole, along one axis, or in blocks of it."""
    stored, factors, points = _weight(node, 0), _weight(node, 1), _weight(node, 2)
    value = node.inputs[0]
    if stored is None or factors is None or value is None or stored.size < _SMALLEST:
        return None
    levels = np.asarray(stored.numpy()).astype(np.float32)
    scale = np.asarray(factors.numpy()).astype(np.float32)
    zero = np.zeros_like(scale) if points is None else np.asarray(points.numpy()).astype(np.float32)
    axis, size = _number(node, "axis", 1), _number(node, "block_size", 0)
    axis += levels.ndim if axis < 0 else 0
    if scale.ndim == 1 and scale.size > 1:
        shape = [1] * levels.ndim
        shape[axis] = -1
        scale, zero = scale.reshape(shape), zero.reshape(shape)
    elif size:
        length = levels.shape[axis]
        scale = np.take(np.repeat(scale, size, axis=axis), range(length), axis=axis)
        zero = np.take(np.repeat(zero, size, axis=axis), range(length), axis=axis)
    return [value, *node.outputs], (levels - zero) * scale
