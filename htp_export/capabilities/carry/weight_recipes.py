"""How the weights of another tool's file were made: of those of the first file that it left alone, moved or cast."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import onnx_ir as ir

from htp_export.errors import FileError
from htp_export.format import tags
from htp_export.format.recipes import CONSTANT, Recipe, recipe_to_text, step
from htp_export.model.content_hash import array_hash
from htp_export.model.recipes import merged, recipe_of, recorded
from htp_export.runtime.arrays import Array

__all__ = ["carry_recipes"]

_BY_A_TOOL = "another tool"


def carry_recipes(before: ir.Model | None, after: ir.Model) -> None:
    """Say of each weight of a model how it was made; contents are compared, because tools keep names.

    Args:
        before: The model that the tool was given; None if only its map is known.
        after: What it made, which is changed.
    """
    originals = _Originals(before)
    for graph in after.graphs():
        for name, value in graph.initializers.items():
            tensor = value.const_value
            if tensor is None or not _is_weight(tensor) or originals.is_said_anew(name, tensor):
                continue
            recipe = originals.recipe(name, tensor)
            if recipe != name or tags.RECIPE in tensor.metadata_props:
                value.const_value = recorded(tensor, recipe)


def _is_weight(tensor: ir.TensorProtocol) -> bool:
    """Whether a tensor holds numbers; longer integers are positions and sizes."""
    return tensor.dtype.is_floating_point() or (tensor.dtype.is_integer() and tensor.dtype.bitwidth <= 8)


class _Originals:
    """The weights of the first file, by their names and by their contents."""

    def __init__(self, model: ir.Model | None) -> None:
        graphs = () if model is None else (model.graph, *model.graph.subgraphs())
        self._named = {
            str(value.name): value
            for graph in graphs
            for value in graph.initializers.values()
            if value.const_value is not None and _is_weight(value.const_value)
        }

    def is_said_anew(self, name: str, tensor: ir.TensorProtocol) -> bool:
        """Whether a tensor has a recipe that it did not have before, so that who made it has written it."""
        original = self._named.get(name)
        was = None if original is None or original.const_value is None else original.const_value.metadata_props
        said = tensor.metadata_props.get(tags.RECIPE)
        return said == recipe_to_text(CONSTANT) or said not in (None, (was or {}).get(tags.RECIPE))

    def recipe(self, name: str, tensor: ir.TensorProtocol) -> Recipe:
        """How a tensor of the second file was made."""
        array, original = _array(tensor), self._named.get(name)
        if array is None:
            return ["computed", _BY_A_TOOL]
        if original is not None and original.const_value is not None:
            was = _array(original.const_value)
            if was is not None and was.shape == array.shape:
                if was.dtype == array.dtype and was.tobytes() == array.tobytes():
                    return recipe_of(original)
                with np.errstate(all="ignore"):
                    is_cast = was.astype(array.dtype).tobytes() == array.tobytes()
                if is_cast:
                    return step("cast", recipe_of(original), tensor.dtype.name.lower())
        same = self._by_contents.get((array.dtype, array_hash(array)), ())
        turned = () if same or array.ndim != 2 else self._by_contents.get((array.dtype, array_hash(array.T)), ())
        if same:
            return merged(self._moved(value, array) for value in same)
        if turned and all(self._shape(value) == array.shape[::-1] for value in turned):
            return merged(step("transpose", recipe_of(value), [1, 0]) for value in turned)
        return step("computed", *(() if original is None else (recipe_of(original),)), _BY_A_TOOL)

    def _moved(self, value: ir.Value, array: Array) -> Recipe:
        recipe = recipe_of(value)
        return recipe if self._shape(value) == array.shape else step("reshape", recipe, list(array.shape))

    @staticmethod
    def _shape(value: ir.Value) -> tuple[int, ...]:
        assert value.const_value is not None
        return tuple(value.const_value.shape.numpy())

    @cached_property
    def _by_contents(self) -> dict[tuple[object, bytes], list[ir.Value]]:
        found: dict[tuple[object, bytes], list[ir.Value]] = {}
        for value in self._named.values():
            array = None if value.const_value is None else _array(value.const_value)
            if array is not None:
                found.setdefault((array.dtype, array_hash(array)), []).append(value)
        return found


def _array(tensor: ir.TensorProtocol) -> Array | None:
    try:
        return np.asarray(tensor.numpy())
    except (FileError, OSError):  # its data file is gone
        return None
