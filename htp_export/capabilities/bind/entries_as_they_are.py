"""Stored tensors that are entries of a checkpoint as they are: they refer to its file in place of a copy."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.files.data_files import DataTensor
from htp_export.files.lazy_tensor import descriptive_fields
from htp_export.files.linked_weights import SharedFile, Way
from htp_export.files.model_files import write_sharing
from htp_export.format.recipes import Recipe
from htp_export.reporting.columns import many, si


def as_they_are(
    tensors: Mapping[ir.Value, ir.TensorProtocol],
    recipes: Mapping[ir.Value, Recipe],
    entries: Mapping[str, ir.TensorProtocol],
) -> dict[ir.Value, ir.TensorProtocol]:
    """Return new tensors of which those that are entries in the same type and shape refer to their file.

    Args:
        tensors: Initializer → its new contents.
        recipes: Initializer → its recipe.
        entries: Entry → tensor.
    """
    found = dict(tensors)
    for value, tensor in tensors.items():
        entry = entries.get(_entry_of(recipes[value]))
        if isinstance(entry, DataTensor) and _is_like(entry, tensor):
            found[value] = _renamed(entry, tensor)
    return found


def _entry_of(recipe: Recipe) -> str:
    """Return the entry that a tensor is; the first of equal ones, and empty for other recipes."""
    first = recipe[1] if isinstance(recipe, list) and recipe[0] == "equal" else recipe
    return first if isinstance(first, str) else ""


def _is_like(one: ir.TensorProtocol, other: ir.TensorProtocol) -> bool:
    return one.dtype == other.dtype and tuple(one.shape.numpy()) == tuple(other.shape.numpy())


def _renamed(entry: DataTensor, tensor: ir.TensorProtocol) -> DataTensor:
    """Return an entry with the name and the metadata of a tensor."""
    shape, fields = tuple(entry.shape.numpy()), descriptive_fields(tensor)
    place = (os.fspath(entry.location), entry.offset, entry.length)
    return DataTensor(*place, entry.dtype, shape, fields, entry.file, entry.base_dir)


def write_referring(
    model: ir.Model, output: Path, tensors: Iterable[ir.TensorProtocol], *, is_same_graph: bool
) -> tuple[str, ...]:
    """Write a model whose new tensors refer to the files of a checkpoint; return a note on each file.

    ``is_same_graph``: As for `write_model`.
    """
    referring = [tensor for tensor in tensors if isinstance(tensor, DataTensor)]
    by_file: dict[Path, list[DataTensor]] = {}
    for tensor in referring:
        by_file.setdefault(tensor.file.path, []).append(tensor)
    ways = write_sharing(model, output, by_file.keys(), is_same_graph=is_same_graph)
    return tuple(_note(file, way, by_file[file.source]) for file, way in ways)


def _note(file: SharedFile, way: Way, tensors: Collection[DataTensor]) -> str:
    size = sum(tensor.nbytes for tensor in tensors)
    return (
        f"{many(len(tensors), 'tensor')} ({si(size, 'B')}) stay in {file.name}, which {way.value}"
    )


def check_referring(
    output: object, entries: Mapping[str, ir.TensorProtocol], *, in_place_data: bool
) -> None:
    """Refuse ``share_weights`` without a file to write, or for weights that are in no safetensors file."""
    if output is None or in_place_data:
        raise InputError(
            "share_weights writes a file that refers to the checkpoint: give an output, and not in_place_data"
        )
    if not any(isinstance(entry, DataTensor) for entry in entries.values()):
        raise InputError(
            "share_weights refers to safetensors files: give a file, its index or a folder as weights"
        )
