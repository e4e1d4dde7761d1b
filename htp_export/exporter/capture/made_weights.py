"""How the initializers of an export were made: of which parameters and buffers, and by which operators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
from htp_export.format.recipes import CONSTANT, Recipe
from htp_export.model.recipes import batchnorm_folded, folded, follow, merged, recorded
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
            value: str(value.name) if value.name in state else CONSTANT
            for value in graph.initializers.values()
        }
        self._state, self._foldings = state, list[_Folding]()
        follow(graph, nodes, self.known)
        for node in nodes:
            if (
                is_standard(node, "BatchNormalization")
                and (folding := self._folding(node)) is not None
            ):
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
        of_norm, column = (
            [self.known[value] for value in read[-4:]],
            _column_of(layer, len(tensor.shape)),
        )
        epsilon = norm.attributes.get_float("epsilon", 1e-5)
        zeros = bias == [CONSTANT]
        recipes = batchnorm_folded(
            weight, bias[0] if bias and not zeros else None, of_norm, epsilon, column
        )
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
                made.update(
                    (part, [recipe])
                    for part, recipe in zip(parts, recipes, strict=True)
                    if part is not None
                )
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
    turned = layer.op_type == "ConvTranspose" or (
        layer.op_type == "Gemm" and not layer.attributes.get_int("transB", 0)
    )
    return [-1 if axis == int(turned) else 1 for axis in range(rank)]


_ONNX = "onnx::"


class JitWeights:
    """A graph before its constants are folded; ``state`` has the names in the model's ``state_dict``."""

    def __init__(self, graph: Any, parameters: Mapping[str, Any], state: Collection[str]) -> None:
        named = {
            value.unique(): value.debugName()
            for value in graph.inputs()
            if value.debugName() in parameters
        }
        self._known: dict[int, Recipe] = {
            number: name if name in state else CONSTANT for number, name in named.items()
        }
        # the first output of a node and a place → the constant read there
        self._read: dict[tuple[int, int], int] = {}
        # what a normalisation makes → the convolution with it
        self._norms: dict[int, tuple[Recipe, Recipe]] = {}
        # a node that reads it, and where → the same
        self._after: dict[tuple[int, int], tuple[Recipe, Recipe]] = {}
        self._contents: dict[int, Any] = {}
        self._convolutions: dict[int, JitStep] = {}
        self._state = state
        for node in nodes_of(graph):
            self._note(node)
        self._returned = [self._norms.get(value.unique()) for value in graph.outputs()]

    def _note(self, node: Any) -> None:
        kind, outputs = node.kind(), numbers_of_outputs(node)
        if kind in CONSTANTS:
            self._known.update(dict.fromkeys(outputs, CONSTANT))
            if node.hasAttribute("value") and node.kindOf("value") == "t":
                self._contents[outputs[0]] = node.t("value")
            return
        inputs = numbers_of_inputs(node)
        if outputs:
            read = enumerate(inputs)
            self._after.update(
                ((outputs[0], at), self._norms[number])
                for at, number in read
                if number in self._norms
            )
        if not outputs or self._known.keys().isdisjoint(inputs):
            return
        self._read.update(
            ((outputs[0], place), number)
            for place, number in enumerate(inputs)
            if number in self._known
        )
        step = JitStep(
            kind.removeprefix(_ONNX), inputs, outputs, attributes=attributes_of(node, kind)
        )
        if all(number in self._known for number in inputs):
            self._known.update(
                (output, self._result(step, node, place)) for place, output in enumerate(outputs)
            )
        elif step.kind == "Conv":
            self._convolutions[outputs[0]] = step
        elif (
            step.kind == "BatchNormalization"
            and (layer := self._convolutions.get(inputs[0])) is not None
        ):
            self._fold(layer, step)

    def _result(self, step: JitStep, node: Any, place: int) -> Recipe:
        operands = [self._known[number] for number in step.inputs]
        if all(each == CONSTANT for each in operands):
            return CONSTANT

        def contents(at: int) -> Any:
            tensor = self._contents.get(step.inputs[at]) if at < len(step.inputs) else None
            return None if tensor is None else tensor.numpy()

        def sizes() -> Any:
            return getattr(node.outputsAt(place).type(), "sizes", lambda: None)()

        return folded(step.kind, dict(step.attributes), operands, contents, sizes, place)

    def _fold(self, layer: JitStep, norm: JitStep) -> None:
        if any(number not in self._known for number in (*layer.inputs[1:3], *norm.inputs[1:5])):
            return
        weight, *bias = (self._known[number] for number in layer.inputs[1:3])
        of_norm = [self._known[number] for number in norm.inputs[1:5]]
        column = [-1, *[1] * (len(dict(layer.attributes).get("kernel_shape", ())) + 1)]
        epsilon = dict(norm.attributes).get("epsilon", 1e-5)
        made = batchnorm_folded(
            weight, bias[0] if bias else None, of_norm, epsilon, column, "torch_sqrt"
        )
        self._norms[norm.outputs[0]] = made

    def finish(self, graph: Any) -> dict[str, Recipe]:
        """Name of an initializer → how it was made, where that is not the parameter of this name."""
        names = {value.unique(): value.debugName() for value in graph.inputs()}
        nodes, same = list[tuple[tuple[int, ...], tuple[int, ...]]](), dict[int, int]()
        for node in nodes_of(graph):
            outputs, inputs = numbers_of_outputs(node), numbers_of_inputs(node)
            if node.kind() == f"{_ONNX}Identity" and inputs[0] in names:  # for one that is gone
                same[outputs[0]] = inputs[0]
            elif outputs:
                nodes.append((outputs, tuple(same.get(number, number) for number in inputs)))
        joined = {
            value.unique(): made
            for value, made in zip(graph.outputs(), self._returned, strict=False)
            if made
        }
        for outputs, inputs in nodes:
            for place, number in enumerate(inputs):
                if (made := self._after.get((outputs[0], place))) is not None:
                    joined[number] = made
        found: dict[str, list[Recipe]] = {}
        for outputs, inputs in nodes:
            for place, number in enumerate(inputs):
                if (
                    number in names
                    and (recipe := self._recipe(outputs[0], place, names[number], joined))
                    is not None
                ):
                    found.setdefault(names[number], []).append(recipe)
        merged_recipes = {name: merged(recipes) for name, recipes in found.items()}
        return {name: recipe for name, recipe in merged_recipes.items() if recipe != name}

    def _recipe(
        self, output: int, place: int, name: str, joined: Mapping[int, tuple[Recipe, Recipe]]
    ) -> Recipe | None:
        """How an initializer was made that a node reads in a place."""
        if output in joined and output not in self._norms and place in (1, 2):
            return joined[output][place - 1]
        if (output, place) in self._read:
            return self._known[self._read[output, place]]
        return ["computed", name, "torch's optimizer"] if name in self._state else None
