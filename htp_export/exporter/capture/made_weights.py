"""How the initializers of an export were made: of which parameters and buffers, and by which operators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import onnx_ir as ir

from htp_export.format.recipes import CONSTANT, Recipe
from htp_export.model.recipes import batchnorm_folded, follow, merged, recorded
from htp_export.shapes.operator_kinds import is_standard

_LAYERS = ("Conv", "ConvTranspose", "Gemm")


class _Folding(NamedTuple):
    """A batch normalisation that may be folded into the layer before it."""

    result: ir.Value
    weight: ir.Value
    zeros: bool  # the layer has a bias of zeros, which is removed before
    recipes: tuple[Recipe, Recipe]


class MadeWeights:
    """What stands in a graph as torch translated it, and depends on no input of the model.

    ``nodes`` have producers before consumers; initializers that are not in ``state`` are constants.
    """

    def __init__(self, graph: ir.Graph, nodes: Sequence[ir.Node], state: Collection[str]) -> None:
        self.known: dict[ir.Value, Recipe] = {
            value: str(value.name) if value.name in state else CONSTANT for value in graph.initializers.values()
        }
        self._state, self._foldings = state, list[_Folding]()
        follow(graph, nodes, self.known)
        for node in nodes:
            if is_standard(node, "BatchNormalization") and (folding := self._folding(node)) is not None:
                self._foldings.append(folding)

    def _folding(self, norm: ir.Node) -> _Folding | None:
        layer = norm.inputs[0].producer() if norm.inputs[0] is not None else None
        if layer is None or not is_standard(layer, *_LAYERS):
            return None
        if layer.op_type == "ConvTranspose" and layer.attributes.get_int("group", 1) != 1:
            return None
        read = [value for value in (*layer.inputs[1:3], *norm.inputs[1:5]) if value is not None]
        tensor = read[0].const_value
        if tensor is None or any(value not in self.known for value in read):
            return None
        weight, *bias = (self.known[value] for value in read[:-4])
        of_norm, column = [self.known[value] for value in read[-4:]], _column_of(layer, len(tensor.shape))
        epsilon = norm.attributes.get_float("epsilon", 1e-5)
        zeros = bias == [CONSTANT]
        recipes = batchnorm_folded(weight, bias[0] if bias and not zeros else None, of_norm, epsilon, column)
        return _Folding(norm.outputs[0], read[0], zeros, recipes)

    def write(self, model: ir.Model, last: Callable[[ir.Value], ir.Value]) -> None:
        """Write the recipes of an optimised model's initializers; ``last`` gives what stands for a first value now."""
        made: dict[ir.Value, list[Recipe]] = {}
        for value, recipe in self.known.items():
            made.setdefault(last(value), []).append(recipe)
        for result, weight, zeros, recipes in self._foldings:
            layer = last(result).producer()
            parts = layer.inputs[1:3] if layer is not None and is_standard(layer, *_LAYERS) else ()
            if len(parts) < 2 or None in parts or parts[0] is weight:
                continue
            if not zeros or parts[1].name == f"{parts[0].name}_bias":  # type: ignore[union-attr]
                made.update((part, [recipe]) for part, recipe in zip(parts, recipes, strict=True) if part is not None)
        for graph in model.graphs():
            for value in graph.initializers.values():
                if value.const_value is not None and value.const_value.dtype.is_floating_point():
                    self._write(value, made.get(value))

    def _write(self, value: ir.Value, recipes: list[Recipe] | None) -> None:
        assert value.const_value is not None
        if recipes is None and value.name in self._state:
            recipes = [["computed", str(value.name), "torch's optimizer"]]
        recipe = None if recipes is None else merged(recipes)
        if recipe is not None and recipe != value.name:
            value.const_value = recorded(value.const_value, recipe)


def _column_of(layer: ir.Node, rank: int) -> list[int]:
    """The shape of factors of the channels that a layer makes, for its weight."""
    turned = layer.op_type == "ConvTranspose" or (layer.op_type == "Gemm" and not layer.attributes.get_int("transB", 0))
    return [-1 if axis == int(turned) else 1 for axis in range(rank)]
