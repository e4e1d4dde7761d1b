"""Large weights are written part by part, and pages that are mapped from a file are released behind each part.

Parameters that were loaded from safetensors files, or by ``torch.load(mmap=True)``, are mapped. Written as torch writes
them, all of them would be resident at the end. The optimizer transposes weights without copying them; numpy would write
these one element at a time.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import onnx_ir as ir
import torch

from htp_export.process.mapped_memory import MappedFiles, release_pages

__all__ = ["written_in_parts"]

_LARGE_BYTES = 1 << 20
_PART_BYTES = 1 << 24
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Size of an element → a type of this size that numpy has, too."""


@contextlib.contextmanager
def written_in_parts(model: ir.Model) -> Iterator[None]:
    """Replace the large weights of a model, for the duration of a ``with`` block, by tensors that are so written."""
    kept: list[tuple[ir.Value, Any]] = []
    mapped = MappedFiles.now()
    try:
        for value in model.graph.initializers.values():
            values = _values(value.const_value)
            if values is not None:
                memory = _memory(values)
                kept.append((value, value.const_value))
                value.const_value = _InParts(
                    value.const_value, values, memory if mapped.path_of(*memory) is not None else (0, 0)
                )
        yield
    finally:
        for value, tensor in kept:
            value.const_value = tensor


def _values(tensor: Any) -> np.ndarray[Any, Any] | None:
    """The values of a large tensor, with the bytes of each as they are to be written; None if they are not at hand."""
    raw: Any = getattr(tensor, "raw", None)
    if type(raw) in (torch.Tensor, torch.nn.Parameter):
        weight: torch.Tensor = raw.detach()
        plain = weight.layout is torch.strided and weight.device.type == "cpu" and weight.dtype.itemsize in _WHOLE
        if not plain or weight.is_neg() or weight.is_quantized:
            return None
        raw = weight.view(_WHOLE[weight.dtype.itemsize]).numpy()
    if not isinstance(raw, np.ndarray) or sys.byteorder != "little" or not raw.dtype.isnative:
        return None
    return raw if raw.ndim > 0 and raw.nbytes == tensor.nbytes >= _LARGE_BYTES else None


def _memory(values: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Address and length of the memory in which the values lie."""
    steps = [(size - 1) * stride for size, stride in zip(values.shape, values.strides, strict=True)]
    before, behind = sum(step for step in steps if step < 0), sum(step for step in steps if step > 0)
    return values.ctypes.data + before, behind - before + values.itemsize


class _InParts(ir.Tensor):  # type: ignore[type-arg]
    """A tensor that is written part by part.

    Args:
        tensor: The tensor of torch's exporter.
        values: Its values.
        mapped: Address and length of its memory, where that is mapped from a file.
    """

    __slots__ = ("_mapped", "_tensor", "_values")

    def __init__(self, tensor: Any, values: np.ndarray[Any, Any], mapped: tuple[int, int]) -> None:
        about = {"doc_string": tensor.doc_string, "metadata_props": dict(tensor.metadata_props)}
        super().__init__(tensor.raw, dtype=tensor.dtype, shape=tensor.shape, name=tensor.name, **about)
        self._tensor, self._values, self._mapped = tensor, values, mapped

    def numpy(self) -> Any:
        return self._tensor.numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self._tensor.__array__(dtype, copy)

    def tobytes(self) -> bytes:
        return self._tensor.tobytes()  # type: ignore[no-any-return]

    def tofile(self, file: IO[bytes]) -> None:
        values = self._values
        in_order = values.flags.c_contiguous
        rows = values.reshape(-1) if in_order else values
        step = max(1, _PART_BYTES * len(rows) // values.nbytes)
        for start in range(0, len(rows), step):
            part = np.ascontiguousarray(rows[start : start + step])
            file.write(part.view(np.uint8).data)
            if in_order and self._mapped[1]:
                release_pages(part.ctypes.data, part.nbytes)
        release_pages(*self._mapped)  # what is transposed has each of its pages in every part
