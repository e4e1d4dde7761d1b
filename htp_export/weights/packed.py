"""Packed weights of any checkpoint: integers of few bits, with a scale and a zero point for each block of a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from htp_export.errors import FileError

Array = np.ndarray[Any, np.dtype[Any]]

_LARGEST_BLOCK = 256  # ONNX Runtime's kernels support powers of two from 16 to 256
_SMALLEST_BLOCK = 16


@dataclass(frozen=True)
class Packed:
    """A matrix of ``(outputs, inputs)``: ``(level - point) * scale``, computed in float32.

    Attributes:
        levels: Integers from 0 on, uint8 of ``(outputs, inputs)``.
        bits: Bits of a level in a file: 4 or 8.
        scales: float32 of ``(outputs, blocks)``.
        points: Zero points of ``(outputs, blocks)``: uint8, or float32; None for the middle of the
            levels.
        block: Number of inputs that share a scale; the last block may be shorter.
        order: For each column of ``levels``, the number of its input; None if they are in order.
    """

    levels: Array
    bits: int
    scales: Array
    points: Array | None
    block: int
    order: Array | None = None

    def weight(self) -> Array:
        """The matrix as float32, its columns in the order of the inputs."""
        middle = np.float32(1 << (self.bits - 1))
        points = middle if self.points is None else self._by_input(self.points.astype(np.float32))
        matrix = (self.levels.astype(np.float32) - points) * self._by_input(self.scales)
        return matrix if self.order is None else matrix[:, np.argsort(self.order)]

    def _by_input(self, by_block: Array) -> Array:
        """Repeat the numbers of blocks for each input."""
        return np.repeat(by_block, self.block, axis=1)[:, : self.levels.shape[1]]

    operator = "MatMulNBits"

    @property
    def attributes(self) -> dict[str, int]:
        """The attributes of the operator."""
        outputs, inputs = self.levels.shape
        return {"K": inputs, "N": outputs, "bits": self.bits, "block_size": self.block}

    def tensors(self) -> dict[str, Array]:
        """The inputs of the operator for the weight; ``order`` is the order of the features of its other input."""
        rows, columns = self.levels.shape
        blocks = self.scales.shape[1]
        padded = np.pad(self.levels, ((0, 0), (0, blocks * self.block - columns)))
        levels = bytes_of_integers(padded, self.bits).reshape(rows, blocks, -1)
        tensors = {"levels": levels, "scales": self.scales}
        # The operator's default for zero points is the middle of the levels.
        if self.points is not None and (self.points != 1 << (self.bits - 1)).any():
            if self.points.dtype == np.float32:
                tensors["zero_points"] = self.points
            else:
                tensors["zero_points"] = bytes_of_integers(self.points, self.bits)
        if self.order is not None:
            tensors["order"] = self.order.astype(np.int64)
        return tensors


@dataclass(frozen=True)
class Coded:
    """A matrix of ``(outputs, inputs)`` in codes of 4 bits: ``table[code] * scale``, computed in float32.

    Attributes:
        codes: Bytes of two codes each, the first in the high bits; row after row.
        scales: float32, one for each block of the flattened matrix.
        table: 16 numbers.
        block: Number of elements that share a scale.
        shape: Outputs and inputs.
        kind: ``quant_type`` of ``MatMulBnb4``: 0 for fp4, 1 for nf4.
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
        """The attributes of the operator."""
        return {
            "K": self.shape[1],
            "N": self.shape[0],
            "block_size": self.block,
            "quant_type": self.kind,
        }

    def tensors(self) -> dict[str, Array]:
        """The inputs of the operator for the weight."""
        return {"levels": self.codes, "scales": self.scales}

    def weight(self) -> Array:
        """The matrix as float32."""
        codes = np.stack([self.codes >> np.uint8(4), self.codes & np.uint8(15)], -1).reshape(-1)
        scales = np.repeat(self.scales, self.block)[: codes.size]
        return np.asarray(self.table[codes] * scales).reshape(self.shape)


@dataclass(frozen=True)
class Layer:
    """A packed weight of a checkpoint: its shape, ``(outputs, inputs)``, and a function that reads it."""

    shape: tuple[int, int]
    read: Callable[[], Packed | Coded]


class PackedCheckpoint(Mapping[str, Array]):
    """A quantized checkpoint; as a mapping, its ``state_dict``: name → array, dequantized to float32 on access.

    Attributes:
        path: The folder or file.
        kind: Its quantization method: ``gptq``, ``awq``, ...
        layers: Name of a parameter → its packed weight.
    """

    def __init__(
        self,
        path: Path,
        kind: str,
        layers: Mapping[str, Layer],
        others: Mapping[str, Callable[[], Array]],
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.path, self.kind, self.layers, self._others = path, kind, layers, others
        self._shapes = shapes or {}

    def __getitem__(self, name: str) -> Array:
        """The values of a parameter; a `KeyError` if the checkpoint has none of this name."""
        if name not in self._others:
            return self.packed(name).weight()
        array: Array = self._others[name]()
        return array if array.dtype.kind in "iub" else array.astype(np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter({**self.layers, **self._others})

    def __len__(self) -> int:
        return len({*self.layers, *self._others})

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """The shape of a floating-point parameter, from the header; None if it has to be read."""
        if name in self.layers:
            return self.layers[name].shape
        return self._shapes.get(name)

    def renamed(self, names: Mapping[str, str]) -> PackedCheckpoint:
        """A checkpoint with other names: new name → name in this checkpoint."""
        layers = {new: self.layers[name] for new, name in names.items() if name in self.layers}
        others = {new: self._others[name] for new, name in names.items() if name in self._others}
        shapes = {new: self._shapes[name] for new, name in names.items() if name in self._shapes}
        return PackedCheckpoint(self.path, self.kind, layers, others, shapes)

    def packed(self, name: str) -> Packed | Coded:
        """The packed weight of a parameter; a `FileError` if its tensors do not fit together."""
        try:
            return self.layers[name].read()
        except ValueError as error:
            raise FileError(self.path, f"module {module_of(name)!r}: {error}") from error


def module_of(name: str) -> str:
    """The module of a tensor; names of bitsandbytes are ``<module>.weight.absmax``, for example."""
    return name.rpartition(".weight.")[0] or name.rpartition(".")[0]


def integers_in(array: Array, bits: int) -> Array:
    """Unpack unsigned integers of 1, 2, 4 or 8 bits from the last axis, the low bits first.

    Examples:
        >>> integers_in(np.int32([[0x76543210]]), 4)
        array([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=uint8)
    """
    octets = np.ascontiguousarray(array).view(np.uint8)
    mask = np.uint8((1 << bits) - 1)
    integers = [octets >> np.uint8(shift) & mask for shift in range(0, 8, bits)]
    return np.stack(integers, -1).reshape(*octets.shape[:-1], -1)


def bytes_of_integers(array: Array, bits: int) -> Array:
    """Pack integers of 4 or 8 bits into bytes, the reverse of `integers_in`."""
    if bits == 8:
        return array
    even = np.pad(array, ((0, 0), (0, array.shape[1] % 2)))
    return np.asarray(even[:, ::2] | even[:, 1::2] << np.uint8(4))


def blocks_of_groups(group: int, inputs: int) -> tuple[int, Array]:
    """A block size of ONNX Runtime for groups of any multiple of 16 inputs, and the group of each block.

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
