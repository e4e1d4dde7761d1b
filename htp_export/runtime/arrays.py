"""Tensors of PyTorch and of ONNX Runtime as numpy arrays, and a store for many of them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from htp_export.extras import required
from htp_export.files.filesystem import temporary_folder

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]

PORTION_BYTES = 1 << 30
"""Default limit of the bytes of a model's tensors in memory at a time: a laptop has several times as much."""


def from_torch(tensor: torch.Tensor) -> Array:
    """Return the values of a tensor in the form of an exported file; the array may share its memory.

    For a quantized tensor, these are its integers; for a complex tensor, its real and imaginary
    parts in a last dimension (``torch.view_as_real``), because ONNX Runtime has no complex numbers.

    Examples:
        >>> import torch
        >>> from_torch(torch.ones(2, dtype=torch.bfloat16)).dtype
        dtype(bfloat16)
        >>> from_torch(torch.tensor([1 + 2j])).tolist()
        [[1.0, 2.0]]
    """
    import torch
    from onnx_ir.tensor_adapters import TorchTensor

    tensor = tensor.int_repr() if tensor.is_quantized else tensor
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return np.asarray(TorchTensor(tensor).numpy())


def to_ort(array: Array, onnx_type: ir.DataType | None = None) -> Any:
    """Return an ``OrtValue`` that shares the memory of a contiguous array.

    Only the returned object keeps this memory alive: a copy of the value in C++, as in a binding of
    inputs or in an ``AdapterFormat``, does not. ``onnx_type`` is required for types that numpy does
    not have. For strings see `htp_export.runtime.sessions.to_value`.
    """
    onnxruntime = required("onnxruntime")

    array = np.asarray(array, order="C")
    if array.dtype.isbuiltin == 1:
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)
    element_type = onnx_type or ir.DataType.from_numpy(array.dtype)
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, int(element_type))


def from_ort(value: Any) -> Array:
    """Copy the values of an ``OrtValue`` that is a tensor in main memory.

    ``OrtValue.numpy()`` returns a view of memory that the value may not own: the memory of an input
    array, or of an open adapter file.
    """
    name = _NARROW.get(value.data_type())
    if name is None:
        return np.array(value.numpy())
    import ml_dtypes

    # ONNX Runtime returns no arrays of types that numpy does not have
    dtype = np.dtype(getattr(ml_dtypes, name))
    shape = tuple(value.shape())
    stored = ctypes.string_at(value.data_ptr(), math.prod(shape) * dtype.itemsize)
    return np.frombuffer(stored, dtype=dtype).reshape(shape)


def arrays_in(values: Mapping[str, Any]) -> dict[str, Array]:
    """Return the arrays in the outputs of a model: each element of a sequence, and none for an empty optional.

    Examples:
        >>> arrays_in({"y": np.float32([1]), "parts": [np.float32([2]), np.float32([3])], "none": None}).keys()
        dict_keys(['y', 'parts[0]', 'parts[1]'])
    """
    arrays: dict[str, Array] = {}
    for name, value in values.items():
        if isinstance(value, list):
            arrays |= arrays_in({f"{name}[{index}]": item for index, item in enumerate(value)})
        elif value is not None:
            arrays[name] = np.asarray(value)
    return arrays


def nan_in(values: Mapping[str, Any]) -> list[str]:
    """Return the names of the arrays that contain NaN, as in `arrays_in`.

    Examples:
        >>> nan_in({"x": np.float32([1, np.nan]), "ids": np.int64([1])})
        ['x']
    """
    arrays = arrays_in(values)
    return [
        name
        for name, array in arrays.items()
        if array.dtype.kind in "fcV" and bool(np.isnan(array).any())
    ]


_NARROW = {
    f"tensor({name.replace('_', '')})": name
    for name in ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
}


@dataclass(frozen=True, eq=False)
class StoredArray:
    """An array in a store, in memory or in a memory-mapped file."""

    array: Array

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return int(self.array.nbytes)

    @property
    def in_file(self) -> Array:
        """The values in the form of an input of an exported file."""
        return self.array

    def compared_with(self, actual: Array) -> tuple[Array, Array]:
        """Return the values and the result of an exported file in the same form, for a comparison."""
        return self.array, actual


class ArrayStore:
    """A store of arrays: up to ``memory_bytes`` in memory, further ones in temporary files."""

    def __init__(self, memory_bytes: int, folder: Path) -> None:
        self._free_bytes, self._folder, self._files = memory_bytes, folder, 0

    @classmethod
    @contextmanager
    def opened(cls, memory_bytes: int) -> Iterator[ArrayStore]:
        """Open a store for the duration of a ``with`` block."""
        with temporary_folder() as folder:
            yield cls(memory_bytes, folder)

    def keep(self, array: Array) -> StoredArray:
        """Copy an array into the store; strings always stay in memory, because they are Python objects."""
        if array.nbytes <= self._free_bytes or not array.nbytes or array.dtype.hasobject:
            self._free_bytes -= array.nbytes
            return StoredArray(array.copy())
        self._files += 1
        path = self._folder / f"{self._files}.bin"
        with path.open("wb") as stream:
            if array.ndim:
                np.ascontiguousarray(array).view(np.uint8).tofile(stream)
            else:
                stream.write(array.tobytes())
        return StoredArray(np.memmap(path, dtype=array.dtype, mode="r", shape=array.shape))
