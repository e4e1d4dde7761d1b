"""How the initializers of a TorchScript export were made, while it folds constants into new ones.

Values keep their numbers: the inputs of a node, before and after, tell which value each new initializer stands for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from htp_export.exporter.capture.jit_graph import (
    CONSTANTS,
    JitStep,
    attributes_of,
    nodes_of,
    numbers_of_inputs,
    numbers_of_outputs,
)
from htp_export.format.recipes import CONSTANT, Recipe
from htp_export.model.recipes import batchnorm_folded, folded, merged

_ONNX = "onnx::"


class JitWeights:
    """A graph before its constants are folded; ``state`` has the names in the model's ``state_dict``."""

    def __init__(self, graph: Any, parameters: Mapping[str, Any], state: Collection[str]) -> None:
        named = {value.unique(): value.debugName() for value in graph.inputs() if value.debugName() in parameters}
        self._known: dict[int, Recipe] = {number: name if name in state else CONSTANT for number, name in named.items()}
        self._read: dict[tuple[int, int], int] = {}  # the first output of a node and a place → the constant read there
        self._norms: dict[int, tuple[Recipe, Recipe]] = {}  # what a normalisation makes → the convolution with it
        self._after: dict[tuple[int, int], tuple[Recipe, Recipe]] = {}  # a node that reads it, and where → the same
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
            self._after.update(((outputs[0], at), self._norms[number]) for at, number in read if number in self._norms)
        if not outputs or self._known.keys().isdisjoint(inputs):
            return
        self._read.update(((outputs[0], place), number) for place, number in enumerate(inputs) if number in self._known)
        step = JitStep(kind.removeprefix(_ONNX), inputs, outputs, attributes=attributes_of(node, kind))
        if all(number in self._known for number in inputs):
            self._known.update((output, self._result(step, node, place)) for place, output in enumerate(outputs))
        elif step.kind == "Conv":
            self._convolutions[outputs[0]] = step
        elif step.kind == "BatchNormalization" and (layer := self._convolutions.get(inputs[0])) is not None:
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
        made = batchnorm_folded(weight, bias[0] if bias else None, of_norm, epsilon, column, "torch_sqrt")
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
        joined = {value.unique(): made for value, made in zip(graph.outputs(), self._returned, strict=False) if made}
        for outputs, inputs in nodes:
            for place, number in enumerate(inputs):
                if (made := self._after.get((outputs[0], place))) is not None:
                    joined[number] = made
        found: dict[str, list[Recipe]] = {}
        for outputs, inputs in nodes:
            for place, number in enumerate(inputs):
                if number in names and (recipe := self._recipe(outputs[0], place, names[number], joined)) is not None:
                    found.setdefault(names[number], []).append(recipe)
        merged_recipes = {name: merged(recipes) for name, recipes in found.items()}
        return {name: recipe for name, recipe in merged_recipes.items() if recipe != name}

    def _recipe(self, output: int, place: int, name: str, joined: Mapping[int, tuple[Recipe, Recipe]]) -> Recipe | None:
        """How an initializer was made that a node reads in a place."""
        if output in joined and output not in self._norms and place in (1, 2):
            return joined[output][place - 1]
        if (output, place) in self._read:
            return self._known[self._read[output, place]]
        return ["computed", name, "torch's optimizer"] if name in self._state else None
