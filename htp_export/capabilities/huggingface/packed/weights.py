"""Weights of few bits, as any checkpoint has them: integers, and a scale and a zero point for each block of a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from htp_export.errors import FileError

Array = np.ndarray[Any, np.dtype[Any]]

_LARGEST_BLOCK = 256  # ONNX Runtime's kernels take powers of two up to it
_SMALLEST_BLOCK = 16  # and from it


@dataclass(frozen=True)
class Packed:
    """A matrix of ``(outputs, inputs)``: ``(level - point) * scale``, computed in float32.

    Attributes:
        levels: Integers from 0 on, uint8 of ``(outputs, inputs)``.
        bits: Of a level as it is written: 4 or 8.
        scales: float32 of ``(outputs, blocks)``.
        points: Zero points of ``(outputs, blocks)``: uint8, or float32; None for the middle of the
            levels.
        block: How many inputs share a scale; the last block may have fewer.
        order: For each column of ``levels`` the input that it multiplies with; None where they are
            in order.
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
        rows, columns = self.levels.shape
        blocks = self.scales.shape[1]
        padded = np.pad(self.levels, ((0, 0), (0, blocks * self.block - columns)))
        levels = bytes_of_integers(padded, self.bits).reshape(rows, blocks, -1)
        tensors = {"levels": levels, "scales": self.scales}
        if self.points is not None and (self.points != 1 << (self.bits - 1)).any():
            is_float = self.points.dtype == np.float32
            tensors["zero_points"] = (
                self.points if is_float else bytes_of_integers(self.points, self.bits)
            )
        if self.order is not None:
            tensors["order"] = self.order.astype(np.int64)
        return tensors


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
        return {
            "K": self.shape[1],
            "N": self.shape[0],
            "block_size": self.block,
            "quant_type": self.kind,
        }

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


class PackedCheckpoint(Mapping[str, Array]):
    """A quantized checkpoint; as a mapping, its ``state_dict``: name → array, dequantized to float32 when it is read.

    Attributes:
        path: The folder or file.
        kind: What made it: ``gptq``, ``awq``, ...
        layers: Name of a parameter → its packed weight.
    """

    def __init__(
        self, path: Path, kind: str, layers: Mapping[str, Layer], others: Mapping[str, Any]
    ) -> None:
        self.path, self.kind, self.layers, self._others = path, kind, layers, others

    def __getitem__(self, name: str) -> Array:
        """A parameter; a `KeyError` if the checkpoint has none of this name."""
        if name not in self._others:
            return self.packed(name).weight()
        array: Array = self._others[name]()
        return array if array.dtype.kind in "iub" else array.astype(np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter({**self.layers, **self._others})

    def __len__(self) -> int:
        return len({*self.layers, *self._others})

    def also(self, names: Mapping[str, str]) -> PackedCheckpoint:
        """The same with more names: name → the one that the checkpoint has."""
        layers = {name: self.layers[known] for name, known in names.items() if known in self.layers}
        others = {
            name: self._others[known] for name, known in names.items() if known in self._others
        }
        return PackedCheckpoint(
            self.path, self.kind, {**self.layers, **layers}, {**self._others, **others}
        )

    def packed(self, name: str) -> Packed | Coded:
        """The packed weight of a parameter; a `FileError` if its tensors do not fit together."""
        try:
            return self.layers[name].read()
        except ValueError as error:
            raise FileError(self.path, f"module {module_of(name)!r}: {error}") from error


def module_of(name: str) -> str:
    """The module of a tensor; bitsandbytes has ``<module>.weight.absmax``."""
    return name.rpartition(".weight.")[0] or name.rpartition(".")[0]


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
