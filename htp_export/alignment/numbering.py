"""Value numbers of the original model: equal tensors have the same one.

Equal tensors have the same number, in one model and across two: two nodes with the same operator
and attributes that read the same tensors compute the same tensors (Click, "Global code motion,
global value numbering", PLDI 1995). With the numbers of the original model, a tensor of the result
is found whatever its name. The output of a node without effect has the number of its input.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from htp_export.alignment.graph_summary import NOTHING, GraphSummary, SummaryNode, content_of
from htp_export.shapes.operator_kinds import COMMUTATIVE, NEUTRAL, RANDOM, RESHAPING

FLOATS = frozenset((1, 10, 11, 16))  # FLOAT, FLOAT16, DOUBLE, BFLOAT16: one may stand for the other

# types of quantized numbers: integers and floats of at most 8 bits
LEVELS = frozenset((2, 3, 17, 18, 19, 20, 21, 22))


# Without effect if shape and element type stay.
_KEEPS_ORDER = RESHAPING | {"Cast", "CastLike", "Expand"}

_SINGLE = {
    op: frozenset(content_of(ir.tensor(number, ir.DataType(dtype))) for dtype in FLOATS)
    for op, number in NEUTRAL.items()
    if not isinstance(number, bool)
}
"""Operator → contents of single numbers with which it gives its first input back."""

Key = tuple[object, ...]


def repeats(node: SummaryNode) -> bool:
    """Whether the output of a node is its first input in any case.

    Examples:
        >>> [repeats(SummaryNode("Concat", "", inputs, (2,))) for inputs in ((0,), (0, 1))]
        [True, False]
    """
    return node.op == "Identity" or (node.op in ("Dropout", "Concat") and len(node.inputs) == 1)


class Numbering:
    """The numbers of a model's tensors: ``number`` by value, and by node ``idle``, whether its output is its input.

    The argument ``idle`` has further nodes that give back an input → this input.
    """

    def __init__(self, summary: GraphSummary, idle: Mapping[int, int] | None = None) -> None:
        self.summary, self._known_idle = summary, idle or {}
        # The index of the first value of a tensor is its number.
        self.number: list[int] = [*range(len(summary.values)), NOTHING]
        self.idle = [False] * (len(summary.nodes) + 1)
        self._nodes: dict[Key | None, int] = {}
        self._constants: dict[str, int] = {}
        self._united: dict[int, int] = {}
        for index, value in enumerate(summary.values):
            if value.content:
                self.number[index] = self._constants.setdefault(value.content, index)
        for index, node in enumerate(summary.nodes):
            self._add(index, node)
        # number → the values that have it, in order of execution
        self.members: dict[int, list[int]] = {}
        for place, number in enumerate(self.number[:-1]):
            self.members.setdefault(number, []).append(place)

    def _add(self, index: int, node: SummaryNode) -> None:
        same = (
            node.inputs[0]
            if self.passes_on(self.summary, node)
            else self._known_idle.get(index, NOTHING)
        )
        if same != NOTHING:
            self.idle[index] = True
            self.number[node.outputs[0]] = self.number[same]
            return
        key = self._key(node, [self.number[value] for value in node.inputs])
        if key is None:
            return
        first = self._nodes.setdefault(key, index)
        if first != index:
            for mine, theirs in zip(node.outputs, self.summary.nodes[first].outputs, strict=False):
                if mine != NOTHING and theirs != NOTHING:
                    self.number[mine] = self.number[theirs]

    @staticmethod
    def passes_on(summary: GraphSummary, node: SummaryNode) -> bool:
        """Whether a node gives back its first input, as its operator, shapes and element types tell."""
        if (
            not node.inputs
            or node.inputs[0] == NOTHING
            or len(node.outputs) != 1
            or node.outputs[0] == NOTHING
        ):
            return False
        if repeats(node) or summary.values[node.inputs[-1]].content in _SINGLE.get(node.op, ()):
            return True
        if node.op not in _KEEPS_ORDER:
            return False
        (shape, dtype), result = summary.shape(node.inputs[0]), summary.shape(node.outputs[0])
        return shape is not None and dtype != 0 and "?" not in shape and (shape, dtype) == result

    @staticmethod
    def _key(node: SummaryNode, numbers: list[int]) -> Key | None:
        """Equal for nodes that compute the same tensors; None for a node that equals no other."""
        if node.has_bodies or not numbers or node.op in RANDOM:
            return None
        return (node.op, node.attributes, *(sorted(numbers) if node.op in COMMUTATIVE else numbers))

    def made_by(self, node: SummaryNode, numbers: list[int]) -> SummaryNode | None:
        """The node of this model that computes the same as a node with these inputs."""
        key = self._key(node, numbers)
        return self.summary.nodes[self._nodes[key]] if key in self._nodes else None

    def constant(self, content: str) -> int:
        """The number of a small constant; `NOTHING` if the model has no equal one."""
        return self.number[self._constants.get(content, NOTHING)]

    def unite(self, number: int, equal: int) -> None:
        """Make two numbers one, the first: they are numbers of one tensor."""
        self._united[equal] = number
        for value in self.members.pop(equal, ()):
            self.number[value] = number
            self.members[number].append(value)

    def current(self, number: int) -> int:
        """The present number of a tensor whose number may have been united with another."""
        while number in self._united:
            number = self._united[number]
        return number
