"""Recipes of the initializers of an export: from which parameters, and by which operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import onnx_ir as ir

from htp_export.exporter.capture.jit_weights import OPTIMIZER
from htp_export.format.recipes import CONSTANT, Recipe, step
from htp_export.model.assumed_values import ReadParameters
from htp_export.model.folded_recipes import batchnorm_folded, merged
from htp_export.model.recipes import (
    FOLDED_BY_NUMPY,
    default_recipe,
    follow,
    known_beginning,
    recorded,
)
from htp_export.shapes.operator_kinds import is_standard

_LAYERS = ("Conv", "ConvTranspose", "Gemm")


class _Folding(NamedTuple):
    """A batch normalisation that may be folded into the layer before it."""

    result: ir.Value
    weight: ir.Value
    zeros: bool  # whether the layer has a bias of zeros, which torch may remove before
    recipes: tuple[Recipe, Recipe]  # of the folded weight and bias


class MadeWeights:
    """Recipes of the constant tensors in a graph as torch translated it.

    ``nodes`` have producers before consumers. ``state``: name of an initializer → that of its
    parameter or buffer in recipes; initializers that it lacks are constants.
    ``functions`` are those that torch inlines later: their constants become initializers of the graph.
    """

    def __init__(
        self,
        graph: ir.Graph,
        nodes: Sequence[ir.Node],
        state: Mapping[str, str],
        functions: Iterable[ir.Function] = (),
    ) -> None:
        self.known: dict[ir.Value, Recipe] = {}
        for value in graph.initializers.values():
            name = str(value.name)
            self.known[value] = state.get(name, CONSTANT)
        self._state = state
        tensors: dict[str, ir.TensorProtocol] = {}
        for value in graph.initializers.values():
            if value.name in state and value.uses() and value.const_value is not None:
                tensors[state[str(value.name)]] = value.const_value
        self.parameters = ReadParameters(tensors, tensors)
        self._foldings = list[_Folding]()
        follow(graph, nodes, self.known, FOLDED_BY_NUMPY)
        self._names_in_functions: set[str] = set()
        for function in functions:
            inside: dict[ir.Value, Recipe] = {}
            follow(function.graph, function, inside)
            self._names_in_functions.update(str(value.name) for value in inside)
        for node in nodes:
            if not is_standard(node, "BatchNormalization"):
                continue
            folding = self._folding(node)
            if folding is not None:
                self._foldings.append(folding)

    def _folding(self, norm: ir.Node) -> _Folding | None:
        layer = norm.inputs[0].producer() if norm.inputs[0] is not None else None
        if layer is None or not is_standard(layer, *_LAYERS):
            return None
        if layer.op_type == "ConvTranspose" and layer.attributes.get_int("group", 1) != 1:
            return None
        # weight and bias, if any, of the layer; scale, bias, mean and variance of the normalization
        all_inputs = (*layer.inputs[1:3], *norm.inputs[1:5])
        inputs = [value for value in all_inputs if value is not None]
        weight = inputs[0].const_value
        recipes_of_inputs = [self.known[value] for value in inputs if value in self.known]
        if weight is None or len(recipes_of_inputs) < len(inputs):
            return None
        of_weight, *of_bias = recipes_of_inputs[:-4]
        of_norm = recipes_of_inputs[-4:]
        zeros = of_bias == [CONSTANT]
        recipes = batchnorm_folded(
            of_weight,
            of_bias[0] if of_bias and not zeros else None,
            of_norm,
            norm.attributes.get_float("epsilon", 1e-5),
            _column_of(layer, len(weight.shape)),
        )
        return _Folding(norm.outputs[0], inputs[0], zeros, recipes)

    def write(self, model: ir.Model, last: Callable[[ir.Value], ir.Value]) -> None:
        """Write the recipes of an optimised model's initializers.

        ``last`` returns the value of the model that replaces a value of the translated graph.
        """
        recipes: dict[ir.Value, list[Recipe]] = {}
        for value, recipe in self.known.items():
            recipes.setdefault(last(value), []).append(recipe)
        for folding in self._foldings:
            recipes.update(self._folded_recipes(folding, last(folding.result).producer()))
        for graph in model.graphs():
            for value in graph.initializers.values():
                if value.const_value is not None:
                    self._write(value, recipes.get(value))

    @staticmethod
    def _folded_recipes(folding: _Folding, layer: ir.Node | None) -> dict[ir.Value, list[Recipe]]:
        """The recipes of a layer's weight and bias; empty if no normalization was folded in."""
        if layer is None or not is_standard(layer, *_LAYERS) or len(layer.inputs) < 3:
            return {}
        weight, bias = layer.inputs[1:3]
        if weight is None or bias is None or weight is folding.weight:
            return {}
        # without a bias of the layer, torch adds one with this name
        if folding.zeros and bias.name != f"{weight.name}_bias":
            return {}
        of_weight, of_bias = folding.recipes
        return {weight: [of_weight], bias: [of_bias]}

    def _write(self, value: ir.Value, recipes: list[Recipe] | None) -> None:
        tensor = value.const_value
        assert tensor is not None
        name = str(value.name)
        if recipes is None:
            recipes = [self._recipe_of_new(name, tensor.dtype)]
        recipe = merged(recipes)
        if recipe != default_recipe(name, tensor.dtype):
            value.const_value = recorded(tensor, recipe)

    def _recipe_of_new(self, name: str, dtype: ir.DataType) -> Recipe:
        """The recipe of an initializer that replaces no value of the translated graph."""
        if name in self._state:
            return step("computed", self._state[name], OPTIMIZER)
        # axes and sizes of the operators that rewrite rules insert
        if not dtype.is_floating_point():
            return CONSTANT
        # Inlining adds a number to the name; the constants of a function depend on none of its inputs.
        if known_beginning(name, self._names_in_functions) is not None:
            return CONSTANT
        return step("computed", OPTIMIZER)


def _column_of(layer: ir.Node, rank: int) -> list[int]:
    """The shape that broadcasts factors of a layer's output channels over its weight."""
    is_transposed = layer.op_type == "ConvTranspose"
    if layer.op_type == "Gemm":
        is_transposed = not layer.attributes.get_int("transB", 0)
    channels = 1 if is_transposed else 0
    return [-1 if axis == channels else 1 for axis in range(rank)]
