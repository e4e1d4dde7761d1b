"""Weights as a quantized checkpoint packs them, in ONNX Runtime's operators.

Nothing is rounded: scales are written in 32 bits, and groups of any multiple of 16 inputs as blocks
of a power of two. If GPTQ reordered the inputs of a layer, a Gather reorders them, because ONNX
Runtime's ``g_idx`` is deprecated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from htp_export.weights.fitting import Fitted, Needed, fit
from htp_export.weights.packed import Coded, Packed, PackedCheckpoint
from htp_export.weights.products import is_matrix_product
from htp_export.weights.rebuilding import rebuilt
from htp_export.weights.state_entries import Weights, read_entries

_TRANSPOSED = [1, 0]
"""The axes of a transposed matrix."""


class Stored(Method):
    """Stores matrices as the checkpoint packs them; activations stay."""

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
        """The packed parameter that a node multiplies with; None if it has none.

        Raises:
            InputError: The parameter has another shape in the checkpoint.
        """
        if not is_matrix_product(node):
            return None
        weight = node.inputs[1]
        if weight is None or weight.is_graph_input() or not weight.is_initializer():
            return None
        tensor = constant_of(weight)
        if tensor is None or tensor.dtype != ir.DataType.FLOAT:
            return None
        recipe = recipe_of(weight)
        name = _parameter(recipe)
        layer = None if name is None else self._checkpoint.layers.get(name)
        if layer is None:
            return None
        # A checkpoint has rows of outputs; a MatMul, and a Gemm without transB, columns of them.
        is_transposed = not node.attributes.get_int("transB", 0)
        shape = layer.shape[::-1] if is_transposed else layer.shape
        if tuple(tensor.shape.numpy()) != shape or is_transposed != isinstance(recipe, list):
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
        return sum(array.nbytes for array in self._checkpoint.packed(name).tensors().values())

    def groups(self, nodes: Sequence[ir.Node], work: Work) -> Iterable[Sequence[ir.Node]]:
        return groups_in_memory(nodes)

    def quantize(self, part: Submodel, work: Work) -> Made:
        graph = part.model.graph
        # By name, which a node keeps when it is rewritten; its weight gets another recipe.
        names = {node.name: self._name(node) for node in graph}
        write_products(graph)
        stored: dict[str, tuple[Packed | Coded, dict[str, ir.Value]]] = {}
        for node in list(graph):
            name = names.get(node.name)
            if node.op_type != "MatMul" or name is None:
                continue
            if name not in stored:
                packed = self._readable(name)
                recipe = step("computed", name, self._checkpoint.kind)
                stored[name] = packed, _add_initializers(graph, name, packed.tensors(), recipe)
            _replace(graph, node, *stored[name])
        remove_unused(list(graph.initializers.values()))
        if self.precision.format == "qdq":
            write_dequantized(graph)
        return Made(part.model)

    def _readable(self, name: str) -> Packed | Coded:
        """A packed weight; an `InputError` if the operators of the format do not support it."""
        packed = self._checkpoint.packed(name)
        if self.precision.format != "qdq":
            return packed
        problem = ""
        if packed.operator != "MatMulNBits":
            problem = "a table of numbers"
        elif packed.points is not None and packed.points.dtype.kind != "u":
            problem = "zero points that are no integers"
        if problem:
            raise InputError(
                f"{name!r} of {self._checkpoint.path} has {problem}, which DequantizeLinear has not"
            )
        return packed


METHOD = Stored


def _parameter(recipe: Recipe) -> str | None:
    """The parameter in a recipe that copies or transposes one; None for other recipes."""
    if isinstance(recipe, list) and recipe[0] == "transpose" and recipe[-1] in (_TRANSPOSED, []):
        recipe = recipe[1]
    return recipe if isinstance(recipe, str) else None


def _add_initializers(
    graph: ir.Graph, parameter: str, arrays: dict[str, np.ndarray[Any, Any]], recipe: Recipe
) -> dict[str, ir.Value]:
    return {
        end: add_initializer(graph, ir.Tensor(array), f"{parameter}_{end}", recipe)
        for end, array in arrays.items()
    }


def _replace(
    graph: ir.Graph, node: ir.Node, packed: Packed | Coded, values: dict[str, ir.Value]
) -> None:
    """Replace a ``MatMul`` by the operator of a packed weight, with inputs in packed order."""
    activation, new = node.inputs[0], []
    if "order" in values:
        assert activation is not None
        gather = ir.node(
            "Gather", [activation, values["order"]], {"axis": -1}, name=f"{node.name}_order"
        )
        new.append(gather)
        [ordered] = gather.outputs
        ordered.name = f"{node.name}_ordered"
        ordered.type, ordered.shape = activation.type, activation.shape
        activation = ordered
    inputs = [activation]
    inputs += [values[end] for end in ("levels", "scales", "zero_points") if end in values]
    product = ir.node(
        packed.operator, inputs, packed.attributes, domain="com.microsoft", name=node.name
    )
    ir.convenience.replace_nodes_and_values(
        graph, node, [node], [*new, product], node.outputs, product.outputs
    )
    graph.opset_imports.setdefault("com.microsoft", 1)


@dataclass(frozen=True)
class LoadedWeights:
    """The weights of a checkpoint for a model.

    Attributes:
        source: Their origin, for messages.
        fitted: The entries by the names of the model.
        packed: The checkpoint by the names of the model, if its weights are quantized.
        surplus: Packed weights that the model does not have.
    """

    source: str
    fitted: Fitted
    packed: PackedCheckpoint | None
    surplus: tuple[str, ...] = ()

    @classmethod
    def of(cls, weights: Weights, tagged: TaggedModel) -> LoadedWeights:
        """Read a checkpoint; values are read when they are needed."""
        entries = read_entries(weights)
        fitted = fit(entries, Needed.of(tagged), cast=True)
        if entries.packed is None:
            return cls(entries.source, fitted, None)
        packed = entries.packed.renamed(fitted.origins)
        known = frozenset(fitted.origins.values())
        surplus = tuple(name for name in entries.packed.layers if name not in known)
        return cls(entries.source, fitted, packed, surplus)

    @property
    def precisions(self) -> Mapping[str, Precision]:
        """The precision of packed weights by its name; empty if the weights are not quantized."""
        if self.packed is None:
            return {}
        options = {"checkpoint": self.packed}
        return {CHECKPOINT: Precision(CHECKPOINT, CHECKPOINT, weight="int4", options=options)}

    def loaded_into(self, tagged: TaggedModel) -> TaggedModel:
        """A copy of a model with these weights, dequantized, computed lazily.

        All parameters are replaced, because AWQ changes norms, too. Buffers that the checkpoint does
        not contain stay.

        Raises:
            InputError: The checkpoint lacks a parameter, has it in another shape, or has packed
                weights that the model does not have.
        """
        copy = tagged.clone()
        declared, missing = copy.declared or {}, frozenset(self.fitted.missing)
        absent = next((name for name in self.fitted.missing if name in declared), None)
        if absent is not None:
            raise InputError(f"{self.source} has no {absent!r}, that the file was exported from")
        for name in copy.assumed:
            if name in self.fitted.unfit:
                raise InputError(f"{self.source}: {name!r} {self.fitted.unfit[name]}")
        made = rebuilt(copy, self.fitted.tensors, self.fitted.unfit, self.fitted.unchanged)
        for value, why in made.unknown.items():
            names = set(parameters_in(recipe_of(value)))
            if not names <= missing:
                raise InputError(f"{self.source}: {why}")
        if self.surplus:
            raise InputError(
                f"{self.source} has {self.surplus[0]!r}, and the model has no such parameter"
            )
        for value, tensor in made.tensors.items():
            value.const_value = tensor
        return copy.refresh()
