"""What is known of the tensors after a tool: each one's number in the model before."""

from __future__ import annotations

from htp_export.provenance.graph_summary import NOTHING, GraphSummary, Shape
from htp_export.provenance.numbering import Numbering

__all__ = ["LOOK_BACK", "Counterparts"]

LOOK_BACK = 40
"""Nodes before that are looked through behind one tensor: what tools make one node of is seldom ten, and close by."""

_FLOATS = frozenset((1, 10, 11, 16))  # FLOAT, FLOAT16, DOUBLE, BFLOAT16: one may stand for the other


class Counterparts:
    """The counterpart of the tensors after a tool, to which `Alignment` adds what it finds.

    Attributes:
        numbers: The numbers of the model before.
        counterpart: Value after → number before, or `NOTHING`.
        exact: Value after → whether it is that very tensor; else it is made of the same work, and has another shape,
            layout or element type.
        named: Value after → how its counterpart was first found: ``tensor`` (its name), ``node`` (the name of the node
            that makes it), ``initializer`` (the weights that that node reads), ``values`` or nothing.
        also: Value after → further values before that it may be as well: they had the same numbers in them.
        known: The numbers that some value after has.
    """

    def __init__(self, before: GraphSummary, after: GraphSummary) -> None:
        self.before, self.after = before, after
        self.numbers = Numbering(before)
        self.counterpart = [NOTHING] * len(after.values)
        self.exact = [False] * len(after.values)
        self.named = [""] * len(after.values)
        self.also: dict[int, tuple[int, ...]] = {}
        self.known = set[int]()

    def match(self, value: int, number: int, exact: bool, named: str = "") -> None:
        """Note what a value after is; nothing for `NOTHING`."""
        if number != NOTHING:
            self.counterpart[value], self.exact[value] = number, exact
            self.named[value] = named or self.named[value]

    def alike(self, after: int, before: int) -> bool:
        """Whether the two tensors can be the same, by shape and element type, as far as the files say."""
        return self.fit(self.after.shape(after), self.before.shape(before))

    @staticmethod
    def fit(after: Shape, before: Shape) -> bool:
        """Whether two shapes and element types can be those of one tensor."""
        (sizes_after, kind), (sizes_before, before_kind) = after, before
        if kind and before_kind and kind != before_kind and not {kind, before_kind} <= _FLOATS:
            return False
        if sizes_after is None or sizes_before is None:
            return True
        sizes = zip(sizes_after, sizes_before, strict=False)
        fits = all(a == b or isinstance(a, str) or isinstance(b, str) for a, b in sizes)
        return fits and len(sizes_after) == len(sizes_before)

    def origin(self, value: int) -> int:
        """The value before that a value after is: of those with its number, the one of its name, or the first."""
        members = self.numbers.members.get(self.numbers.current(self.counterpart[value]), ())
        name = self.after.values[value].name
        for member in members:
            if self.before.values[member].name == name:
                return member
        busy = [m for m in members if self.before.maker[m] == NOTHING or not self.numbers.idle[self.before.maker[m]]]
        return (busy or [*members, NOTHING])[0]
