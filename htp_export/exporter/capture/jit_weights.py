"""Recipes of the initializers of an export by TorchScript."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

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
from htp_export.model.folded_recipes import batchnorm_folded, folded, merged
from htp_export.shapes.operator_kinds import RESHAPING

OPTIMIZER = "torch's optimizer"
"""The tool in recipes of initializers that torch's optimizer made."""

_ONNX = "onnx::"

_POSITIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
}
"""Operators by which a trace computes positions: each part of a ``split`` begins where the last one ends."""


class JitWeights:
    """Recipes of the constant tensors in a JIT graph, read before its constants are folded.

    ``state``: name in the model's ``state_dict`` → name in recipes.
    """

    def __init__(
        self,
        graph: Any,
        parameters: Mapping[str, Any],
        state: Mapping[str, str],
    ) -> None:
        self._known: dict[int, Recipe] = {}
        for value in graph.inputs():
            name = value.debugName()
            if name in parameters:
                self._known[value.unique()] = state.get(name, CONSTANT)
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
        returned = [value.unique() for value in graph.outputs()]
        self._returned = [self._norms.get(number) for number in returned]
        self._returned_recipes = [self._known.get(number) for number in returned]

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
        """Compute a small argument of another operator: a trace joins and adds starts, ends and sizes."""
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
        elif step.kind in _POSITIONS and not any(each.is_floating_point() for each in operands):
            self._contents[step.outputs[0]] = _POSITIONS[step.kind](*operands)

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
        """Name of an initializer → its recipe.

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
        for value, recipe in zip(graph.outputs(), self._returned_recipes, strict=False):
            if recipe is not None and value.unique() in names:
                found.setdefault(names[value.unique()], []).append(recipe)
        return {name: merged(recipes) for name, recipes in found.items()}

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
            return step("computed", self._state[name], OPTIMIZER)
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
