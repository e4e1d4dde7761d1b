"""What a model is given, by what becomes of it: tokens, images, sound, masks; and how far each reaches."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import onnx_ir as ir

from htp_export.model.dependence import dependence, reads_and_results
from htp_export.model.graph_facts import GraphFacts
from htp_export.model.operators import SIZES_ONLY, is_standard

__all__ = ["Stream", "Streams"]

_NEAR = 80  # nodes behind an input that are looked at to tell what it is

_LOOK_UP = frozenset(("Gather", "GatherND"))
_MIXING = frozenset((
    "Attention", "Conv", "ConvInteger", "ConvTranspose", "Einsum", "GRU", "Gemm", "LSTM", "MatMul", "MatMulInteger",
    "QLinearConv", "RNN", "Softmax"
))  # fmt: skip
"""What lies behind one of these is not the input any more, but what the model makes of it."""


@dataclass(frozen=True)
class Stream:
    """An input that carries data.

    Attributes:
        value: The input.
        kind: ``"tokens"``, which are looked up in a table; ``"image"``, with two or three dimensions of space;
            ``"sound"``, a signal or a spectrum over time that enters a convolution; ``"features"``, other numbers; or
            ``"control"``, which is none of these: masks, positions, scalars.
        convolution: The first convolution that it enters, with nothing but changes of shape and scale before.
        in_patches: Whether it is an image that is cut in patches by changes of shape, which enter a linear layer.
    """

    value: ir.Value
    kind: str
    convolution: ir.Node | None = None
    in_patches: bool = False

    @property
    def name(self) -> str:
        """The name of the input."""
        return self.value.name or "unnamed"


class Streams:
    """The inputs of a model, and which of them each value depends on.

    Args:
        facts: The graph.

    Attributes:
        all: Every input of the graph that is no weight.
    """

    def __init__(self, facts: GraphFacts) -> None:
        self._facts = facts
        graph = facts.tagged.model.graph
        inputs = [value for value in graph.inputs if not value.is_initializer()]
        self.all = [_stream(facts, value) for value in inputs]
        starts: dict[ir.Value | None, int] = {stream.value: 1 << k for k, stream in enumerate(self.data)}
        self._reach = dependence(reads_and_results(facts.nodes), starts)

    @property
    def data(self) -> list[Stream]:
        """The inputs that carry data."""
        return [stream for stream in self.all if stream.kind != "control"]

    def of(self, kind: str) -> list[Stream]:
        """The inputs of one kind."""
        return [stream for stream in self.all if stream.kind == kind]

    def reaching(self, value: ir.Value | None) -> int:
        """The data inputs that a value is computed from, one bit each; sizes alone do not count."""
        return 0 if value is None else self._reach.get(value, 0)


def _stream(facts: GraphFacts, value: ir.Value) -> Stream:
    rank, dtype = facts.rank(value), facts.dtype(value)
    floating = dtype is not None and dtype.is_floating_point()
    looked_up, convolution, in_patches = _what_follows(facts, value)
    if not floating and looked_up:
        return Stream(value, "tokens")
    if convolution is not None and rank is not None:
        weight = facts.rank(convolution.inputs[1]) or 0
        if rank >= 4 and weight >= 4:
            return Stream(value, "image", convolution)
        if floating and rank in (2, 3):
            return Stream(value, "sound", convolution)
    if floating and in_patches and convolution is None:
        return Stream(value, "image", in_patches=True)
    if floating and rank is not None and rank >= 2 and value.uses():
        return Stream(value, "features")
    return Stream(value, "control")


def _what_follows(facts: GraphFacts, value: ir.Value) -> tuple[bool, ir.Node | None, bool]:
    """Whether rows of a table are looked up by an input, the first convolution that it enters, and whether patches do.

    Patches are what two dimensions of space become that are split and put in another order; they enter a linear layer.
    """
    pending, seen = deque([value]), {value}
    convolution: ir.Node | None = None
    split: set[ir.Value] = set()
    in_patches = False
    for _ in range(_NEAR):
        if not pending:
            break
        current = pending.popleft()
        for use in current.uses():
            node = use.node
            if node.op_type in _LOOK_UP and use.idx == 1 and _is_table(facts, node.inputs[0]):
                return True, convolution, in_patches
            if is_standard(node, "Conv") and use.idx == 0 and convolution is None:
                convolution = node
            if is_standard(node, "MatMul", "Gemm") and use.idx == 0 and current in split:
                in_patches = in_patches or facts.is_constant(node.inputs[1])
            if node.op_type in _MIXING or is_standard(node, *SIZES_ONLY) or _counts(facts, node, current):
                continue
            splits = is_standard(node, "Reshape") and _splits_space(facts, current, node.outputs[0])
            for output in node.outputs:
                if splits or current in split:
                    split.add(output)
                if output not in seen:
                    seen.add(output)
                    pending.append(output)
    return False, convolution, in_patches


def _splits_space(facts: GraphFacts, whole: ir.Value, parts: ir.Value) -> bool:
    """Whether a reshaping splits at least two dimensions of an image."""
    before, after = facts.rank(whole), facts.rank(parts)
    return before is not None and after is not None and before >= 4 and after >= before + 2


def _counts(facts: GraphFacts, node: ir.Node, value: ir.Value) -> bool:
    """Whether a node makes positions of whole numbers: what is looked up by these is no token."""
    dtype = facts.dtype(value)
    if dtype is None or dtype.is_floating_point():
        return False
    others = [other for other in node.inputs if other is not None and other is not value]
    sums = node.op_type in ("Add", "Sub", "Mul") and not all(facts.is_constant(other) for other in others)
    return sums or node.op_type == "CumSum"


def _is_table(facts: GraphFacts, value: ir.Value | None) -> bool:
    """Whether a value is a table of vectors of weights; a scaled or cast one is one too."""
    dtype = facts.dtype(value)
    shape = facts.shape(value)
    if not facts.is_constant(value) or shape is None or len(shape) != 2 or dtype is None:
        return False
    return dtype.is_floating_point() or dtype in (ir.DataType.INT8, ir.DataType.UINT8)
