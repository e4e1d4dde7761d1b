"""Model inputs classified by their consumers (tokens, images, sound, masks), and the values that depend on each."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import onnx_ir as ir

from htp_export.model.dependence import dependence, reads_and_results
from htp_export.model.graph_facts import GraphFacts
from htp_export.shapes.operator_kinds import SIZES_ONLY, is_standard

__all__ = ["ModelInput", "ModelInputs"]

_NEAREST_VALUES = 80
"""Values behind an input that are visited to classify it: more than the casts, scalings and reshapes before an
embedding or the first convolution, and few enough for inputs such as masks that every layer reads."""

_LOOK_UP = frozenset(("Gather", "GatherND"))
_MIXING = frozenset((
    "Attention", "Conv", "ConvInteger", "ConvTranspose", "Einsum", "GRU", "Gemm", "LSTM", "MatMul", "MatMulInteger",
    "QLinearConv", "RNN", "Softmax"
))  # fmt: skip
"""The results of these are computed features, and no longer the input in another form."""


@dataclass(frozen=True)
class ModelInput:
    """One input of the model.

    Attributes:
        value: The input.
        kind: ``"tokens"``, indices into a table of vectors; ``"image"``, with two or three spatial dimensions;
            ``"sound"``, a signal or a spectrum over time that enters a convolution; ``"features"``, other numbers; or
            ``"control"``: masks, positions, scalars.
        convolution: The first convolution that it enters, with only reshapes and scalings before.
    """

    value: ir.Value
    kind: str
    convolution: ir.Node | None = None

    @property
    def name(self) -> str:
        """The name of the input."""
        return self.value.name or "unnamed"


class ModelInputs:
    """The inputs of a model, and the inputs on which each value depends.

    Attributes:
        all: All inputs of the graph that are not weights.
    """

    def __init__(self, facts: GraphFacts) -> None:
        self._facts = facts
        graph = facts.tagged.model.graph
        inputs = [value for value in graph.inputs if not value.is_initializer()]
        self.all = [_model_input(facts, value) for value in inputs]
        starts: dict[ir.Value | None, int] = {model_input.value: 1 << k for k, model_input in enumerate(self.data)}
        self._reach = dependence(reads_and_results(facts.nodes), starts)

    @property
    def data(self) -> list[ModelInput]:
        """The inputs that carry data, without control inputs."""
        return [model_input for model_input in self.all if model_input.kind != "control"]

    def of(self, kind: str) -> list[ModelInput]:
        """The inputs of one kind."""
        return [model_input for model_input in self.all if model_input.kind == kind]

    def reaching(self, value: ir.Value | None) -> int:
        """Return the data inputs on which a value depends, one bit each; dependence on sizes only does not count."""
        return 0 if value is None else self._reach.get(value, 0)


def _model_input(facts: GraphFacts, value: ir.Value) -> ModelInput:
    rank, dtype = facts.rank(value), facts.dtype(value)
    floating = dtype is not None and dtype.is_floating_point()
    looked_up, convolution = _what_follows(facts, value)
    if not floating and looked_up:
        return ModelInput(value, "tokens")
    if convolution is not None and rank is not None:
        weight = facts.rank(convolution.inputs[1]) or 0
        if rank >= 4 and weight >= 4:
            return ModelInput(value, "image", convolution)
        if floating and rank in (2, 3):
            return ModelInput(value, "sound", convolution)
    if floating and rank is not None and rank >= 2 and value.uses():
        return ModelInput(value, "features")
    return ModelInput(value, "control")


def _what_follows(facts: GraphFacts, value: ir.Value) -> tuple[bool, ir.Node | None]:
    """Return whether an input indexes a table, and the first convolution that it enters."""
    pending, seen = deque([value]), {value}
    convolution: ir.Node | None = None
    for _ in range(_NEAREST_VALUES):
        if not pending:
            break
        current = pending.popleft()
        for use in current.uses():
            node = use.node
            if node.op_type in _LOOK_UP and use.idx == 1 and _is_table(facts, node.inputs[0]):
                return True, convolution
            if is_standard(node, "Conv") and use.idx == 0 and convolution is None:
                convolution = node
            if node.op_type in _MIXING or is_standard(node, *SIZES_ONLY) or _counts(facts, node, current):
                continue
            for output in node.outputs:
                if output not in seen:
                    seen.add(output)
                    pending.append(output)
    return False, convolution


def _counts(facts: GraphFacts, node: ir.Node, value: ir.Value) -> bool:
    """Return whether a node computes positions from integers: a table indexed by these is no token embedding."""
    dtype = facts.dtype(value)
    if dtype is None or dtype.is_floating_point():
        return False
    others = [operand for operand in node.inputs if operand is not None and operand is not value]
    sums = node.op_type in ("Add", "Sub", "Mul") and not all(facts.is_constant(operand) for operand in others)
    return sums or node.op_type == "CumSum"


def _is_table(facts: GraphFacts, value: ir.Value | None) -> bool:
    """Return whether a value is a table of weight vectors, possibly scaled or cast."""
    dtype = facts.dtype(value)
    shape = facts.shape(value)
    if not facts.is_constant(value) or shape is None or len(shape) != 2 or dtype is None:
        return False
    return dtype.is_floating_point() or dtype in (ir.DataType.INT8, ir.DataType.UINT8)
