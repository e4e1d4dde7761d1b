"""How the weights of another tool's file were made: of those of the first file that it left alone, moved or cast."""

from __future__ import annotations

import contextlib

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.carry.stored_weights import holds_numbers
from htp_export.errors import FileError
from htp_export.format import tags
from htp_export.format.recipes import CONSTANT, Recipe, recipe_to_text, step
from htp_export.model.hashes import array_hash, is_filled, same_numbers
from htp_export.model.module_facts import stored_tensor
from htp_export.model.recipes import known_beginning, merged, recipe_of, recorded
from htp_export.shapes.operator_kinds import is_standard

_BY_A_TOOL = "another tool"


def carry_recipes(before: ir.Model | None, after: ir.Model) -> None:
    """Say of each weight of a tool's result how it was made; contents are compared, because tools keep names."""
    originals = _Originals(before)
    for graph in after.graphs():
        for name, value in graph.initializers.items():
            tensor = value.const_value
            if tensor is None or not originals.may_be_weight(name, tensor) or originals.is_said_anew(name, tensor):
                continue
            recipe = originals.recipe(name, tensor)
            if recipe != name or tags.RECIPE in tensor.metadata_props:
                value.const_value = recorded(tensor, recipe)


class _Originals:
    """The weights of the first file, by their names and by their numbers."""

    def __init__(self, model: ir.Model | None) -> None:
        graphs = () if model is None else (model.graph, *model.graph.subgraphs())
        values = (value for graph in graphs for value in graph.initializers.values())
        constants = (node.outputs[0] for graph in graphs for node in graph if is_standard(node, "Constant"))
        stored = ((value, stored_tensor(value)) for value in (*values, *constants))
        self._hashed: dict[tuple[ir.DataType, int], dict[bytes, list[tuple[tuple[int, ...], Recipe]]]] = {}
        self._named = {
            str(value.name): (tensor, recipe_of(value))
            for value, tensor in stored
            if tensor is not None and holds_numbers(tensor.dtype)
        }

    def may_be_weight(self, name: str, tensor: ir.TensorProtocol) -> bool:
        """Whether a tensor holds numbers; integers of 32 bits are a quantized bias, or positions and sizes."""
        return holds_numbers(tensor.dtype) or (tensor.dtype == ir.DataType.INT32 and bool(self._named_alike(name)))

    def is_said_anew(self, name: str, tensor: ir.TensorProtocol) -> bool:
        """Whether a tensor has a recipe that it did not have before, so that who made it has written it."""
        original = self._named.get(name)
        was = {} if original is None else original[0].metadata_props
        said = tensor.metadata_props.get(tags.RECIPE)
        return said == recipe_to_text(CONSTANT) or said not in (None, was.get(tags.RECIPE))

    def recipe(self, name: str, tensor: ir.TensorProtocol) -> Recipe:
        """How a tensor of the second file was made; one that kept its name and numbers is not looked up among all."""
        original = self._named.get(name)
        vague = step("computed", *self._named_alike(name), _BY_A_TOOL)
        with contextlib.suppress(FileError, OSError):  # the data file of one of them is gone
            if original is not None and same_numbers(original[0], tensor):
                is_cast = original[0].dtype != tensor.dtype
                return step("cast", original[1], tensor.dtype.name.lower()) if is_cast else original[1]
        try:
            if tensor.size > 1 and is_filled(tensor):  # zeros and ones of one origin are those of any other
                return vague
            return self._elsewhere(tensor) or vague
        except (FileError, OSError):
            return ["computed", _BY_A_TOOL]

    def _named_alike(self, name: str) -> list[Recipe]:
        """The recipe of the weight with a name, or with the beginning of it to which a tool added something."""
        known = known_beginning(name, self._named)
        return [] if known is None else [self._named[known][1]]

    def _elsewhere(self, tensor: ir.TensorProtocol) -> Recipe | None:
        """The recipe of a weight with the numbers of a tensor, as they are or transposed."""
        known = self._by_hash(tensor.dtype, tensor.size)
        if not known:
            return None
        array = np.asarray(tensor.numpy())
        if same := known.get(array_hash(array)):
            return merged(
                each if shape == array.shape else step("reshape", each, [*array.shape]) for shape, each in same
            )
        turned = known.get(array_hash(array.T), ()) if array.ndim == 2 else ()
        is_turned = turned and all(shape == array.shape[::-1] for shape, _ in turned)
        return merged(step("transpose", each, [1, 0]) for _, each in turned) if is_turned else None

    def _by_hash(self, dtype: ir.DataType, size: int) -> dict[bytes, list[tuple[tuple[int, ...], Recipe]]]:
        """Hash of the numbers of a weight with so many elements → its shape, and how it was made."""
        if (dtype, size) not in self._hashed:
            found = self._hashed.setdefault((dtype, size), {})
            for tensor, recipe in self._named.values():
                if (tensor.dtype, tensor.size) == (dtype, size):
                    with contextlib.suppress(FileError, OSError):
                        array = np.asarray(tensor.numpy())
                        found.setdefault(array_hash(array), []).append((array.shape, recipe))
        return self._hashed[dtype, size]
