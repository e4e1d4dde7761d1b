"""The counterpart of each tensor of a tool's result in the original model, by value number.

Evidence, the strongest first: equal computations of equal tensors (`Numbering`), weights being
equal by name or by contents; names of tensors; names of nodes, or of their outputs. Then backwards
from the outputs: a node that remains reads what it read before. If that contradicts a name, another
tensor took over the name, as in optimisers that fold BatchNorm into a Conv.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from htp_export.alignment.graph_summary import NOTHING, GraphSummary, SummaryNode
from htp_export.alignment.numbering import FLOATS, Numbering, repeats
from htp_export.format.tags import Reason
from htp_export.shapes.operator_kinds import COMMUTATIVE, IN_PLACE, base_op, moves, resembles

if TYPE_CHECKING:
    from htp_export.alignment.weight_similarity import Likeness

# consumers of a weight (a constant like 1 has more), and original nodes that one node replaces
_FEW = 4

_LOOK_BACK = 40
"""Original nodes that are searched behind one tensor: tools seldom merge more than ten, which are close by."""

_MOST_FOLLOWERS = 4
"""Nodes after a product that one fused node may have taken in: bias, residual, scale and activation."""


_REDUCTIONS = frozenset(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"))
"""They give back a single number as it is."""


@dataclass
class AlignmentEvidence:
    """What is known of tensors after besides names and structure, by their places in the summary."""

    inputs: Mapping[int, int] = field(default_factory=dict)  # input → original input
    # weight, or what is made of weights → originals
    weights: Mapping[int, Likeness] = field(default_factory=dict)
    # tensor → the original tensors with its numbers
    values: Mapping[int, Likeness] = field(default_factory=dict)
    # tensors that were compared, and that have the numbers of no original
    unequal: Collection[int] = frozenset()
    compared: Collection[int] = frozenset()  # original tensors that took part
    # original node → the input that it gives back here
    idle: Mapping[int, int] = field(default_factory=dict)


class Alignment:
    """The counterparts of the tensors after a tool, as far as they are known; lists are by value after."""

    by_consumers = False
    """Whether a tensor that equals several original ones is those of them that its consumers read."""

    def __init__(
        self, before: GraphSummary, after: GraphSummary, evidence: AlignmentEvidence | None = None
    ) -> None:
        self.evidence = AlignmentEvidence() if evidence is None else evidence
        idle = self.evidence.idle.items()
        self.before, self.after = before, after
        self.numbers = Numbering(
            before, {n: value for n, value in idle if moves(before.nodes[n].op, views=True)}
        )
        count = len(after.values) + 1
        self.counterpart = [NOTHING] * count  # number of the original
        # the same tensor; otherwise of another shape, layout or element type
        self.exact = [False] * count
        # evidence: ``tensor``, ``node``, ``initializer``, ``values`` or none
        self.named = [""] * count
        # further original values that are equal to a value
        self.also: dict[int, tuple[int, ...]] = {}
        # the original values that a value joins, its counterpart first
        self.parts: dict[int, tuple[int, ...]] = {}
        self.known = set[int]()  # the numbers of all counterparts
        self._settled = set[int]()
        self._node_names = {
            node.name: index for index, node in enumerate(before.nodes) if node.name
        }
        self._sources()
        self._look()

    def _look(self) -> None:
        """Forwards and backwards once, for all tensors that are not settled."""
        for node in self.after.nodes:
            self._forward(node)
        self.known = {*self.counterpart} - {NOTHING}
        for node in reversed(self.after.nodes):
            self._backward(node)
        self.counterpart = [*map(self.numbers.current, self.counterpart)]
        self.known = {*self.counterpart} - {NOTHING}

    def match(self, value: int, number: int, exact: bool, named: str = "") -> None:
        """Match a value with a number; not with `NOTHING`."""
        if NOTHING not in (value, number):
            self.counterpart[value], self.exact[value] = number, exact
            self.named[value] = named or self.named[value]

    def numbers_of(self, value: int) -> set[int]:
        """The numbers of the original tensors that a value stands for: one, or those that it joins."""
        parts = self.parts.get(value)
        numbers = (
            {self.counterpart[value]}
            if parts is None
            else {self.numbers.number[part] for part in parts}
        )
        return numbers - {NOTHING}

    def alike(self, after: int, before: int) -> bool:
        """Whether two tensors can be the same, by shape and element type, as far as they are known."""
        (sizes_after, kind), (sizes_before, before_kind) = (
            self.after.shape(after),
            self.before.shape(before),
        )
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
        busy = (member for member in members if not self.numbers.idle[self.before.maker[member]])
        return next(busy, members[0] if members else NOTHING)

    def original(self, value: int) -> int:
        """The original node that makes the counterpart of a value."""
        return self.before.maker[self.origin(value)]

    def keeps_name(self, value: int) -> bool:
        """Whether a value has the name of its original value."""
        origin = self.origin(value)
        return (
            origin != NOTHING and self.before.values[origin].name == self.after.values[value].name
        )

    def computed_alike(self, node: SummaryNode) -> list[int]:
        """For each output of a node, the original value that is computed from the same tensors in the same way."""
        reads = [self.counterpart[value] for value in node.inputs]
        is_known = all(
            number != NOTHING or value == NOTHING
            for number, value in zip(reads, node.inputs, strict=True)
        )
        found, count = self.numbers.made_by(node, reads) if is_known else None, len(node.outputs)
        return [*(found.outputs if found is not None else ()), *[NOTHING] * count][:count]

    def read_by(self, original: int) -> frozenset[int]:
        """The numbers of the tensors that an original node reads, without weights."""
        reads = self.before.nodes[original].reads
        return frozenset(self.numbers.number[value] for value in reads if self.before.live[value])

    def makers(self, number: int) -> list[int]:
        """The original nodes that compute a tensor or give it back."""
        makers = (self.before.maker[value] for value in self.numbers.members.get(number, ()))
        return [maker for maker in makers if maker != NOTHING]

    # --- inputs, outputs and constants ---

    def _sources(self) -> None:
        before, after = self.before, self.after
        for index, value in enumerate(after.values):
            if value.kind == "node":
                continue
            same = self.numbers.constant(value.content) if value.content else NOTHING
            candidate = same
            if same == NOTHING:
                renamed = self.evidence.weights.get(index)
                candidate = (
                    before.find(value.name, value.scope)
                    if renamed is None
                    else renamed.originals[0]
                )
                if candidate != NOTHING and (
                    before.values[candidate].content or not self.alike(index, candidate)
                ):
                    candidate = NOTHING  # the same name, but other contents
                candidate = self.numbers.number[candidate]
            self.match(index, candidate, True)
        for ours, theirs in ((after.inputs, before.inputs), (after.outputs, before.outputs)):
            if len(ours) == len(theirs):
                for index, original in zip(ours, theirs, strict=True):
                    if (
                        self.counterpart[index] == NOTHING
                        and self.after.values[index].kind != "initializer"
                    ):
                        self.match(
                            index, self.numbers.number[original], self.alike(index, original)
                        )

    # --- forwards ---

    def _forward(self, node: SummaryNode) -> None:
        if self._settled.issuperset(node.outputs):
            return
        if repeats(node) and self.counterpart[node.inputs[0]] != NOTHING and len(node.outputs) == 1:
            value, source = node.outputs[0], node.inputs[0]
            is_named = self.before.find(self.after.values[value].name, node.scope) != NOTHING
            self.match(
                value,
                self.counterpart[source],
                self.exact[source],
                Reason.TENSOR if is_named else "",
            )
            return
        for place, (value, same) in enumerate(
            zip(node.outputs, self.computed_alike(node), strict=True)
        ):
            if value == NOTHING or value in self._settled:
                continue
            candidate = self._by_name(value, node)
            is_named = candidate != NOTHING
            alike, named = (
                is_named and self.alike(value, candidate),
                Reason.TENSOR if is_named else "",
            )
            if same != NOTHING:
                # else in its inputs' layout
                exact = alike or all(self.exact[v] for v in node.inputs if v != NOTHING)
                self.match(value, self.numbers.number[same], exact, named)
            elif is_named:
                self.match(value, self.numbers.number[candidate], alike, named)
            elif place == 0 and not moves(node.op):
                candidate = self._by_node_name(node)
                if candidate != NOTHING:
                    self.match(value, self.numbers.number[candidate], False, Reason.NODE)
                else:
                    self._by_weights(node, value)

    def _by_name(self, value: int, node: SummaryNode) -> int:
        """The original output of this name; of constants that are known on both sides, one with the same contents."""
        found = self.after.values[value]
        candidate, content = self.before.find(found.name, node.scope), found.content
        if (
            candidate != NOTHING
            and content
            and self.before.values[candidate].content not in ("", content)
        ):
            return self.numbers.constant(content)
        return candidate

    def _by_node_name(self, node: SummaryNode) -> int:
        """The original output of a node by its name: that of an original node or tensor, possibly with a suffix."""
        name = node.name
        while name:
            candidate = self.before.find(name)
            if candidate == NOTHING and name in self._node_names:
                candidate = next(iter(self.before.nodes[self._node_names[name]].outputs), NOTHING)
            maker = self.before.maker[candidate]
            if maker != NOTHING and self.before.nodes[maker].scope == node.scope:
                return self._followed(node, candidate) if self._may_make(node, maker) else NOTHING
            name = name[: max(name.rfind("_"), name.rfind("/"), 0)]
        return NOTHING

    def _may_make(self, node: SummaryNode, maker: int) -> bool:
        """Whether a node can replace an original one, by their operators.

        One that replaces several may have the name of the last, and the operator of one shortly
        before (Conv, Relu).
        """
        queue, seen, reads = [maker], {NOTHING}, {self.counterpart[value] for value in node.inputs}
        while queue and len(seen) <= _FEW:
            at = queue.pop(0)
            if resembles(node.op, self.before.nodes[at].op):
                return True
            seen.add(at)
            behind = self.before.live_inputs(self.before.nodes[at]) if "::" in node.op else ()
            makers = (self.before.maker[v] for v in behind if self.numbers.number[v] not in reads)
            queue += [producer for producer in makers if producer not in seen]
        return False

    def _by_weights(self, node: SummaryNode, value: int) -> None:
        """Match the output of a node by its weights; where names hold, these say no more."""

    def _followed(self, node: SummaryNode, value: int) -> int:
        """A later tensor, if the node has more operands than the original one, or names operators that it absorbed."""
        before, number = self.before, self.numbers.number
        missing = self._operands_besides(node, value)
        at = value
        for _ in range(_MOST_FOLLOWERS):
            readers = [reader for reader in before.readers[at] if not self.numbers.idle[reader]]
            if len(readers) != 1 or NOTHING in before.nodes[readers[0]].outputs:
                break
            follower = before.nodes[readers[0]]
            took = base_op(follower.op) in node.words
            if not missing and not took:
                break
            missing -= {number[v] for v in follower.inputs if v != NOTHING}
            at = follower.outputs[0]
            if not missing:
                value = at
        return value

    def _operands_besides(self, node: SummaryNode, value: int) -> set[int]:
        """The inputs of a node beyond those of an original one, if it has more: the other operand of a sum."""
        old = self.before.nodes[self.before.maker[value]]
        mine = Counter(self.counterpart[v] for v in self.after.live_inputs(node))
        theirs = Counter(self.numbers.number[v] for v in self.before.live_inputs(old))
        return set(mine - theirs) - {NOTHING} if mine.total() > theirs.total() else set()

    # --- backwards ---

    def _backward(self, node: SummaryNode) -> None:
        """Match the inputs of one node: one that remains reads what it read before."""
        known = [value for value in node.makes if self.counterpart[value] != NOTHING]
        original = self.original(known[0]) if known and node.inputs else NOTHING
        if original == NOTHING:
            return
        old = self.before.nodes[original]
        same, exact = node.attributes == old.attributes, self.exact[known[0]]
        if moves(node.op):
            if old.op == node.op:
                self._pair_movers(node, old)
                if self._move_alike(node, old):
                    self._settle(node, node.inputs[0], old.inputs[0], same, exact)
            self._through(node, self.origin(known[0]))
        elif old.op == node.op:
            for mine, theirs in self._pairs(node, old):
                self._settle(node, mine, theirs, same, exact)

    def _move_alike(self, node: SummaryNode, old: SummaryNode) -> bool:
        """Whether two layout operators move their first input only, in the way that equal constants say."""
        if self.after.live_inputs(node) != [node.inputs[0]] or self.before.live_inputs(old) != [
            old.inputs[0]
        ]:
            return False
        mine = [self.numbers.current(self.counterpart[value]) for value in node.inputs[1:]]
        return mine == [self.numbers.number[value] for value in old.inputs[1:]]

    def _pairs(self, node: SummaryNode, old: SummaryNode) -> Iterator[tuple[int, int]]:
        """The inputs of a node with those of the original, without constants; nothing if their number differs."""
        mine = self.after.live_inputs(node)
        theirs = self.before.live_inputs(old)
        if len(mine) != len(theirs):
            return
        if node.op in COMMUTATIVE and len(mine) > 1:
            number = self.numbers.number
            for value in list(mine):
                same = next(
                    (
                        v
                        for v in theirs
                        if number[v] == self.numbers.current(self.counterpart[value])
                    ),
                    None,
                )
                if same is not None:
                    mine.remove(value)
                    theirs.remove(same)
            if len(mine) > 1:
                return
        yield from zip(mine, theirs, strict=True)

    def _settle(self, reader: SummaryNode, value: int, old: int, same: bool, exact: bool) -> None:
        """Match ``value``, which a node reads instead of ``old``; ``same``: the node's attributes are unchanged.

        ``exact``: Its output is the original tensor in the original layout.
        """
        number, mine = self.numbers.number[old], self.numbers.current(self.counterpart[value])
        if mine == number:
            return
        exact = exact and self.alike(value, old)
        if mine == NOTHING:
            self.match(value, number, exact)
            return
        if self.after.maker[value] == NOTHING or not same or not self._same_weights(reader):
            return
        between = self._between(mine, old)
        if between is None:
            return
        moved = all(map(self._only_moves, between))
        if moved and exact:
            self.numbers.unite(mine, number)
            for node in between:
                self.numbers.idle[node] = True
        elif (exact or not moved) and (
            number not in self.known or self._is_given_back(reader, number)
        ):
            self.match(value, number, exact)
            self.known.add(number)

    def _is_given_back(self, node: SummaryNode, number: int) -> bool:
        """Whether a layout operator makes a tensor of this number of what it reads: it gives back the same tensor."""
        return moves(node.op) and self.numbers.current(self.counterpart[node.outputs[0]]) == number

    def _only_moves(self, node: int) -> bool:
        """Whether an original node only moves numbers, as their sums, too, over dimensions of size 1."""
        old = self.before.nodes[node]
        if old.op not in _REDUCTIONS:
            return moves(old.op, views=True)
        read, made = (self.before.shape(value)[0] for value in (old.inputs[0], old.outputs[0]))
        if read is None or made is None or "?" in read:
            return False
        return [size for size in read if size != 1] == [size for size in made if size != 1]

    def _same_weights(self, node: SummaryNode) -> bool:
        """Whether the weights of a node have counterparts; a node with other weights may have absorbed operators."""
        weights = (
            value for value in node.inputs if value != NOTHING and not self.after.live[value]
        )
        return all(self.counterpart[value] != NOTHING for value in weights)

    def _between(self, number: int, value: int) -> list[int] | None:
        """The original nodes between a tensor and a later one; None if there is no path, or there are too many."""
        queue, between, reached = [value], dict[int, None](), False
        while queue and len(between) < _LOOK_BACK:
            at = queue.pop()
            if self.numbers.number[at] == number:
                reached = True
                continue
            maker = self.before.maker[at]
            if maker != NOTHING and maker not in between and self.before.live[at]:
                between[maker] = None
                queue += self.before.nodes[maker].reads
        return [*between] if reached and not queue else None

    def _pair_movers(self, node: SummaryNode, old: SummaryNode) -> None:
        """Match the inputs of layout operators if their producers have the same operator, or they the same shape."""
        value, original = node.inputs[0], old.inputs[0]
        mine, theirs = self.after.maker[value], self.before.maker[original]
        if self.counterpart[value] != NOTHING or NOTHING in (mine, theirs):
            return
        op, known = self.after.nodes[mine].op, self.after.shape(value)[0] is not None
        if op == self.before.nodes[theirs].op or (
            known and not moves(op) and self.alike(value, original)
        ):
            self.match(value, self.numbers.number[original], self.alike(value, original))

    def _through(self, node: SummaryNode, origin: int) -> None:
        """Match the first computed tensor before layout operators with the original one.

        Also if it has the name of an earlier node: a node may be named after the first of those
        that it replaces.
        """
        value, in_place = node.inputs[0], base_op(node.op) in IN_PLACE
        while self.counterpart[value] == NOTHING or self._named_after_less(value, origin):
            maker = self.after.maker[value]
            if maker == NOTHING or not self.after.nodes[maker].inputs:
                return
            if not moves(self.after.nodes[maker].op):
                number = self._computed(origin)
                exact = (
                    in_place and number == self.numbers.number[origin] and self.alike(value, origin)
                )
                self.match(value, number, exact)
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
        while (
            maker != NOTHING
            and moves(self.before.nodes[maker].op)
            and self.before.nodes[maker].inputs
        ):
            source = self.before.nodes[maker].inputs[0]
            if not self.before.live[source]:
                break
            value, maker = source, self.before.maker[source]
        return self.numbers.number[value]
