"""Stored tensors that are entries of a checkpoint as they are: they refer to its file in place of a copy."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from htp_export.files.data_files import DataTensor
from htp_export.format.recipes import Recipe


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
            found[value] = entry.described_as(tensor)
    return found


def _entry_of(recipe: Recipe) -> str:
    """Return the entry that a tensor is; the first of equal ones, and empty for other recipes."""
    first = recipe[1] if isinstance(recipe, list) and recipe[0] == "equal" else recipe
    return first if isinstance(first, str) else ""


def _is_like(one: ir.TensorProtocol, other: ir.TensorProtocol) -> bool:
    return one.dtype == other.dtype and tuple(one.shape.numpy()) == tuple(other.shape.numpy())
