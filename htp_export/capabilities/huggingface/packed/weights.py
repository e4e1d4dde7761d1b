"""A weight of few bits, as any checkpoint has it: integers, and a scale and a zero point for each block of a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Array", "Coded", "Layer", "Packed", "blocks_of_groups", "bytes_of_integers", "integers_in"]

Array = np.ndarray[Any, np.dtype[Any]]

_LARGEST_BLOCK = 256
_SMALLEST_BLOCK = 16


@dataclass(frozen=True)
class Packed:
    """A matrix of ``(outputs, inputs)``: ``(level - point) * scale``, computed in float32.

    Attributes:
        levels: Integers from 0 on, uint8 of ``(outputs, inputs)``.
        bits: Of a level as it is written: 4 or 8.
        scales: float32 of ``(outputs, blocks)``.
        points: Zero points of ``(outputs, blocks)``: uint8, or float32; None for the middle of the levels.
        block: How many inputs share a scale; the last block may have fewer.
        order: For each column of ``levels`` the input that it multiplies with; None where they are in order.
    """

    levels: Array
    bits: int
    scales: Array
    points: Array | None
    block: int
    order: Array | None = None

    @property
    def has_middle_points(self) -> bool:
        """Whether all zero points are the middle of the levels."""
        return self.points is None or bool((self.points == 1 << (self.bits - 1)).all())

    def weight(self) -> Array:
        """The matrix as float32, its columns in the order of the inputs.

        Examples:
            >>> Packed(np.uint8([[9, 6]]), 4, np.float32([[0.5]]), None, 16, np.array([1, 0])).weight()
            array([[-1. ,  0.5]], dtype=float32)
        """
        middle = np.float32(1 << (self.bits - 1))
        points = middle if self.points is None else self._by_input(self.points.astype(np.float32))
        made = (self.levels.astype(np.float32) - points) * self._by_input(self.scales)
        return made if self.order is None else made[:, np.argsort(self.order)]

    def _by_input(self, by_block: Array) -> Array:
        return np.repeat(by_block, self.block, axis=1)[:, : self.levels.shape[1]]

    operator = "MatMulNBits"

    @property
    def attributes(self) -> dict[str, int]:
        """Those of the operator."""
        outputs, inputs = self.levels.shape
        return {"K": inputs, "N": outputs, "bits": self.bits, "block_size": self.block}

    def tensors(self) -> dict[str, Array]:
        """What the operator reads beside its input; ``order``: in which order it reads this input."""
        tensors = {"levels": self.written_levels(), "scales": self.scales}
        if (points := self.written_points()) is not None:
            tensors["zero_points"] = points
        return tensors if self.order is None else {**tensors, "order": self.order.astype(np.int64)}

    def written_levels(self) -> Array:
        """The levels as ``MatMulNBits`` reads them: uint8 of ``(outputs, blocks, bytes)``."""
        rows, columns = self.levels.shape
        count = -(-columns // self.block)
        padded = np.pad(self.levels, ((0, 0), (0, count * self.block - columns)))
        return bytes_of_integers(padded, self.bits).reshape(rows, count, -1)

    def written_points(self) -> Array | None:
        """The zero points as ``MatMulNBits`` reads them; None where it needs none."""
        if self.points is None or self.has_middle_points:
            return None
        return self.points if self.points.dtype == np.float32 else bytes_of_integers(self.points, self.bits)


@dataclass(frozen=True)
class Coded:
    """A matrix of ``(outputs, inputs)`` in codes of 4 bits: ``table[code] * scale``, computed in float32.

    Attributes:
        codes: Bytes of two codes each, the first in the high bits; row after row.
        scales: float32, one for each block of the rows one after the other.
        table: 16 numbers.
        block: Elements that share a scale.
        shape: Outputs and inputs.
        kind: That of ``MatMulBnb4``: 0 for fp4, 1 for nf4.
    """

    codes: Array
    scales: Array
    table: Array
    block: int
    shape: tuple[int, int]
    kind: int

    operator = "MatMulBnb4"
    points = None
    order = None

    @property
    def attributes(self) -> dict[str, int]:
        """Those of the operator."""
        return {"K": self.shape[1], "N": self.shape[0], "block_size": self.block, "quant_type": self.kind}

    def tensors(self) -> dict[str, Array]:
        """What the operator reads beside its input."""
        return {"levels": self.codes, "scales": self.scales}

    def weight(self) -> Array:
        """The matrix as float32."""
        codes = np.stack([self.codes >> np.uint8(4), self.codes & np.uint8(15)], -1).reshape(-1)
        scales = np.repeat(self.scales, self.block)[: codes.size]
        return np.asarray(self.table[codes] * scales).reshape(self.shape)


@dataclass(frozen=True)
class Layer:
    """A weight that is packed in a checkpoint: ``(outputs, inputs)``, and how to read it."""

    shape: tuple[int, int]
    read: Callable[[], Packed | Coded]


def integers_in(array: Array, bits: int) -> Array:
    """The unsigned integers that the last axis holds, the low bits first; of 1, 2, 4 or 8 bits.

    Examples:
        >>> integers_in(np.int32([[0x76543210]]), 4)
        array([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=uint8)
    """
    held = np.ascontiguousarray(array).view(np.uint8)
    each = [held >> np.uint8(shift) & np.uint8((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(each, -1).reshape(*held.shape[:-1], -1)


def bytes_of_integers(array: Array, bits: int) -> Array:
    """Integers of 4 or 8 bits in bytes, the reverse of `integers_in`."""
    if bits == 8:
        return array
    even = np.pad(array, ((0, 0), (0, array.shape[1] % 2)))
    return np.asarray(even[:, ::2] | even[:, 1::2] << np.uint8(4))


def blocks_of_groups(group: int, inputs: int) -> tuple[int, Array]:
    """The size of blocks that ONNX Runtime takes, for groups of any multiple of 16 inputs; and the group of each block.

    Raises:
        ValueError: No block of 16 inputs or more fits into the groups.

    Examples:
        >>> blocks_of_groups(48, 96)
        (16, array([0, 0, 0, 1, 1, 1]))
    """
    if group >= inputs:
        block = min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, inputs & -inputs))
        return block, np.zeros(-(-inputs // block), np.int64)
    block = min(_LARGEST_BLOCK, group & -group)
    if block < _SMALLEST_BLOCK:
        raise ValueError(f"groups of {group} inputs are no multiple of {_SMALLEST_BLOCK}")
    return block, np.arange(-(-inputs // block)) * block // group
