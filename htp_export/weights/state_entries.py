"""Entries of a ``state_dict`` in any form; shapes and types are read at once, values on access."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import onnx_ir as ir

from htp_export.discovery import providers
from htp_export.errors import FileError, InputError
from htp_export.files.checkpoint import Checkpoint, read_checkpoint
from htp_export.files.data_files import DataFile, DataTensor
from htp_export.weights.packed import PackedCheckpoint

if TYPE_CHECKING:
    import torch

Weights: TypeAlias = "Mapping[str, Any] | torch.nn.Module | str | os.PathLike[str]"
"""A ``state_dict``, a module, a safetensors file, its index, a folder with one of these, a quantized checkpoint
(GPTQ, AWQ, bitsandbytes, GGUF), or a hub id."""


@dataclass(frozen=True)
class StateEntries:
    """The entries of a ``state_dict``.

    Attributes:
        source: The origin of the entries, for messages.
        tensors: Name → tensor; the values are read on access.
        packed: The checkpoint, if its weights are quantized; ``tensors`` has them dequantized.
        path: The folder or file of plain safetensors files; empty for other origins.
    """

    source: str
    tensors: Mapping[str, ir.TensorProtocol]
    packed: PackedCheckpoint | None = None
    path: str = ""

    def converted(self) -> StateEntries | None:
        """Return the entries under the names of the model in memory, for a checkpoint whose files have others.

        transformers converts them when it loads a model: it is asked. None if there is no such model.
        """
        for each in providers("converted_entries") if self.path else ():
            state = each.convert(self.path)
            if state is not None:
                return StateEntries(self.source, _of_mapping(state))
        return None


def read_entries(weights: Weights) -> StateEntries:
    """Read the names, shapes and types of the entries.

    Raises:
        FileError: A file is missing, is a pickle, or is broken.
        InputError: ``weights`` has another type.
    """
    if isinstance(weights, Mapping):
        return StateEntries("the state_dict", _of_mapping(weights))
    if hasattr(weights, "state_dict"):
        return StateEntries(type(weights).__name__, _of_mapping(weights.state_dict()))
    if isinstance(weights, str | os.PathLike):
        return _of_path(os.fspath(weights))
    raise InputError(
        f"weights are a state_dict, an nn.Module, a safetensors file, its index, a folder or a hub id, "
        f"not {type(weights).__name__}"
    )


def _of_mapping(state: Mapping[str, Any]) -> dict[str, ir.TensorProtocol]:
    from onnx_ir.tensor_adapters import TorchTensor

    tensors: dict[str, ir.TensorProtocol] = {}
    for name, value in state.items():
        if isinstance(value, ir.TensorProtocol):
            tensors[str(name)] = value
        elif hasattr(value, "detach"):
            tensors[str(name)] = TorchTensor(value.detach().cpu())
        elif hasattr(value, "dtype") and hasattr(value, "shape"):
            tensors[str(name)] = ir.tensor(value)
        # other entries, as the extra state of a module, are no tensors
    return tensors


def _of_path(name: str) -> StateEntries:
    for each in providers("checkpoints"):
        found = each.find(name)
        if isinstance(found, PackedCheckpoint):
            tensors = {key: _of_packed(found, key) for key in found}
            return StateEntries(name, tensors, found)
        if found is not None:
            return StateEntries(name, _of_checkpoint(found))
    return StateEntries(name, _of_checkpoint(read_checkpoint(name)), path=name)


def _of_packed(packed: PackedCheckpoint, name: str) -> ir.TensorProtocol:
    """Return an entry of a quantized checkpoint in float32; matrices are dequantized on access."""
    shape = packed.shape_of(name)
    if shape is None:
        return ir.tensor(packed[name])
    return ir.LazyTensor(
        lambda: ir.tensor(packed[name]), ir.DataType.FLOAT, ir.Shape(shape), name=name
    )


def _of_checkpoint(checkpoint: Checkpoint) -> dict[str, ir.TensorProtocol]:
    """Return the tensors of safetensors files, which stay in their files until they are used."""
    opened: dict[Path, DataFile] = {}
    for file, state in checkpoint.states.items():
        opened[file] = DataFile(file, checkpoint.path, state=state)
    tensors: dict[str, ir.TensorProtocol] = {}
    for name, file in checkpoint.files.items():
        stored = checkpoint.stored[name]
        kind = _kind(file, name, stored.kind)
        place = (file.name, stored.offset, stored.length, kind, checkpoint.shapes[name])
        tensors[name] = DataTensor(*place, {"name": name}, opened[file], file.parent)
    return tensors


_KINDS = {
    "F64": ir.DataType.DOUBLE,
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
    "F8_E4M3": ir.DataType.FLOAT8E4M3FN,
    "F8_E5M2": ir.DataType.FLOAT8E5M2,
    "I64": ir.DataType.INT64,
    "I32": ir.DataType.INT32,
    "I16": ir.DataType.INT16,
    "I8": ir.DataType.INT8,
    "U8": ir.DataType.UINT8,
    "BOOL": ir.DataType.BOOL,
}
"""Types of safetensors (https://huggingface.co/docs/safetensors) → those of ONNX."""


def _kind(file: Path, name: str, kind: str) -> ir.DataType:
    if kind not in _KINDS:
        raise FileError(file, f"tensor {name!r} has type {kind}; {', '.join(_KINDS)} are read")
    return _KINDS[kind]
