"""Weights as a quantized checkpoint has them: its integers, scales and zero points, in the operators of ONNX Runtime.

Nothing is rounded: scales are written in 32 bits, groups of any multiple of 16 inputs as blocks of
a power of two. Inputs that GPTQ reordered are gathered in this order, because ONNX Runtime's
``g_idx`` is deprecated.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.quantize.method import CHECKPOINT, Made, Method, Precision
from htp_export.capabilities.quantize.ort_quantizers import groups_in_memory
from htp_export.capabilities.quantize.weight_operators import (
    FIRST_BLOCKS,
    write_dequantized,
    write_products,
)
from htp_export.capabilities.quantize.work import Facts, Work
from htp_export.editing.editing import add_initializer
from htp_export.editing.submodels import Submodel, constant_of, remove_unused
from htp_export.errors import InputError
from htp_export.format.recipes import Recipe, parameters_in, step
from htp_export.model.recipes import recipe_of
from htp_export.model.tagged import TaggedModel
from htp_export.weights.products import is_matrix_product
from htp_export.weights.rebuilding import rebuilt

if TYPE_CHECKING:
    from htp_export.capabilities.huggingface.packed.weights import Coded, Packed, PackedCheckpoint


_TURNED = [1, 0]


class Stored(Method):
    """Matrices that a checkpoint has packed stay packed; activations stay."""

    activations = ("float32",)
    weights = ("int4", "int8")
    formats = ("default", "qdq")
    options = ("checkpoint",)
    order = 1
    in_subgraphs = True

    @property
    def first_opset(self) -> int:
        return FIRST_BLOCKS if self.precision.format == "qdq" else super().first_opset

    @property
    def _checkpoint(self) -> PackedCheckpoint:
        checkpoint: PackedCheckpoint = self.precision.options["checkpoint"]
        return checkpoint

    def takes(self, node: ir.Node, facts: Facts) -> bool:
        return self._name(node) is not None

    def _name(self, node: ir.Node) -> str | None:
        """The packed parameter that a node multiplies with."""
        if (
            not is_matrix_product(node)
            or (weight := node.inputs[1]) is None
            or weight.is_graph_input()
        ):
            return None
        tensor = constant_of(weight)
        if tensor is None or tensor.dtype != ir.DataType.FLOAT or not weight.is_initializer():
            return None
        name = _parameter(recipe_of(weight))
        layer = None if name is None else self._checkpoint.layers.get(name)
        if layer is None:
            return None
        is_turned = not node.attributes.get_int("transB", 0)
        shape = layer.shape[::-1] if is_turned else layer.shape
        if tuple(tensor.shape.numpy()) != shape or is_turned != isinstance(recipe_of(weight), list):
            problem = f"{node.op_type} {node.name!r} multiplies with {name!r} of {list(tensor.shape.numpy())}"
            raise InputError(
                f"{problem}, and {self._checkpoint.path} has {list(layer.shape)}, outputs and inputs"
            )
        return name

    def bytes_of(
        self, node: ir.Node, place: int, tensor: ir.TensorProtocol, facts: Facts
    ) -> int | None:
        name = self._name(node)
        if name is None or place != 1:
            return None
        return sum(each.nbytes for each in self._checkpoint.packed(name).tensors().values())

    def groups(self, nodes: Sequence[ir.Node], work: Work) -> Iterable[Sequence[ir.Node]]:
        return groups_in_memory(nodes)

    def quantize(self, part: Submodel, work: Work) -> Made:
        graph = part.model.graph
        names = {node.name: self._name(node) for node in graph}
        write_products(graph)
        made: dict[str, tuple[Packed | Coded, dict[str, ir.Value]]] = {}
        for node in list(graph):
            name = names.get(node.name)
            if node.op_type != "MatMul" or name is None:
                continue
            if name not in made:
                packed = self._readable(name)
                recipe = step("computed", name, self._checkpoint.kind)
                made[name] = packed, _registered(graph, name, packed.tensors(), recipe)
            _replace(graph, node, *made[name])
        remove_unused(list(graph.initializers.values()))
        if self.precision.format == "qdq":
            write_dequantized(graph)
        return Made(part.model)

    def _readable(self, name: str) -> Packed | Coded:
        """A packed weight, if the operators of the format can read it."""
        packed = self._checkpoint.packed(name)
        is_integer = packed.operator == "MatMulNBits" and (
            packed.points is None or packed.points.dtype.kind == "u"
        )
        if self.precision.format == "qdq" and not is_integer:
            has = (
                "zero points that are no integers"
                if packed.operator == "MatMulNBits"
                else "a table of numbers"
            )
            raise InputError(
                f"{name!r} of {self._checkpoint.path} has {has}, which DequantizeLinear has not"
            )
        return packed


METHOD = Stored


def _parameter(recipe: Recipe) -> str | None:
    """The parameter that a matrix is, as it is or transposed."""
    if isinstance(recipe, list) and recipe[0] == "transpose" and recipe[-1] in (_TURNED, []):
        recipe = recipe[1]
    return recipe if isinstance(recipe, str) else None


def _registered(
    graph: ir.Graph, parameter: str, arrays: dict[str, np.ndarray[Any, Any]], recipe: Recipe
) -> dict[str, ir.Value]:
    return {
        end: add_initializer(graph, ir.Tensor(array), f"{parameter}_{end}", recipe)
        for end, array in arrays.items()
    }


def _replace(
    graph: ir.Graph, node: ir.Node, packed: Packed | Coded, values: dict[str, ir.Value]
) -> None:
    read, new = node.inputs[0], []
    if "order" in values:
        new.append(
            ir.node("Gather", [read, values["order"]], {"axis": -1}, name=f"{node.name}_order")
        )
        [read] = new[0].outputs
        assert node.inputs[0] is not None
        read.name, read.type, read.shape = (
            f"{node.name}_ordered",
            node.inputs[0].type,
            node.inputs[0].shape,
        )
    given = [read, *(values[end] for end in ("levels", "scales", "zero_points") if end in values)]
    product = ir.node(
        packed.operator, given, packed.attributes, domain="com.microsoft", name=node.name
    )
    ir.convenience.replace_nodes_and_values(
        graph, node, [node], [*new, product], node.outputs, product.outputs
    )
    graph.opset_imports.setdefault("com.microsoft", 1)


def checkpoint_precision(weights: str | os.PathLike[str], tagged: TaggedModel) -> Precision:
    """The precision that a quantized checkpoint has; only its headers are read.

    A tied parameter that the checkpoint has once has both of its names.
    """
    from htp_export.capabilities.huggingface.packed.checkpoints import read_packed

    found = read_packed(weights)
    ties = [(each.name, each.tied) for each in (tagged.declared or {}).values() if each.tied]
    both = {
        name: other
        for pair in ties
        for name, other in (pair, pair[::-1])
        if name not in found and other in found
    }
    return Precision(
        CHECKPOINT, CHECKPOINT, weight="int4", options={"checkpoint": found.also(both)}
    )


def with_numbers(tagged: TaggedModel, precision: Precision) -> TaggedModel:
    """A copy of a model whose parameters are those of the checkpoint, dequantized; computed when they are read.

    AWQ changes norms, too: matrices alone would make another model. Buffers stay where the
    checkpoint has none.

    Raises:
        InputError: If the checkpoint lacks a parameter, or has it in another shape.
    """
    checkpoint: Any = precision.options["checkpoint"]
    copy = tagged.clone()
    new = rebuilt(copy, checkpoint)
    for value, why in new.unknown.items():
        names = list(parameters_in(recipe_of(value)))
        missing = [name for name in names if name not in checkpoint]
        declared = [name for name in missing if name in (copy.declared or {})]
        if declared:
            raise InputError(
                f"{checkpoint.path} has no {declared[0]!r}, which initializer {value.name!r} is made of"
            )
        if names and not missing:
            raise InputError(
                f"initializer {value.name!r} cannot be made of {names[0]!r} of the checkpoint: {why}"
            )
    for value, tensor in new.tensors.items():
        value.const_value = tensor
    for layer in checkpoint.layers:
        if copy.declared is not None and layer not in copy.declared:
            raise InputError(
                f"{checkpoint.path} has {layer!r}, and the model has no such parameter"
            )
    return copy.refresh()
