"""The counterpart of each tensor of a tool's result in the original model, by value number.

Evidence, the strongest first:

1. equal computations of equal tensors (`Numbering`), where weights are equal by name or by
contents, 2. names of tensors, 3. names of nodes, or of their outputs, 4. structure, backwards from
the outputs: a node that remains reads the same tensors as before.

If structure contradicts a name, another tensor has the name now: an optimizer that folds a
BatchNormalization into a Conv names the Conv's output after the BatchNormalization's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from htp_export.alignment.graph_summary import NOTHING, GraphSummary, SummaryNode
from htp_export.alignment.numbering import FLOATS, Numbering, is_copy
from htp_export.format.tags import Reason
from htp_export.shapes.operator_kinds import (
    COMMUTATIVE,
    IN_PLACE,
    RESHAPING,
    base_op,
    moves,
    resembles,
)

if TYPE_CHECKING:
    from htp_export.alignment.weight_similarity import NumericMatch

_MOST_CANDIDATES = 4
"""Original nodes that may give a fused node its operator: Conv, Relu and Add become one node."""

_LOOK_BACK = 40
"""Original nodes that are searched behind one tensor: tools seldom merge more than ten nodes."""

_MOST_FOLLOWERS = 4
"""Nodes after a product that one fused node may include: bias, residual, scale and activation."""


_UNTRANSPOSED = frozenset(("", "transB=1"))
"""Attributes of products with a weight that read their first input as it is."""

_REDUCTIONS = frozenset(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"))
"""Over dimensions of size 1, these operators return their input in another shape."""


@dataclass
class AlignmentEvidence:
    """Evidence for counterparts besides names and structure; tensors by index in the summary."""

    inputs: Mapping[int, int] = field(default_factory=dict)  # input → original input
    # weight, or constant that is computed from weights → originals
    weights: Mapping[int, NumericMatch] = field(default_factory=dict)
    # tensor → the original tensors with equal values
    values: Mapping[int, NumericMatch] = field(default_factory=dict)
    # tensors that were compared, and whose values equal no original's
    unequal: Collection[int] = frozenset()
    compared: Collection[int] = frozenset()  # original tensors that were compared
    # original node → the input that it returned unchanged in this run
    idle: Mapping[int, int] = field(default_factory=dict)


class Alignment:
    """The counterparts of a result's tensors, as far as they are known; lists are by its values."""

    by_consumers = False
    """Whether consumers choose among several original tensors that equal one tensor."""

    def __init__(
        self, before: GraphSummary, after: GraphSummary, evidence: AlignmentEvidence | None = None
    ) -> None:
        self.evidence = AlignmentEvidence() if evidence is None else evidence
        idle = self.evidence.idle.items()
        self.before, self.after = before, after
        # Without names, nothing tells the earlier tensor from the restored one; values tell which
        # nodes are idle.
        self.numbers = Numbering(
            before,
            {n: value for n, value in idle if moves(before.nodes[n].op, views=True)},
            by_shapes=not self.by_consumers,
        )
        count = len(after.values) + 1
        self.counterpart = [NOTHING] * count  # number of the original tensor
        # whether it is the same tensor; otherwise it has another shape, layout or element type
        self.exact = [False] * count
        # evidence: ``tensor``, ``node``, ``initializer``, ``values`` or none
        self.evidence_of = [""] * count
        # further original values that are equal to a value
        self.further_originals: dict[int, tuple[int, ...]] = {}
        # for a concatenation of original values: these values, its counterpart first
        self.parts: dict[int, tuple[int, ...]] = {}
        self.matched = set[int]()  # the numbers of all counterparts
        # values with the elements of their counterparts in the same order, maybe in another shape
        self._in_order = set[int]()
        self._final = set[int]()  # values whose counterparts do not change any more
        self._node_names = {
            node.name: index for index, node in enumerate(before.nodes) if node.name
        }
        self._sources()
        self._look()

    def _look(self) -> None:
        """Search forwards and backwards once, for all tensors whose counterparts are not final."""
        for node in self.after.nodes:
            self._forward(node)
        self.matched = {*self.counterpart} - {NOTHING}
        for node in reversed(self.after.nodes):
            self._backward(node)
        self.counterpart = [*map(self.numbers.current, self.counterpart)]
        self.matched = {*self.counterpart} - {NOTHING}

    def match(self, value: int, number: int, exact: bool, evidence: str = "") -> None:
        """Match a value with a number; no match if one of them is `NOTHING`."""
        if NOTHING not in (value, number):
            self.counterpart[value], self.exact[value] = number, exact
            self.evidence_of[value] = evidence or self.evidence_of[value]

    def numbers_of(self, value: int) -> set[int]:
        """The numbers of a value's original tensors: one, or several for a concatenation."""
        parts = self.parts.get(value)
        if parts is None:
            return {self.counterpart[value]} - {NOTHING}
        return {self.numbers.number[part] for part in parts} - {NOTHING}

    def is_compatible(self, after: int, before: int) -> bool:
        """Whether shapes and element types permit that two tensors are equal."""
        after_sizes, after_type = self.after.shape(after)
        before_sizes, before_type = self.before.shape(before)
        types = {after_type, before_type} - {0}  # 0 is an unknown type
        if len(types) > 1 and not types <= FLOATS:
            return False
        if after_sizes is None or before_sizes is None:
            return True
        if len(after_sizes) != len(before_sizes):
            return False
        for one, other in zip(after_sizes, before_sizes, strict=True):
            if one != other and isinstance(one, int) and isinstance(other, int):
                return False
        return True

    def origin(self, value: int) -> int:
        """The original value of a value: of its number, the one of its name, or the first."""
        members = self.numbers.members.get(self.numbers.current(self.counterpart[value]), ())
        name = self.after.values[value].name
        for member in members:
            if self.before.values[member].name == name:
                return member
        busy = (member for member in members if not self.numbers.idle[self.before.maker[member]])
        return next(busy, members[0] if members else NOTHING)

    def original(self, value: int) -> int:
        """The original producer of a value's counterpart."""
        return self.before.maker[self.origin(value)]

    def keeps_name(self, value: int) -> bool:
        """Whether a value has the name of its original value."""
        origin = self.origin(value)
        return (
            origin != NOTHING and self.before.values[origin].name == self.after.values[value].name
        )

    def recomputed(self, node: SummaryNode) -> list[int]:
        """For each output of a node: the original value with the same operator, attributes and inputs."""
        count = len(node.outputs)
        numbers = [self.counterpart[value] for value in node.inputs]
        for value, number in zip(node.inputs, numbers, strict=True):
            if value != NOTHING and number == NOTHING:
                return [NOTHING] * count
        equal = self.numbers.equal_node(node, numbers)
        outputs = () if equal is None else equal.outputs
        return [*outputs, *[NOTHING] * count][:count]

    def read_by(self, original: int) -> frozenset[int]:
        """The numbers of the inputs of an original node, except weights."""
        reads = self.before.nodes[original].reads
        return frozenset(self.numbers.number[value] for value in reads if self.before.live[value])

    def makers(self, number: int) -> list[int]:
        """The original nodes that compute a tensor or return it unchanged."""
        makers = (self.before.maker[value] for value in self.numbers.members.get(number, ()))
        return [maker for maker in makers if maker != NOTHING]

    # --- inputs, outputs and constants ---

    def _sources(self) -> None:
        """Match constants and weights, and then inputs and outputs by their order."""
        for index, value in enumerate(self.after.values):
            if value.kind != "node":
                self.match(index, self._stored_counterpart(index), True)
        for ours, theirs in (
            (self.after.inputs, self.before.inputs),
            (self.after.outputs, self.before.outputs),
        ):
            if len(ours) != len(theirs):
                continue
            for index, original in zip(ours, theirs, strict=True):
                is_stored = self.after.values[index].kind == "initializer"
                if self.counterpart[index] == NOTHING and not is_stored:
                    compatible = self.is_compatible(index, original)
                    self.match(index, self.numbers.number[original], compatible)

    def _stored_counterpart(self, index: int) -> int:
        """The number of the original tensor that an initializer or input equals, or `NOTHING`."""
        value = self.after.values[index]
        same = self.numbers.constant(value.content) if value.content else NOTHING
        if same != NOTHING:
            return same
        renamed = self.evidence.weights.get(index)
        if renamed is not None:
            candidate = renamed.originals[0]
        else:
            candidate = self.before.find(value.name, value.scope)
        if candidate == NOTHING:
            return NOTHING
        if self.before.values[candidate].content or not self.is_compatible(index, candidate):
            return NOTHING  # the same name, but other contents
        return self.numbers.number[candidate]

    # --- forwards ---

    def _forward(self, node: SummaryNode) -> None:
        """Match the outputs of one node."""
        if self._final.issuperset(node.outputs):
            return
        is_matched_copy = is_copy(node) and self.counterpart[node.inputs[0]] != NOTHING
        if is_matched_copy and len(node.outputs) == 1:
            value, source = node.outputs[0], node.inputs[0]
            is_named = self.before.find(self.after.values[value].name, node.scope) != NOTHING
            evidence = Reason.TENSOR if is_named else ""
            self.match(value, self.counterpart[source], self.exact[source], evidence)
            return
        for place, (value, same) in enumerate(
            zip(node.outputs, self.recomputed(node), strict=True)
        ):
            if value != NOTHING and value not in self._final:
                self._match_output(node, place, value, same)

    def _match_output(self, node: SummaryNode, place: int, value: int, same: int) -> None:
        """Match one output of a node; ``same``: the original value of an equal computation."""
        number = self.numbers.number
        candidate = self._by_name(value, node)
        is_named = candidate != NOTHING
        compatible = is_named and self.is_compatible(value, candidate)
        evidence = Reason.TENSOR if is_named else ""
        if same != NOTHING:
            # Computed from inputs in another layout, the output has that layout, too.
            exact = compatible or all(self.exact[v] for v in node.inputs if v != NOTHING)
            self.match(value, number[same], exact, evidence)
        elif is_named:
            self.match(value, number[candidate], compatible, evidence)
        elif place == 0 and not moves(node.op):
            candidate = self._by_node_name(node)
            if candidate != NOTHING:
                self.match(value, number[candidate], False, Reason.NODE)
            else:
                self._by_weights(node, value)

    def _by_name(self, value: int, node: SummaryNode) -> int:
        """The original output of this name; for a constant with other contents, one with equal contents."""
        name, content = self.after.values[value].name, self.after.values[value].content
        candidate = self.before.find(name, node.scope)
        if candidate == NOTHING or not content:
            return candidate
        if self.before.values[candidate].content in ("", content):
            return candidate
        return self.numbers.constant(content)

    def _by_node_name(self, node: SummaryNode) -> int:
        """The original output of a node's name: of an original node or tensor, plus a suffix."""
        name = node.name
        while name:
            candidate = self.before.find(name)
            if candidate == NOTHING and name in self._node_names:
                candidate = next(iter(self.before.nodes[self._node_names[name]].outputs), NOTHING)
            maker = self.before.maker[candidate]
            if maker != NOTHING and self.before.nodes[maker].scope == node.scope:
                if not self._may_replace(node, maker):
                    return NOTHING
                return self._followed(node, candidate)
            name = name[: max(name.rfind("_"), name.rfind("/"), 0)]
        return NOTHING

    def _may_replace(self, node: SummaryNode, maker: int) -> bool:
        """Whether a node can replace an original one, by their operators.

        A fused node may have the name of the last original node, and the operator of one shortly
        before it: Conv and Relu become a FusedConv with the name of the Relu.
        """
        queue, seen = [maker], {NOTHING}
        reads = {self.counterpart[value] for value in node.inputs}
        while queue and len(seen) <= _MOST_CANDIDATES:
            at = queue.pop(0)
            if resembles(node.op, self.before.nodes[at].op):
                return True
            seen.add(at)
            if "::" not in node.op:
                continue  # operators of ONNX are not fused
            for value in self.before.live_inputs(self.before.nodes[at]):
                producer = self.before.maker[value]
                if self.numbers.number[value] not in reads and producer not in seen:
                    queue.append(producer)
        return False

    def _by_weights(self, node: SummaryNode, value: int) -> None:
        """Match the output of a node by its weights; where names are proved, these add nothing."""

    def _followed(self, node: SummaryNode, value: int) -> int:
        """A later tensor, if the node has further operands, or names operators that it includes."""
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
        """The additional inputs of a node, compared with an original one: a residual, for example."""
        old = self.before.nodes[self.before.maker[value]]
        mine = Counter(self.counterpart[v] for v in self.after.live_inputs(node))
        theirs = Counter(self.numbers.number[v] for v in self.before.live_inputs(old))
        if mine.total() <= theirs.total():
            return set()
        return set(mine - theirs) - {NOTHING}

    # --- backwards ---

    def _backward(self, node: SummaryNode) -> None:
        """Match the inputs of one node: a node that remains has the same inputs as before."""
        matched = [value for value in node.makes if self.counterpart[value] != NOTHING]
        original = self.original(matched[0]) if matched and node.inputs else NOTHING
        if original == NOTHING:
            return
        old = self.before.nodes[original]
        same, exact = node.attributes == old.attributes, self.exact[matched[0]]
        if moves(node.op):
            if old.op == node.op:
                self._pair_layout_operators(node, old)
                if self._have_equal_arguments(node, old):
                    self._match_input(node, node.inputs[0], old.inputs[0], same, exact)
            self._match_behind(node, self.origin(matched[0]))
        elif old.op == node.op:
            for mine, theirs in self._input_pairs(node, old):
                self._match_input(node, mine, theirs, same, exact)
        else:
            self._match_input_of_chain(node, matched[0])

    def _match_input_of_chain(self, node: SummaryNode, made: int) -> None:
        """Match the input of a node that replaces several nodes in a row, by its weights.

        A Gemm reads the tensor that the MatMul with its weight read. Attributes of a product with
        plain weights say that it does more: a FusedMatMul may transpose its input, and scale.
        """
        live = self.after.live_inputs(node)
        if node.attributes not in _UNTRANSPOSED and self._has_plain_weights(node):
            return
        weights = {self.counterpart[value] for value in self.after.stored_inputs(node)}
        if len(live) != 1 or not weights or NOTHING in weights:
            return
        [value], at = live, self.origin(made)
        if self.counterpart[value] != NOTHING:
            return
        for _ in range(_MOST_FOLLOWERS):
            maker = self.before.maker[at]
            old = self.before.nodes[maker]
            read = self.before.live_inputs(old) if maker != NOTHING else []
            if len(read) != 1:
                return
            weights -= {self.numbers.number[each] for each in old.inputs}
            at = read[0]
            if weights:
                continue
            if resembles(node.op, old.op):
                self.match(value, self.numbers.number[at], False)
                if made in self._in_order and node.attributes in _UNTRANSPOSED:
                    self._in_order.add(value)
            return

    def _has_plain_weights(self, node: SummaryNode) -> bool:
        """Whether the weights of a node are floats; attributes describe the format of others."""
        types = {self.after.shape(value)[1] for value in self.after.stored_inputs(node)}
        return types <= FLOATS

    def _have_equal_arguments(self, node: SummaryNode, old: SummaryNode) -> bool:
        """Whether two layout operators have equal constant arguments and no other data input."""
        if self.after.live_inputs(node) != [node.inputs[0]]:
            return False
        if self.before.live_inputs(old) != [old.inputs[0]]:
            return False
        mine = [self.numbers.current(self.counterpart[value]) for value in node.inputs[1:]]
        return mine == [self.numbers.number[value] for value in old.inputs[1:]]

    def _input_pairs(self, node: SummaryNode, old: SummaryNode) -> Iterator[tuple[int, int]]:
        """The inputs of a node and of its original, except constants; none if their counts differ."""
        mine = self.after.live_inputs(node)
        theirs = self.before.live_inputs(old)
        if len(mine) != len(theirs):
            return
        if node.op in COMMUTATIVE and len(mine) > 1:
            # The order means nothing: equal operands are removed, and one pair may remain.
            for value in list(mine):
                number = self.numbers.current(self.counterpart[value])
                same = [v for v in theirs if self.numbers.number[v] == number]
                if same:
                    mine.remove(value)
                    theirs.remove(same[0])
            if len(mine) > 1:
                return
        yield from zip(mine, theirs, strict=True)

    def _match_input(
        self, reader: SummaryNode, value: int, old: int, same: bool, exact: bool
    ) -> None:
        """Match ``value``, an input of a node that had the input ``old``.

        If ``value`` has another counterpart, the nodes between this and ``old`` are gone. If they
        only move numbers, both are one tensor; otherwise another tensor has the name now.

        Args:
            reader: The node.
            value: Its input.
            old: The input of its original.
            same: Whether the node's attributes are unchanged.
            exact: Whether its output is the original tensor in the original layout.
        """
        number, mine = self.numbers.number[old], self.numbers.current(self.counterpart[value])
        if mine == number:
            return
        exact = exact and self.is_compatible(value, old)
        if mine == NOTHING:
            self.match(value, number, exact)
            return
        if self.after.maker[value] == NOTHING or not same or not self._has_same_weights(reader):
            return
        between = self._between(mine, old)
        if between is None:
            return
        only_moves = all(map(self._only_moves, between))
        if only_moves and exact:
            self.numbers.unite(mine, number)
            for node in between:
                self.numbers.idle[node] = True
            return
        is_free = number not in self.matched or self._returns_number(reader, number)
        if is_free and (exact or not only_moves):
            self.match(value, number, exact)
            self.matched.add(number)

    def _returns_number(self, node: SummaryNode, number: int) -> bool:
        """Whether the output of a layout operator is the tensor of this number, in some layout."""
        return moves(node.op) and self.numbers.current(self.counterpart[node.outputs[0]]) == number

    def _only_moves(self, node: int) -> bool:
        """Whether an original node only moves elements, like a reduction over axes of size 1."""
        old = self.before.nodes[node]
        if old.op not in _REDUCTIONS:
            return moves(old.op, views=True)
        read, made = (self.before.shape(value)[0] for value in (old.inputs[0], old.outputs[0]))
        if read is None or made is None or "?" in read:
            return False
        return [size for size in read if size != 1] == [size for size in made if size != 1]

    def _has_same_weights(self, node: SummaryNode) -> bool:
        """Whether all weights of a node have counterparts; otherwise it may include other operators."""
        return NOTHING not in map(self.counterpart.__getitem__, self.after.stored_inputs(node))

    def _between(self, number: int, value: int) -> list[int] | None:
        """The original nodes between a tensor and a later one; None without a path, or if many."""
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

    def _pair_layout_operators(self, node: SummaryNode, old: SummaryNode) -> None:
        """Match the inputs of layout operators if their producers' operators, or their shapes, agree."""
        value, original = node.inputs[0], old.inputs[0]
        mine, theirs = self.after.maker[value], self.before.maker[original]
        if self.counterpart[value] != NOTHING or NOTHING in (mine, theirs):
            return
        op = self.after.nodes[mine].op
        has_same_operator = op == self.before.nodes[theirs].op
        if not has_same_operator and (moves(op) or self.after.shape(value)[0] is None):
            return
        compatible = self.is_compatible(value, original)
        if has_same_operator or compatible:
            self.match(value, self.numbers.number[original], compatible)

    def _match_behind(self, node: SummaryNode, origin: int) -> None:
        """Match the first computed tensor before layout operators with its counterpart.

        A match by the name of a node is replaced if original nodes compute between it and
        ``origin``: a fused node may have the name of the first node that it replaces.
        """
        value, in_place = node.inputs[0], base_op(node.op) in IN_PLACE
        made = node.makes[0]
        in_order = self.exact[made] or made in self._in_order
        in_order = in_order and _keeps_order(node.op)
        while self.counterpart[value] == NOTHING or self._is_named_after_first(value, origin):
            maker = self.after.maker[value]
            if maker == NOTHING or not self.after.nodes[maker].inputs:
                return
            op = self.after.nodes[maker].op
            if not moves(op):
                self._match_computed(value, origin, in_place, in_order)
                return
            in_place = in_place and base_op(op) in IN_PLACE
            in_order = in_order and _keeps_order(op)
            value = self.after.nodes[maker].inputs[0]

    def _match_computed(self, value: int, origin: int, in_place: bool, in_order: bool) -> None:
        """Match a computed tensor before layout operators.

        Args:
            value: The tensor.
            origin: The original tensor after the layout operators.
            in_place: Whether these keep the shape.
            in_order: Whether these change only the shape.
        """
        same = self._same_shape(value, origin) if in_order else NOTHING
        if same != NOTHING:
            self.match(value, self.numbers.number[same], True)
            return
        number = self._computed(origin)
        is_same = number == self.numbers.number[origin]
        self.match(value, number, in_place and is_same and self.is_compatible(value, origin))
        if in_order and is_same:
            self._in_order.add(value)

    def _same_shape(self, value: int, origin: int) -> int:
        """The first original tensor of a value's shape that only reshaping turns into ``origin``."""
        shape, found, at = self.after.shape(value)[0], NOTHING, origin
        if shape is None or "?" in shape:
            return NOTHING
        while True:
            if self.before.shape(at)[0] == shape and self.is_compatible(value, at):
                found = at
            maker = self.before.maker[at]
            if maker == NOTHING or not _keeps_order(self.before.nodes[maker].op):
                return found
            at = self.before.nodes[maker].inputs[0]

    def _is_named_after_first(self, value: int, origin: int) -> bool:
        """Whether a name is the only evidence, and nodes compute between match and ``origin``."""
        if self.evidence_of[value] != Reason.NODE or self.exact[value]:
            return False
        between = self._between(self.numbers.current(self.counterpart[value]), origin)
        return any(not moves(self.before.nodes[node].op) for node in between or ())

    def _computed(self, value: int) -> int:
        """The value number of the tensor before the layout operators that produce an original value."""
        maker = self.before.maker[value]
        while maker != NOTHING:
            node = self.before.nodes[maker]
            if not moves(node.op) or not node.inputs or not self.before.live[node.inputs[0]]:
                break
            value = node.inputs[0]
            maker = self.before.maker[value]
        return self.numbers.number[value]


def _keeps_order(op: str) -> bool:
    """Whether an operator returns the elements of its input in the same order."""
    return base_op(op) in IN_PLACE or base_op(op) in RESHAPING
