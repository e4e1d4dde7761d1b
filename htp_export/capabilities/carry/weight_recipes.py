"""How the weights of another tool's file were made: of those of the first file that it left alone, moved or cast."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import onnx_ir as ir

from htp_export.errors import FileError
from htp_export.format import tags
from htp_export.format.recipes import CONSTANT, Recipe, recipe_to_text, step
from htp_export.model.content_hash import array_hash
from htp_export.model.module_facts import stored_tensor
from htp_export.model.recipes import merged, recipe_of, recorded
from htp_export.runtime.arrays import Array
from htp_export.shapes.operator_kinds import is_standard

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
        values = (value for graph in graphs for value in graph.initializers.values())
        constants = (node.outputs[0] for graph in graphs for node in graph if is_standard(node, "Constant"))
        stored = ((value, stored_tensor(value)) for value in (*values, *constants))
        self._named = {
            str(value.name): (tensor, recipe_of(value))
            for value, tensor in stored
            if tensor is not None and _is_weight(tensor)
        }

    def is_said_anew(self, name: str, tensor: ir.TensorProtocol) -> bool:
        """Whether a tensor has a recipe that it did not have before, so that who made it has written it."""
        original = self._named.get(name)
        was = {} if original is None else original[0].metadata_props
        said = tensor.metadata_props.get(tags.RECIPE)
        return said == recipe_to_text(CONSTANT) or said not in (None, was.get(tags.RECIPE))

    def recipe(self, name: str, tensor: ir.TensorProtocol) -> Recipe:
        """How a tensor of the second file was made."""
        array, original = _array(tensor), self._named.get(name)
        if array is None:
            return ["computed", _BY_A_TOOL]
        if original is not None:
            was = _array(original[0])
            if was is not None and was.shape == array.shape:
                if was.dtype == array.dtype and was.tobytes() == array.tobytes():
                    return original[1]
                with np.errstate(all="ignore"):
                    is_cast = was.astype(array.dtype).tobytes() == array.tobytes()
                if is_cast:
                    return step("cast", original[1], tensor.dtype.name.lower())
        if array.size > 1 and (array == array.flat[0]).all():  # zeros and ones of one origin are those of any other
            return step("computed", *(() if original is None else (original[1],)), _BY_A_TOOL)
        same = self._by_contents.get((array.dtype, array_hash(array)), ())
        turned = () if same or array.ndim != 2 else self._by_contents.get((array.dtype, array_hash(array.T)), ())
        if same:
            shape = list(array.shape)
            return merged(recipe if sizes == array.shape else step("reshape", recipe, shape) for sizes, recipe in same)
        if turned and all(sizes == array.shape[::-1] for sizes, _ in turned):
            return merged(step("transpose", recipe, [1, 0]) for _, recipe in turned)
        return step("computed", *(() if original is None else (original[1],)), _BY_A_TOOL)

    @cached_property
    def _by_contents(self) -> dict[tuple[object, bytes], list[tuple[tuple[int, ...], Recipe]]]:
        """Type and contents of a weight → its shape, and how it was made."""
        found: dict[tuple[object, bytes], list[tuple[tuple[int, ...], Recipe]]] = {}
        for tensor, recipe in self._named.values():
            array = _array(tensor)
            if array is not None:
                found.setdefault((array.dtype, array_hash(array)), []).append((array.shape, recipe))
        return found


def _array(tensor: ir.TensorProtocol) -> Array | None:
    try:
        return np.asarray(tensor.numpy())
    except (FileError, OSError):  # its data file is gone
        return None
