"""Recipes of the initializers of an export: from which parameters, and by which operators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import onnx_ir as ir

from htp_export.exporter.capture.torchscript_internals import (
    CONSTANTS,
    JitStep,
    attributes_of,
    nodes_of,
    numbers_of_inputs,
    numbers_of_outputs,
)
from htp_export.format.bounds import MOST_DIMENSIONS
from htp_export.format.recipes import CONSTANT, Recipe, step
from htp_export.model.recipes import (
    FOLDED_BY_NUMPY,
    batchnorm_folded,
    folded,
    follow,
    known_beginning,
    merged,
    recorded,
)
from htp_export.shapes.operator_kinds import RESHAPING, is_standard

_LAYERS = ("Conv", "ConvTranspose", "Gemm")
_OPTIMIZER = "torch's optimizer"


class _Folding(NamedTuple):
    """A batch normalisation that may be folded into the layer before it."""

    result: ir.Value
    weight: ir.Value
    zeros: bool  # whether the layer has a bias of zeros, which torch may remove before
    recipes: tuple[Recipe, Recipe]  # of the folded weight and bias


class MadeWeights:
    """Recipes of the constant tensors in a graph as torch translated it.

    ``nodes`` have producers before consumers; initializers that are not in ``state`` are constants.
    ``functions`` are those that torch inlines later: their constants become initializers of the graph.
    """

    def __init__(
        self,
        graph: ir.Graph,
        nodes: Sequence[ir.Node],
        state: Collection[str],
        functions: Iterable[ir.Function] = (),
    ) -> None:
        self.known: dict[ir.Value, Recipe] = {}
        for value in graph.initializers.values():
            name = str(value.name)
            self.known[value] = name if name in state else CONSTANT
        self._state = state
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
                if value.const_value is not None and value.const_value.dtype.is_floating_point():
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
        assert value.const_value is not None
        if recipes is None:
            recipes = [self._recipe_of_new(str(value.name))]
        recipe = merged(recipes)
        if recipe != value.name:
            value.const_value = recorded(value.const_value, recipe)

    def _recipe_of_new(self, name: str) -> Recipe:
        """The recipe of an initializer that replaces no value of the translated graph."""
        if name in self._state:
            return step("computed", name, _OPTIMIZER)
        # Inlining adds a number to the name; the constants of a function depend on none of its inputs.
        if known_beginning(name, self._names_in_functions) is not None:
            return CONSTANT
        return step("computed", _OPTIMIZER)


def _column_of(layer: ir.Node, rank: int) -> list[int]:
    """The shape that broadcasts factors of a layer's output channels over its weight."""
    is_transposed = layer.op_type == "ConvTranspose"
    if layer.op_type == "Gemm":
        is_transposed = not layer.attributes.get_int("transB", 0)
    channels = 1 if is_transposed else 0
    return [-1 if axis == channels else 1 for axis in range(rank)]


_ONNX = "onnx::"


class JitWeights:
    """Recipes of the constant tensors in a JIT graph, read before its constants are folded.

    ``state`` has the names in the model's ``state_dict``.
    """

    def __init__(
        self,
        graph: Any,
        parameters: Mapping[str, Any],
        state: Collection[str],
    ) -> None:
        self._known: dict[int, Recipe] = {}
        for value in graph.inputs():
            name = value.debugName()
            if name in parameters:
                self._known[value.unique()] = name if name in state else CONSTANT
        # (first output of a node, position of an input) → the constant there
        self._read: dict[tuple[int, int], int] = {}
        # result of a batch normalization → recipes of weight and bias of the convolution with it
        self._norms: dict[int, tuple[Recipe, Recipe]] = {}
        # (first output of a consumer, position of the input) → the same
        self._after: dict[tuple[int, int], tuple[Recipe, Recipe]] = {}
        self._contents: dict[int, Any] = {}
        self._convolutions: dict[int, JitStep] = {}
        self._state = state
        for node in nodes_of(graph):
            self._add(node)
        self._returned = [self._norms.get(value.unique()) for value in graph.outputs()]

    def _add(self, node: Any) -> None:
        kind = node.kind()
        outputs = numbers_of_outputs(node)
        if kind in CONSTANTS:
            self._known.update(dict.fromkeys(outputs, CONSTANT))
            if node.hasAttribute("value") and node.kindOf("value") == "t":
                self._contents[outputs[0]] = node.t("value")
            return
        inputs = numbers_of_inputs(node)
        if not outputs:
            return
        for position, number in enumerate(inputs):
            if number in self._norms:
                self._after[outputs[0], position] = self._norms[number]
            if number in self._known:
                self._read[outputs[0], position] = number
        if self._known.keys().isdisjoint(inputs):
            return
        attributes = attributes_of(node, kind)
        step = JitStep(kind.removeprefix(_ONNX), inputs, outputs, attributes=attributes)
        if all(number in self._known for number in inputs):
            for place, output in enumerate(outputs):
                self._known[output] = self._result(step, node, place)
            self._add_contents(step, node)
        elif step.kind == "Conv":
            self._convolutions[outputs[0]] = step
        elif step.kind == "BatchNormalization":
            layer = self._convolutions.get(inputs[0])
            if layer is not None:
                self._fold(layer, step)

    def _add_contents(self, step: JitStep, node: Any) -> None:
        """Compute a small argument of another operator: a trace joins its starts, ends and sizes of numbers."""
        # of an operator that changes the shape, the other inputs are axes or sizes
        inputs = step.inputs[:1] if step.kind in RESHAPING else step.inputs
        operands = [self._contents[number] for number in inputs if number in self._contents]
        is_small = all(each.numel() <= MOST_DIMENSIONS for each in operands)
        if len(operands) < len(inputs) or not is_small:
            return
        sizes = getattr(node.outputsAt(0).type(), "sizes", lambda: None)()
        if step.kind in RESHAPING and sizes is not None:
            self._contents[step.outputs[0]] = operands[0].reshape(sizes)
        elif step.kind == "Concat" and all(each.dim() == 1 for each in operands):
            joined = [number for each in operands for number in each.tolist()]
            self._contents[step.outputs[0]] = operands[0].new_tensor(joined)

    def _result(self, step: JitStep, node: Any, place: int) -> Recipe:
        operands = [self._known[number] for number in step.inputs]
        if all(recipe == CONSTANT for recipe in operands):
            return CONSTANT

        def contents(position: int) -> Any:
            if position >= len(step.inputs):
                return None
            tensor = self._contents.get(step.inputs[position])
            return None if tensor is None else tensor.numpy()

        def sizes() -> Any:
            return getattr(node.outputsAt(place).type(), "sizes", lambda: None)()

        return folded(step.kind, dict(step.attributes), operands, contents, sizes, place)

    def _fold(self, layer: JitStep, norm: JitStep) -> None:
        inputs = (*layer.inputs[1:3], *norm.inputs[1:5])
        if not self._known.keys() >= set(inputs):
            return
        of_weight, *of_bias = (self._known[number] for number in layer.inputs[1:3])
        of_norm = [self._known[number] for number in norm.inputs[1:5]]
        kernel_rank = len(dict(layer.attributes).get("kernel_shape", ()))
        self._norms[norm.outputs[0]] = batchnorm_folded(
            of_weight,
            of_bias[0] if of_bias else None,
            of_norm,
            dict(norm.attributes).get("epsilon", 1e-5),
            [-1, *[1] * (kernel_rank + 1)],  # output channels, then input channels and kernel
            "torch_sqrt",
        )

    def finish(self, graph: Any, steps: Iterable[JitStep]) -> dict[str, Recipe]:
        """Name of an initializer → its recipe, unless it is the parameter of this name.

        ``steps`` are those of the graph.
        """
        names = {value.unique(): value.debugName() for value in graph.inputs()}
        nodes = _reads_without_identities(steps, names)
        joined = self._convolutions_with_norms(graph, nodes)
        found: dict[str, list[Recipe]] = {}
        for output, inputs in nodes:
            for position, number in enumerate(inputs):
                if number not in names:
                    continue
                recipe = self._recipe(output, position, names[number], joined)
                if recipe is not None:
                    found.setdefault(names[number], []).append(recipe)
        recipes = {name: merged(recipes) for name, recipes in found.items()}
        return {name: recipe for name, recipe in recipes.items() if recipe != name}

    def _convolutions_with_norms(
        self, graph: Any, nodes: Sequence[tuple[int, tuple[int, ...]]]
    ) -> dict[int, tuple[Recipe, Recipe]]:
        """Tensor read in place of the result of a normalization → recipes of weight and bias.

        If torch folded the normalization, the convolution produces that tensor.
        """
        joined = {}
        for value, recipes in zip(graph.outputs(), self._returned, strict=False):
            if recipes:
                joined[value.unique()] = recipes
        for output, inputs in nodes:
            for position, number in enumerate(inputs):
                after = self._after.get((output, position))
                if after is not None:
                    joined[number] = after
        return joined

    def _recipe(
        self,
        output: int,
        position: int,
        name: str,
        joined: Mapping[int, tuple[Recipe, Recipe]],
    ) -> Recipe | None:
        """The recipe of an initializer at an input of a node; None if unknown."""
        # 1 and 2 are the positions of the weight and the bias of a convolution
        if output in joined and output not in self._norms and position in (1, 2):
            return joined[output][position - 1]
        if (output, position) in self._read:
            return self._known[self._read[output, position]]
        if name in self._state:
            return step("computed", name, _OPTIMIZER)
        return None


def _reads_without_identities(
    steps: Iterable[JitStep], names: Container[int]
) -> list[tuple[int, tuple[int, ...]]]:
    """The first output and the inputs of each node.

    torch replaces an initializer that equals another one by an Identity of that one: its consumers
    read the other one here.
    """
    same: dict[int, int] = {}
    nodes = []
    for node in steps:
        own_inputs = node.inputs[: len(node.inputs) - node.from_blocks]
        if node.kind == f"{_ONNX}Identity" and own_inputs[0] in names:
            same[node.outputs[0]] = own_inputs[0]
        elif node.outputs:
            inputs = tuple(same.get(number, number) for number in own_inputs)
            nodes.append((node.outputs[0], inputs))
    return nodes
