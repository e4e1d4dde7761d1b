"""Value numbering: tensors that are the same have the same number, in one model and across two.

Two nodes with the same operator and attributes that read the same tensors make the same tensors (Click, "Global code
motion, global value numbering", PLDI 1995). Numbered with the table of the model before, a tensor of the model after
is found however it is called now. What only passes on what it is given makes nothing new.
"""

from __future__ import annotations

from htp_export.model.operators import COMMUTATIVE, RANDOM, RESHAPING
from htp_export.provenance.graph_summary import NOTHING, GraphSummary, SummaryNode

__all__ = ["Numbering", "repeats"]

# Without effect where they give back the shape and element type that they were given.
_KEEPS_ORDER = RESHAPING | {"Cast", "CastLike", "Expand"}

Key = tuple[object, ...]


def repeats(node: SummaryNode) -> bool:
    """Whether a node gives back its first input, whatever that is."""
    return node.op == "Identity" or (node.op == "Dropout" and len(node.inputs) == 1)


class Numbering:
    """The numbers of a model's tensors.

    Attributes:
        number: Value → its number.
        idle: Node → whether it gives back what it was given.
    """

    def __init__(self, summary: GraphSummary) -> None:
        self.summary = summary
        self.number = list(range(len(summary.values)))  # a new tensor has the number of the value that it was first
        self.idle = [False] * len(summary.nodes)
        self._nodes: dict[Key, int] = {}
        self._constants: dict[str, int] = {}
        self._members: dict[int, list[int]] | None = None
        self._united: dict[int, int] = {}
        for index, value in enumerate(summary.values):
            if value.content:
                self.number[index] = self._constants.setdefault(value.content, index)
        for index, node in enumerate(summary.nodes):
            self._add(index, node)

    def _add(self, index: int, node: SummaryNode) -> None:
        if self._passes_on(node):
            self.idle[index] = True
            self.number[node.outputs[0]] = self.number[node.inputs[0]]
            return
        key = self.key(node, [NOTHING if value == NOTHING else self.number[value] for value in node.inputs])
        if key is None:
            return
        first = self._nodes.setdefault(key, index)
        if first != index:
            for mine, theirs in zip(node.outputs, self.summary.nodes[first].outputs, strict=False):
                if mine != NOTHING and theirs != NOTHING:
                    self.number[mine] = self.number[theirs]

    def _passes_on(self, node: SummaryNode) -> bool:
        if not node.inputs or node.inputs[0] == NOTHING or len(node.outputs) != 1 or node.outputs[0] == NOTHING:
            return False
        if repeats(node):
            return True
        if node.op not in _KEEPS_ORDER:
            return False
        (shape, dtype), result = self.summary.shape(node.inputs[0]), self.summary.shape(node.outputs[0])
        return shape is not None and dtype != 0 and "?" not in shape and (shape, dtype) == result

    @staticmethod
    def key(node: SummaryNode, numbers: list[int]) -> Key | None:
        """What two nodes have in common that make the same tensors; None for one that is like no other."""
        if node.has_bodies or not numbers or node.op in RANDOM:
            return None
        return (node.op, node.attributes, *(sorted(numbers) if node.op in COMMUTATIVE else numbers))

    def made_by(self, node: SummaryNode, numbers: list[int]) -> SummaryNode | None:
        """The node of this model that makes what a node with these inputs makes."""
        key = self.key(node, numbers)
        index = None if key is None else self._nodes.get(key)
        return None if index is None else self.summary.nodes[index]

    def constant(self, content: str) -> int:
        """The number of a small constant; `NOTHING` where the model has none that is equal."""
        value = self._constants.get(content)
        return NOTHING if value is None else self.number[value]

    def unite(self, number: int, equal: int) -> None:
        """Two numbers turn out to be one tensor: from now on both are the first."""
        members = self.members
        self._united[equal] = number
        for value in members.pop(equal, ()):
            self.number[value] = number
            members.setdefault(number, []).append(value)

    def current(self, number: int) -> int:
        """A number that was handed out, as it is since it was united with others."""
        while number in self._united:
            number = self._united[number]
        return number

    @property
    def members(self) -> dict[int, list[int]]:
        """Number → the values that have it, in order of execution."""
        if self._members is None:
            self._members = {}
            for value, number in enumerate(self.number):
                self._members.setdefault(number, []).append(value)
        return self._members
