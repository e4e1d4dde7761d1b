"""The numbers that the weights of a file stand for, whatever the format in which they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from htp_export.runtime.arrays import Array
from htp_export.shapes.operator_kinds import is_standard

__all__ = ["StoredWeight", "stored_weights"]

_SMALLEST = 4  # elements; smaller ones are constants of the graph
_BLOCKS = {"MatMulNBits": (1, 2, 3), "GatherBlockQuantized": (0, 2, 3)}
"""Operators of ONNX Runtime that read weights in blocks of some bits: the places of levels, scales and zero points."""


@dataclass(frozen=True)
class StoredWeight:
    """A weight of a file.

    Attributes:
        values: The tensors that stand for it: an initializer and, if a node only dequantizes it, the output of that.
        load: Reads its numbers.
        plain: Whether they are the numbers of the initializer, which are floats.
    """

    values: Sequence[ir.Value]
    load: Callable[[], Array]
    plain: bool = False


def stored_weights(graph: ir.Graph) -> Iterator[StoredWeight]:
    """The weights of a graph: floats, integers of at most eight bits, and what is quantized block by block.

    Longer integers are positions and sizes.
    """
    taken = set[ir.Value]()
    for node in graph:
        found = _quantized(node)
        if found is not None:
            taken.add(found.values[0])
            yield found
    for value in graph.initializers.values():
        tensor = value.const_value
        if value not in taken and tensor is not None and tensor.size >= _SMALLEST and _is_weight(tensor.dtype):
            yield StoredWeight([value], _Reader(value), tensor.dtype.is_floating_point())


def _is_weight(dtype: ir.DataType) -> bool:
    return dtype.is_floating_point() or (dtype.is_integer() and dtype.bitwidth <= 8)


@dataclass(frozen=True)
class _Reader:
    value: ir.Value

    def __call__(self) -> Array:
        tensor = self.value.const_value
        assert tensor is not None
        array = np.asarray(tensor.numpy())
        return array if array.dtype.kind in "fiu" else array.astype(np.float32)  # types that numpy does not have


def _quantized(node: ir.Node) -> StoredWeight | None:
    """The weight that a node dequantizes."""
    places = _BLOCKS.get(node.op_type) if node.domain == "com.microsoft" else None
    if places is None and not is_standard(node, "DequantizeLinear"):
        return None
    inputs = [node.inputs[k] if k < len(node.inputs) else None for k in places or (0, 1, 2)]
    levels, scales, zeros = (None if value is None else value.const_value for value in inputs)
    if inputs[0] is None or levels is None or scales is None or levels.size < _SMALLEST:
        return None
    if places is None:
        return StoredWeight([inputs[0], *node.outputs], lambda: _of_axis(node, levels, scales, zeros))
    rows, bits, size = levels.shape.numpy()[0], _number(node, "bits", 4), _number(node, "block_size", 0)
    if bits not in (2, 4, 8) or size < 1 or scales.size * size < rows * _number(node, "K", 0):
        return None
    return StoredWeight([inputs[0]], lambda: _of_blocks(node, levels, scales, zeros))


def _number(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None or attribute.is_ref() else int(attribute.as_int())


def _of_blocks(
    node: ir.Node, levels: ir.TensorProtocol, scales: ir.TensorProtocol, zeros: ir.TensorProtocol | None
) -> Array:
    """Rows in blocks of some bits; without zero points, packed levels are around half of their range."""
    rows, bits, size = levels.shape.numpy()[0], _number(node, "bits", 4), _number(node, "block_size", 0)
    numbers = _unpacked(levels, bits, rows)
    factors = scales.numpy().astype(np.float32).reshape(rows, -1)
    middle = np.full_like(factors, 1 << (bits - 1) if levels.dtype == ir.DataType.UINT8 else 0)
    if zeros is not None:
        middle = _unpacked(zeros, bits, rows)[:, : factors.shape[1]]
    columns = _number(node, "K", numbers.shape[1])  # the last block may be filled up
    middle, factors = (np.repeat(each, size, axis=1)[:, :columns] for each in (middle, factors))
    return np.asarray((numbers[:, :columns] - middle) * factors)


def _unpacked(tensor: ir.TensorProtocol, bits: int, rows: int) -> Array:
    """Rows of numbers, of which bytes hold several, the lowest bits first."""
    packed = tensor.numpy().reshape(rows, -1)
    if packed.dtype != np.uint8:
        return packed.astype(np.float32)
    parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(rows, -1).astype(np.float32)


def _of_axis(
    node: ir.Node, levels: ir.TensorProtocol, scales: ir.TensorProtocol, zeros: ir.TensorProtocol | None
) -> Array:
    """A weight with scales for the whole, along one axis, or in blocks of it."""
    numbers, scale = (each.numpy().astype(np.float32) for each in (levels, scales))
    zero = np.zeros_like(scale) if zeros is None else zeros.numpy().astype(np.float32)
    axis, size = _number(node, "axis", 1), _number(node, "block_size", 0)
    axis += numbers.ndim if axis < 0 else 0
    if scale.ndim == 1 and scale.size > 1:
        shape = [1] * numbers.ndim
        shape[axis] = -1
        scale, zero = scale.reshape(shape), zero.reshape(shape)
    elif size:
        whole = range(numbers.shape[axis])
        scale, zero = (np.take(np.repeat(each, size, axis=axis), whole, axis=axis) for each in (scale, zero))
    return np.asarray((numbers - zero) * scale)
