"""Counterparts of tensors, from the outputs backwards: a node that remains reads what it read before."""

from __future__ import annotations

from collections.abc import Iterator

from htp_export.capabilities.carry.counterparts import LOOK_BACK, Counterparts
from htp_export.capabilities.carry.graph_summary import NOTHING, SummaryNode
from htp_export.format.tags import Reason
from htp_export.shapes.operator_kinds import COMMUTATIVE, IN_PLACE, base_op, moves


def go_backwards(counterparts: Counterparts) -> None:
    """Go through the nodes of the result from the last to the first, and add counterparts of their inputs."""
    backwards = _Backwards(counterparts)
    for index in range(len(counterparts.after.nodes) - 1, -1, -1):
        backwards.node(index)


class _Backwards:
    def __init__(self, counterparts: Counterparts) -> None:
        self._of = counterparts
        self.before, self.after, self.numbers = counterparts.before, counterparts.after, counterparts.numbers
        self.counterpart, self.exact, self.named = counterparts.counterpart, counterparts.exact, counterparts.named
        self.known = counterparts.known

    def node(self, index: int) -> None:
        """Match the inputs of one node."""
        node = self.after.nodes[index]
        known = [value for value in node.makes if self.counterpart[value] != NOTHING]
        old = self._original(known[0]) if known and node.inputs else None
        if old is None:
            return
        same, exact = node.attributes == old.attributes, self.exact[known[0]]
        if moves(node.op):
            if old.op == node.op:
                self._pair_movers(node, old)
                if len(node.inputs) == len(old.inputs) == 1 and NOTHING not in (node.inputs[0], old.inputs[0]):
                    self._settle(index, node.inputs[0], old.inputs[0], same, exact)
            self._through(node, self._of.origin(known[0]))
        elif old.op == node.op:
            for mine, theirs in self._pairs(node, old):
                self._settle(index, mine, theirs, same, exact)

    def _original(self, value: int) -> SummaryNode | None:
        """The original node that makes the counterpart of a value."""
        origin = self._of.origin(value)
        maker = NOTHING if origin == NOTHING else self.before.maker[origin]
        return None if maker == NOTHING else self.before.nodes[maker]

    def _pairs(self, node: SummaryNode, old: SummaryNode) -> Iterator[tuple[int, int]]:
        """The inputs of a node with those of the original, without constants; nothing if their number differs."""
        mine = [v for v in node.inputs if v != NOTHING and self.after.live[v]]
        theirs = [v for v in old.inputs if v != NOTHING and self.before.live[v]]
        if len(mine) != len(theirs):
            return
        if node.op in COMMUTATIVE and len(mine) > 1:
            number = self.numbers.number
            for value in list(mine):
                same = next((v for v in theirs if number[v] == self.numbers.current(self.counterpart[value])), None)
                if same is not None:
                    mine.remove(value)
                    theirs.remove(same)
            if len(mine) > 1:
                return
        yield from zip(mine, theirs, strict=True)

    def _settle(self, reader: int, value: int, old: int, same: bool, exact: bool) -> None:
        """Match ``value``, which a node reads instead of ``old``; ``same``: the node's attributes are unchanged.

        ``exact``: Its output is the original tensor in the original layout.
        """
        number, mine = self.numbers.number[old], self.numbers.current(self.counterpart[value])
        if mine == number:
            return
        maker = self.after.maker[value]
        exact = exact and self._of.alike(value, old)
        if mine == NOTHING:
            self._of.match(value, number, exact)
            return
        if maker == NOTHING or not same or not self._same_weights(reader):
            return
        between = self._between(mine, old)
        if between is None:
            return
        moved = all(moves(self.before.nodes[node].op, views=True) for node in between)
        if moved and exact and self._same_shape(mine, old):
            self.numbers.unite(mine, number)
            for node in between:
                self.numbers.idle[node] = True
        elif (exact or not moved) and number not in self.known:
            self._of.match(value, number, exact)
            self.known.add(number)

    def _same_shape(self, number: int, value: int) -> bool:
        """Whether two original tensors can be the same, by shape and element type."""
        first = self.numbers.members[number][0]
        return self._of.fit(self.before.shape(first), self.before.shape(value))

    def _same_weights(self, reader: int) -> bool:
        """Whether the weights of a node have counterparts; a node with other weights may have absorbed operators."""
        return all(
            self.counterpart[value] != NOTHING
            for value in self.after.nodes[reader].inputs
            if value != NOTHING and not self.after.live[value]
        )

    def _between(self, number: int, value: int) -> list[int] | None:
        """The original nodes between a tensor and a later one; None if there is no path, or there are too many."""
        queue, between, reached = [value], list[int](), False
        seen: set[int] = set()
        while queue and len(between) < LOOK_BACK:
            at = queue.pop()
            if self.numbers.number[at] == number:
                reached = True
                continue
            maker = self.before.maker[at]
            if maker == NOTHING or maker in seen or not self.before.live[at]:
                continue
            seen.add(maker)
            between.append(maker)
            queue += self.before.nodes[maker].reads
        return between if reached and not queue else None

    def _pair_movers(self, node: SummaryNode, old: SummaryNode) -> None:
        """Match the inputs of layout operators if their producers have the same operator, or they the same shape."""
        value, original = node.inputs[0], old.inputs[0]
        if NOTHING in (value, original) or self.counterpart[value] != NOTHING:
            return
        mine, theirs = self.after.maker[value], self.before.maker[original]
        if NOTHING in (mine, theirs):
            return
        op, known = self.after.nodes[mine].op, self.after.shape(value)[0] is not None
        if op == self.before.nodes[theirs].op or (known and not moves(op) and self._of.alike(value, original)):
            self._of.match(value, self.numbers.number[original], self._of.alike(value, original))

    def _through(self, node: SummaryNode, origin: int) -> None:
        """Match the first computed tensor before layout operators with the original one.

        Also if it has the name of an earlier node: a node may be named after the first of those that it replaces.
        """
        value, in_place = node.inputs[0], base_op(node.op) in IN_PLACE
        while value != NOTHING and (self.counterpart[value] == NOTHING or self._named_after_less(value, origin)):
            maker = self.after.maker[value]
            if maker == NOTHING or not self.after.nodes[maker].inputs:
                return
            if not moves(self.after.nodes[maker].op):
                number = self._computed(origin)
                exact = in_place and number == self.numbers.number[origin] and self._of.alike(value, origin)
                self._of.match(value, number, exact)
                return
            in_place = in_place and base_op(self.after.nodes[maker].op) in IN_PLACE
            value = self.after.nodes[maker].inputs[0]

    def _named_after_less(self, value: int, origin: int) -> bool:
        """Whether a tensor is matched by its node's name only, and nodes compute between its match and ``origin``."""
        if self.named[value] != Reason.NODE or self.exact[value]:
            return False
        between = self._between(self.numbers.current(self.counterpart[value]), origin)
        return any(not moves(self.before.nodes[node].op) for node in between or ())

    def _computed(self, value: int) -> int:
        """The number of the tensor before layout operators."""
        maker = self.before.maker[value]
        while maker != NOTHING and moves(self.before.nodes[maker].op) and self.before.nodes[maker].inputs:
            source = self.before.nodes[maker].inputs[0]
            if source == NOTHING or not self.before.live[source]:
                break
            value, maker = source, self.before.maker[source]
        return self.numbers.number[value]
