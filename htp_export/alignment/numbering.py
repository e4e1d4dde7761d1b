"""Value numbers of the original model: equal tensors have the same number.

Two nodes with the same operator and attributes that read the same tensors compute the same tensors,
in one model and across two (Click, "Global code motion, global value numbering", PLDI 1995). By the
numbers of the original model, a tensor of the result is found whatever its name. The output of a
node without effect has the number of its input, and that of a reshape which restores the shape of
an earlier tensor has the number of that tensor.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from htp_export.alignment.graph_summary import NOTHING, GraphSummary, SummaryNode, content_of
from htp_export.shapes.operator_kinds import COMMUTATIVE, NEUTRAL, RANDOM, RESHAPING

# FLOAT, FLOAT16, DOUBLE, BFLOAT16: a tool may convert one to the other
FLOATS = frozenset((1, 10, 11, 16))

# types of quantized numbers: integers and floats of at most 8 bits
LEVELS = frozenset((2, 3, 17, 18, 19, 20, 21, 22))

# operators without effect if shape and element type do not change
_KEEPS_ORDER = RESHAPING | {"Cast", "CastLike", "Expand"}


def _float_contents(number: float) -> frozenset[str]:
    """The contents of a number in each type of `FLOATS`."""
    return frozenset(content_of(ir.tensor(number, ir.DataType(dtype))) for dtype in FLOATS)


_SINGLE = {
    op: _float_contents(number) for op, number in NEUTRAL.items() if not isinstance(number, bool)
}
"""Operator → contents of its neutral numbers: with one of them, it returns its first input."""

_LOOK_BACK = 40
"""Reshapes between a tensor and the one that restores its shape, at most: in files there are few."""

Key = tuple[object, ...]


def is_copy(node: SummaryNode) -> bool:
    """Whether a node always returns its first input, for any shapes.

    Examples:
        >>> [is_copy(SummaryNode("Concat", "", inputs, (2,))) for inputs in ((0,), (0, 1))]
        [True, False]
    """
    return node.op == "Identity" or (node.op in ("Dropout", "Concat") and len(node.inputs) == 1)


class Numbering:
    """The value numbers of a model.

    Args:
        summary: The model.
        idle: Further nodes that return an input unchanged → this input.
        by_shapes: Whether a reshape that restores the shape of an earlier tensor returns that tensor.

    Attributes:
        number: Value → its number; the last entry is for `NOTHING`.
        idle: Node → whether its output is its input, or an earlier tensor that it restores.
        members: Number → the values that have it, in order of execution.
    """

    def __init__(
        self,
        summary: GraphSummary,
        idle: Mapping[int, int] | None = None,
        *,
        by_shapes: bool = True,
    ) -> None:
        self.summary, self._known_idle, self._by_shapes = summary, idle or {}, by_shapes
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
        """Number the outputs of one node."""
        if self.returns_input(self.summary, node):
            same = node.inputs[0]
        else:
            same = self._known_idle.get(index, NOTHING)
        if same == NOTHING and self._by_shapes and node.op in RESHAPING:
            same = self._restored(node)
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

    def _restored(self, node: SummaryNode) -> int:
        """The earlier tensor whose shape a reshape restores, through reshapes only; else `NOTHING`."""
        form, value = self.summary.shape(node.outputs[0]), node.inputs[0]
        if form[0] is None or "?" in form[0] or form[1] == 0:
            return NOTHING
        for _ in range(_LOOK_BACK):
            if self.summary.shape(value) == form:
                return value
            maker = self.summary.maker[value]
            if maker == NOTHING or self.summary.nodes[maker].op not in RESHAPING:
                return NOTHING
            value = self.summary.nodes[maker].inputs[0]
        return NOTHING

    @staticmethod
    def returns_input(summary: GraphSummary, node: SummaryNode) -> bool:
        """Whether a node returns its first input, by its operator, shapes and element types."""
        if len(node.inputs) == 0 or len(node.outputs) != 1:
            return False
        if NOTHING in (node.inputs[0], node.outputs[0]):
            return False
        if is_copy(node) or summary.values[node.inputs[-1]].content in _SINGLE.get(node.op, ()):
            return True
        if node.op not in _KEEPS_ORDER:
            return False
        shape, dtype = summary.shape(node.inputs[0])
        if shape is None or "?" in shape or dtype == 0:
            return False
        return (shape, dtype) == summary.shape(node.outputs[0])

    @staticmethod
    def _key(node: SummaryNode, numbers: list[int]) -> Key | None:
        """Equal for nodes that compute the same tensors; None for a node that equals no other."""
        if node.has_bodies or not numbers or node.op in RANDOM:
            return None
        operands = sorted(numbers) if node.op in COMMUTATIVE else numbers
        return (node.op, node.attributes, *operands)

    def equal_node(self, node: SummaryNode, numbers: list[int]) -> SummaryNode | None:
        """The node of this model that computes the same tensors as a node with these inputs."""
        key = self._key(node, numbers)
        return self.summary.nodes[self._nodes[key]] if key in self._nodes else None

    def constant(self, content: str) -> int:
        """The number of a small constant; `NOTHING` if the model has no equal one."""
        return self.number[self._constants.get(content, NOTHING)]

    def unite(self, number: int, equal: int) -> None:
        """Unite two numbers of one tensor; the first one remains."""
        self._united[equal] = number
        for value in self.members.pop(equal, ()):
            self.number[value] = number
            self.members[number].append(value)

    def current(self, number: int) -> int:
        """The present number of a tensor, also if it was united with another one."""
        while number in self._united:
            number = self._united[number]
        return number
