"""Counterparts of the tensors of a tool's result: their value numbers in the original model."""

from __future__ import annotations

from collections.abc import Mapping

from htp_export.capabilities.carry.graph_summary import NOTHING, GraphSummary, Shape
from htp_export.capabilities.carry.numbering import Numbering

__all__ = ["FLOATS", "LEVELS", "LOOK_BACK", "Counterparts"]

LOOK_BACK = 40
"""Original nodes that are searched behind one tensor: tools seldom merge more than ten, which are close by."""

FLOATS = frozenset((1, 10, 11, 16))  # FLOAT, FLOAT16, DOUBLE, BFLOAT16: one may stand for the other

LEVELS = frozenset((2, 3, 17, 18, 19, 20, 21, 22))  # types of quantized numbers: integers and floats of at most 8 bits


class Counterparts:
    """The counterparts of the tensors after a tool, to which `Alignment` adds.

    Attributes:
        numbers: The value numbers of the original model.
        counterpart: Value after → number of the original, or `NOTHING`.
        exact: Value after → whether it is the same tensor; otherwise it has another shape, layout or element type.
        named: Value after → evidence of the first match: ``tensor`` (its name), ``node`` (the name of its producer),
            ``initializer`` (the weights of its producer), ``values`` or nothing.
        also: Value after → further original values that are equal to it.
        parts: Value after → the original values that it joins, of which its counterpart is the first.
        known: The numbers of all counterparts.
        by_consumers: Whether a tensor that equals several original ones is those of them that its consumers read.
    """

    by_consumers = False

    def __init__(self, before: GraphSummary, after: GraphSummary, idle: Mapping[int, int] | None = None) -> None:
        self.before, self.after = before, after
        self.numbers = Numbering(before, idle)
        self.counterpart = [NOTHING] * len(after.values)
        self.exact = [False] * len(after.values)
        self.named = [""] * len(after.values)
        self.also: dict[int, tuple[int, ...]] = {}
        self.parts: dict[int, tuple[int, ...]] = {}
        self.known = set[int]()

    def match(self, value: int, number: int, exact: bool, named: str = "") -> None:
        """Match a value with a number; not with `NOTHING`."""
        if number != NOTHING:
            self.counterpart[value], self.exact[value] = number, exact
            self.named[value] = named or self.named[value]

    def numbers_of(self, value: int) -> set[int]:
        """The numbers of the original tensors that a value stands for: one, or those that it joins."""
        parts = self.parts.get(value)
        numbers = {self.counterpart[value]} if parts is None else {self.numbers.number[part] for part in parts}
        return numbers - {NOTHING}

    def alike(self, after: int, before: int) -> bool:
        """Whether two tensors can be the same, by shape and element type, as far as they are known."""
        return self.fit(self.after.shape(after), self.before.shape(before))

    @staticmethod
    def fit(after: Shape, before: Shape) -> bool:
        """Whether two shapes and element types can be those of one tensor."""
        (sizes_after, kind), (sizes_before, before_kind) = after, before
        if kind and before_kind and kind != before_kind and not {kind, before_kind} <= FLOATS:
            return False
        if sizes_after is None or sizes_before is None:
            return True
        sizes = zip(sizes_after, sizes_before, strict=False)
        fits = all(a == b or isinstance(a, str) or isinstance(b, str) for a, b in sizes)
        return fits and len(sizes_after) == len(sizes_before)

    def origin(self, value: int) -> int:
        """The original value of a value: of those with its number, the one with its name, or the first."""
        members = self.numbers.members.get(self.numbers.current(self.counterpart[value]), ())
        name = self.after.values[value].name
        for member in members:
            if self.before.values[member].name == name:
                return member
        busy = [m for m in members if self.before.maker[m] == NOTHING or not self.numbers.idle[self.before.maker[m]]]
        return (busy or [*members, NOTHING])[0]
