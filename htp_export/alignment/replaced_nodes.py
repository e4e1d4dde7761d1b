"""The original nodes that each node of a tool's result replaces.

A node whose inputs and outputs have counterparts replaces the original nodes between these. Nodes
with unmatched tensors between them share the original nodes between the matched tensors; each
replaces those that its name, its initializers or its operator indicates. A layout operator without
an original counterpart was inserted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from htp_export.alignment.alignment import Alignment
from htp_export.alignment.graph_summary import NOTHING, SummaryNode
from htp_export.alignment.numbering import is_copy
from htp_export.format.tags import Reason
from htp_export.model.neighbours import reached
from htp_export.shapes.operator_kinds import LAYOUT, RESHAPING, base_op, moves, resembles

_MOST_REPEATED = 40
"""Original nodes that one node may compute a second time: tools repeat only short chains."""

_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ReplacedNodes:
    """The original nodes that one node replaces."""

    nodes: tuple[int, ...]  # the original nodes, in order of execution; empty for an inserted node
    # ``tensor``, ``node``, ``initializer``, ``values`` or ``region``; ``inserted`` without nodes
    reason: str
    # for an inserted node that restores the form of original tensors: their producers
    ends: tuple[int, ...] = ()
    # whether several nodes share these original nodes, because they cannot be separated
    coarse: bool = False
    # whether they were chosen from nodes of several modules, by their operator alone
    chosen: bool = False
    among: tuple[int, ...] = ()  # all original nodes between the matched tensors around the node


def replaced_nodes(alignment: Alignment) -> list[ReplacedNodes]:
    """Return the original nodes that each node of the result replaces, in order."""
    return _Division(alignment).result


@dataclass(frozen=True, slots=True)
class _OpenNode:
    """A node of the result whose original nodes are searched."""

    index: int
    node: SummaryNode
    unmatched_inputs: list[int]
    unmatched_outputs: list[int]  # only outputs that have a consumer
    part: tuple[int, ...]  # the original nodes between the matched tensors around the node
    done: frozenset[int]  # original nodes that producers of its unmatched inputs replace
    sharing: frozenset[int]  # earlier nodes that share their original nodes with this one
    rest: tuple[int, ...]  # the nodes of ``part`` that remain for this node and later ones


class _Division:
    """Divides the original nodes among the nodes of the result, in order of execution."""

    def __init__(self, alignment: Alignment) -> None:
        self.alignment = alignment
        self.before, self.after = alignment.before, alignment.after
        self.number = alignment.numbers.number
        # original values that remain under their names, and are still computed
        self._taken = set[int]()
        for value in range(len(self.after.values)):
            if alignment.keeps_name(value) and self._is_computed(value):
                self._taken.add(alignment.origin(value))
        self._slices: dict[tuple[frozenset[int], frozenset[int]], tuple[int, ...]] = {}
        self._behind = self._matched_behind()
        self._ahead = self._matched_ahead()
        # unmatched value → original nodes that are replaced before it
        self._done: dict[int, frozenset[int]] = {}
        # Unmatched value → nodes before it that share their original nodes with others, and compute
        # something
        self._sharing: dict[int, frozenset[int]] = {}
        # such a node → original nodes that the name or the weights of another node indicate
        self._claimed: dict[int, set[int]] = defaultdict(set)
        self._same_operator = self._by_operator()
        self.result = [self._work(index, node) for index, node in enumerate(self.after.nodes)]
        self._remove_claimed()

    def _remove_claimed(self) -> None:
        """Remove the original nodes that other nodes claim, if others are left."""
        for index, claimed in self._claimed.items():
            work = self.result[index]
            left = tuple(n for n in work.nodes if n not in claimed)
            if left:
                self.result[index] = replace(work, nodes=left)

    def _is_computed(self, value: int) -> bool:
        """Whether a value is computed, and is not a copy of an equal one."""
        maker = self.after.maker[value]
        return maker == NOTHING or not is_copy(self.after.nodes[maker])

    def _is_matched(self, value: int) -> bool:
        return self.alignment.counterpart[value] != NOTHING

    def _matched_behind(self) -> list[frozenset[int]]:
        """For each node: numbers of the nearest matched tensors before it."""
        behind = [_NONE] * len(self.after.nodes)
        # unmatched value → numbers of the nearest matched tensors before it
        carried: dict[int, frozenset[int]] = {}
        for index, node in enumerate(self.after.nodes):
            nearest = set[int]()
            for value in node.reads:
                nearest |= self.alignment.numbers_of(value)
                nearest |= carried.get(value, _NONE)
            behind[index] = frozenset(nearest)
            for value in node.makes:
                if not self._is_matched(value):
                    carried[value] = behind[index]
        return behind

    def _matched_ahead(self) -> list[frozenset[int]]:
        """For each node: the nearest matched values after it."""
        nodes = self.after.nodes
        ahead = [_NONE] * len(nodes)
        # unmatched value → the nearest matched values after it
        carried: dict[int, frozenset[int]] = {}
        for index in reversed(range(len(nodes))):
            nearest = set[int]()
            for value in nodes[index].makes:
                if self._is_matched(value):
                    nearest.add(value)
                else:
                    nearest |= carried.get(value, _NONE)
            ahead[index] = frozenset(nearest)
            for value in nodes[index].reads:
                if not self._is_matched(value):
                    carried[value] = carried.get(value, _NONE) | ahead[index]
        return ahead

    def _by_operator(self) -> dict[int, list[int]]:
        """Node after → the original nodes of its operator that it replaces, if their counts agree.

        If a region has equally many nodes of an operator before and after, they are in the same
        order. Several products of one tensor may have been merged into one.
        """
        rivals = defaultdict[tuple[frozenset[int], str], list[int]](list)
        for index, node in enumerate(self.after.nodes):
            rivals[self._ahead[index], base_op(node.op)].append(index)
        chosen: dict[int, list[int]] = {}
        for (ahead, op), ours in rivals.items():
            region = set[int]()
            for index in ours:
                region.update(self._between(ahead, self._behind[index]))
            theirs = [n for n in sorted(region) if base_op(self.before.nodes[n].op) == op]
            if len(ours) == len(theirs):
                for mine, original in zip(ours, theirs, strict=True):
                    chosen[mine] = [original]
            elif len(ours) == 1 and len(set(map(self.alignment.read_by, theirs))) == 1:
                chosen[ours[0]] = theirs
        return chosen

    # --- one node ---

    def _work(self, index: int, node: SummaryNode) -> ReplacedNodes:
        """The original nodes that one node replaces.

        The producers of its unmatched inputs were divided before it: it replaces none of theirs.
        """
        read = [value for value in node.makes if self.after.readers[value]]
        unmatched_outputs = [value for value in read if not self._is_matched(value)]
        if not node.inputs and not node.has_bodies and unmatched_outputs:
            return ReplacedNodes((), Reason.INSERTED)  # a new constant
        current = self._open_node(index, node, unmatched_outputs)
        work = self._divided(current)
        if not node.has_bodies and any(self.before.nodes[n].has_bodies for n in work.nodes):
            # The tool inlined a branch: the node replaces the branch and its contents.
            work = replace(work, nodes=tuple(sorted({*work.nodes, *self._inside(work.nodes)})))
        work = replace(work, among=current.part)
        if unmatched_outputs:
            self._record(current, work)
        return work

    def _open_node(self, index: int, node: SummaryNode, unmatched_outputs: list[int]) -> _OpenNode:
        """Collect the original nodes that may belong to one node."""
        part = self._between(self._ahead[index], self._behind[index])
        unmatched_inputs = [value for value in node.reads if not self._is_matched(value)]
        done, sharing = _NONE, _NONE
        for value in unmatched_inputs:
            done |= self._done.get(value, _NONE)
            sharing |= self._sharing.get(value, _NONE)
        if any(value in self.alignment.further_originals for value in node.makes):
            done = _NONE  # the output may be any of several equal tensors
        rest = part
        if done:
            rest = tuple(n for n in rest if n not in done)
        if node.makes and not self.after.depends(index):
            # The node computes on weights only, and so do the nodes that it replaces.
            rest = tuple(n for n in rest if not self.before.depends(n))
        rest = self._without_layout_operators(node, rest)
        return _OpenNode(
            index, node, unmatched_inputs, unmatched_outputs, part, done, sharing, rest
        )

    def _divided(self, current: _OpenNode) -> ReplacedNodes:
        """The share of a node in the original nodes that remain."""
        node, rest = current.node, current.rest
        has_open_output = bool(current.unmatched_outputs)
        if moves(node.op):
            return self._of_layout_operator(current.index, node, rest, has_open_output)
        if not rest:
            return self._inserted(current.index, node)
        is_shared = has_open_output or bool(current.sharing)
        if is_shared and self.before.with_several_owners(rest):
            return self._indicated(current)
        coarse = has_open_output or bool(current.unmatched_inputs)
        return ReplacedNodes(rest, self._reason(node, rest), coarse=coarse)

    def _record(self, current: _OpenNode, work: ReplacedNodes) -> None:
        """Record the original nodes that are replaced before the unmatched outputs of a node."""
        computes = not moves(current.node.op)
        done = current.done if work.coarse else current.done.union(work.nodes)
        if current.sharing and not work.coarse and computes:
            # The original nodes before the replaced ones belong to the nodes that share them.
            done = done.union(self._up_to(work.nodes, current.rest))
        sharing = current.sharing
        if work.coarse and computes:
            sharing |= {current.index}
        for value in current.unmatched_outputs:
            self._done[value] = done
            self._sharing[value] = sharing

    def _inside(self, holders: Iterable[int]) -> Iterator[int]:
        """The original nodes in subgraphs of some nodes, at any depth."""
        held = set(holders)
        for index, node in enumerate(self.before.nodes):
            if node.holder in held:
                held.add(index)
                yield index

    def _without_layout_operators(
        self, node: SummaryNode, part: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Remove layout operators if another original node equals the node, or is a part of it.

        A tool removed these layout operators, or moved them elsewhere. A node that is composed of
        others may transpose, and does not reshape.
        """
        removed = frozenset[str]()
        if any(self._is_same_operation(node, n) for n in part):
            removed = LAYOUT
        elif any(self._is_composed_of(node, n) for n in part):
            removed = RESHAPING
        if len(part) < 2 or not removed:
            return part
        kept = []
        for n in part:
            op = self.before.nodes[n].op
            if base_op(op) not in removed or op == node.op:
                kept.append(n)
        return tuple(kept)

    def _is_composed_of(self, node: SummaryNode, original: int) -> bool:
        """Whether an operator of ONNX does the work of an original one among others, as a Gemm.

        Such an operator reshapes nothing.
        """
        op = self.before.nodes[original].op
        is_standard = "::" not in node.op and not moves(node.op)
        return is_standard and op != node.op and not moves(op) and resembles(node.op, op)

    def _is_same_operation(self, node: SummaryNode, original: int) -> bool:
        old = self.before.nodes[original]
        return old.op == node.op and old.attributes == node.attributes

    def _reason(self, node: SummaryNode, part: tuple[int, ...]) -> str:
        """The evidence for its outputs if a node replaces one node; otherwise ``region``."""
        named = [reason for v in node.makes if (reason := self.alignment.evidence_of[v])]
        if named and len(part) == 1:
            return named[0]
        return Reason.REGION

    def _of_layout_operator(
        self, index: int, node: SummaryNode, part: tuple[int, ...], open_ended: bool
    ) -> ReplacedNodes:
        """The original nodes that a layout operator replaces: such operators, or its own.

        ``open_ended``: Whether an output of the node has no counterpart.
        """
        base = base_op(node.op)
        kinds = LAYOUT if base in LAYOUT else frozenset((base,))
        replaced = tuple(n for n in part if base_op(self.before.nodes[n].op) in kinds)
        only_moves = all(moves(self.before.nodes[n].op, views=True) for n in part)
        if not replaced and not open_ended and only_moves:
            # Between matched tensors, it replaces operators of other kinds if none computes.
            replaced = part
        if not replaced:
            return self._inserted(index, node)
        coarse = open_ended and len(replaced) > 1
        return ReplacedNodes(replaced, self._reason(node, replaced), coarse=coarse)

    def _inserted(self, index: int, node: SummaryNode) -> ReplacedNodes:
        """An inserted node; it may restore original tensors, under their names or others."""
        ends = set[int]()
        for value in node.makes:
            maker = self.alignment.original(value)
            if maker == NOTHING:
                continue
            if self.alignment.keeps_name(value) or self._restores(index, node, value):
                ends.add(maker)
        return ReplacedNodes((), Reason.INSERTED, ends=tuple(sorted(ends)))

    def _restores(self, index: int, node: SummaryNode, value: int) -> bool:
        """Whether an output is exactly an original tensor, and inputs are only other forms of it."""
        alignment = self.alignment
        number = alignment.counterpart[value]
        same = [v for v in node.reads if number in alignment.numbers_of(v)]
        if not alignment.exact[value] or any(alignment.exact[v] for v in same):
            return False
        return bool(same) or number not in self._behind[index]

    def _indicated(self, current: _OpenNode) -> ReplacedNodes:
        """The original nodes that a node replaces, by its name, weights or operator.

        ``current.rest`` are the original nodes between the tensors around it. Several new nodes may
        share them. The first evidence in order of certainty decides, and the nodes before the
        indicated ones are replaced too. Nodes of the same name or weights are claimed: other new
        nodes do not get them. Without evidence, the node may replace any of them.
        """
        index, name, part = current.index, current.node.name, current.rest
        named = [n for n in part if name and self.before.nodes[n].name == name]
        if named:
            return self._claim(named, Reason.NODE, current)
        reading = self._with_same_weights(index, part)
        if reading:
            return self._claim(reading, Reason.INITIALIZER, current)
        same_operator = [n for n in self._same_operator.get(index, ()) if n in part]
        if same_operator:
            nodes = self._up_to(same_operator, part)
            return ReplacedNodes(nodes, Reason.REGION, chosen=True)
        return ReplacedNodes(part, Reason.REGION, coarse=True)

    def _claim(self, selected: list[int], reason: str, current: _OpenNode) -> ReplacedNodes:
        """Replace selected original nodes, and nodes before unless earlier nodes share these."""
        part = current.rest
        if not current.sharing:
            return ReplacedNodes(self._up_to(selected, part), reason)
        own = self._between_each_other(selected, part)
        for other in current.sharing:
            self._claimed[other].update(own)
        return ReplacedNodes(own, reason)

    def _with_same_weights(self, index: int, part: tuple[int, ...]) -> list[int]:
        """The original nodes of a part that read the weights of a node.

        They are divided in order among this node and later ones that read the same weights.
        """
        key = self._ahead[index], self._weights_of(index)
        weights = key[1]
        reading = [n for n in part if not weights.isdisjoint(self._tensors_read_by(n))]
        rivals = sum(rival >= index for rival in self._readers[key])
        share, left = divmod(len(reading), rivals)
        return reading if left else reading[:share]

    def _weights_of(self, index: int) -> frozenset[int | str]:
        """The names and numbers of the weights among the inputs of a node."""
        weights = set[int | str]()
        for value in self.after.nodes[index].inputs:
            if value == NOTHING or self.after.live[value]:
                continue
            weights.add(self.after.values[value].name)
            weights.add(self.alignment.counterpart[value])
        return frozenset(weights - {"", NOTHING})

    def _tensors_read_by(self, original: int) -> set[int | str]:
        """The names and numbers of the inputs of an original node."""
        inputs = self.before.nodes[original].inputs
        names = {self.before.values[v].name for v in inputs if v != NOTHING}
        return names | {self.number[v] for v in inputs}

    @cached_property
    def _readers(self) -> dict[tuple[frozenset[int], frozenset[int | str]], list[int]]:
        """The nearest matched values after nodes, and the weights that they read → these nodes."""
        readers = defaultdict[tuple[frozenset[int], frozenset[int | str]], list[int]](list)
        for index, ahead in enumerate(self._ahead):
            readers[ahead, self._weights_of(index)].append(index)
        return readers

    def _between_each_other(self, ends: list[int], part: tuple[int, ...]) -> tuple[int, ...]:
        """Nodes ``ends``, and nodes of a part on a path between two of them."""
        found = set(ends)
        for node in self._up_to(ends, part):  # in order of execution
            makers = {self.before.maker[value] for value in self.before.nodes[node].reads}
            if not found.isdisjoint(makers):
                found.add(node)
        return tuple(sorted(found))

    def _up_to(self, ends: Iterable[int], part: tuple[int, ...]) -> tuple[int, ...]:
        """Nodes ``ends``, and nodes of a part on which they depend."""
        inside = set(part)

        def producers(node: int) -> list[int]:
            makers = [self.before.maker[value] for value in self.before.nodes[node].reads]
            return [maker for maker in makers if maker in inside]

        return tuple(sorted(reached(ends, producers)))

    # --- between matched tensors ---

    def _between(self, ahead: frozenset[int], behind: frozenset[int]) -> tuple[int, ...]:
        """The original nodes between the tensors ``behind`` and the values ``ahead``, in order."""
        key = ahead, behind
        if key not in self._slices:
            between: set[int] = set()
            for value in ahead:
                self._collect(value, behind, between)
            self._slices[key] = tuple(sorted(between))
        return self._slices[key]

    def _collect(self, value: int, behind: frozenset[int], collected: set[int]) -> None:
        """Add the original nodes between the tensors ``behind`` and one value to ``collected``.

        The search ends at other matched tensors, too. Nodes before these are collected only if the
        tool computes them a second time.
        """
        before, number = self.before, self.number
        starts = self._starts(value, behind)
        live = any(before.live[v] for v in starts)
        queue, elsewhere = list(starts), list[int]()
        first = set(starts)
        seen: set[int] = set()
        while queue:
            at = queue.pop()
            maker = before.maker[at]
            if maker == NOTHING or maker in seen:
                continue
            if live and not before.live[at]:
                continue
            if at not in first and number[at] in behind:
                continue
            if at not in first and number[at] in self.alignment.matched:
                elsewhere.append(at)
                continue
            seen.add(maker)
            if not self.alignment.numbers.idle[maker] or at in first:
                collected.add(maker)
            queue += before.nodes[maker].reads
        for at in elsewhere:
            collected |= self._repeated(at, behind, live)

    def _starts(self, value: int, behind: frozenset[int]) -> list[int]:
        """The original values that a value replaces: counterpart and eliminated equal values."""
        alignment = self.alignment
        origin = alignment.origin(value)
        if origin == NOTHING:
            return []
        number = alignment.counterpart[value]
        if number in behind:  # the output of the node is its input
            if alignment.keeps_name(value) and self._is_idle(origin):
                return [origin, *self._merged_copies(value, origin)]
            return []
        equal = []
        for member in alignment.numbers.members.get(number, ()):
            is_computed = self.before.maker[member] != NOTHING and not self._is_idle(member)
            if is_computed and (member == origin or member not in self._taken):
                equal.append(member)
        also = self._outside(alignment.further_originals.get(value, ()), behind)
        # All of a concatenation is computed; of equal tensors, consumers may tell which.
        joined = self._outside(alignment.parts.get(value, ()), behind)
        if alignment.by_consumers:
            distinct = list(dict.fromkeys((equal or [origin]) + also))
            return list(dict.fromkeys(self._read_by_consumers(value, distinct) + joined))
        return list(dict.fromkeys((self._read_alike(value, equal) or [origin]) + also + joined))

    def _outside(self, originals: Iterable[int], behind: frozenset[int]) -> list[int]:
        """The original tensors whose numbers are not ``behind``."""
        return [original for original in originals if self.number[original] not in behind]

    def _is_idle(self, original: int) -> bool:
        """Whether the producer of an original value returns its input."""
        return self.alignment.numbers.idle[self.before.maker[original]]

    def _merged_copies(self, value: int, origin: int) -> list[int]:
        """Outputs of eliminated nodes that returned their input, if consumers of a value read them.

        Two casts to the type that a tensor has are such nodes: common-subexpression elimination
        leaves one of them.
        """
        node = self.before.nodes[self.before.maker[origin]]
        numbers = self.alignment.numbers
        copies = []
        for member in numbers.members[numbers.current(self.alignment.counterpart[value])]:
            maker = self.before.maker[member]
            if maker == NOTHING or member == origin or member in self._taken:
                continue
            other = self.before.nodes[maker]
            if numbers.idle[maker] and (other.op, other.attributes) == (node.op, node.attributes):
                copies.append(member)
        return self._read_by_counterparts(value, copies)

    def _read_alike(self, value: int, equal: list[int]) -> list[int]:
        """Of equal constants, the inputs of its consumers' counterparts; all if there are none."""
        if len(equal) < 2 or any(self.before.nodes[self.before.maker[one]].inputs for one in equal):
            return equal
        return self._read_by_counterparts(value, equal) or equal

    def _read_by_counterparts(self, value: int, originals: list[int]) -> list[int]:
        """The subset of original tensors that the counterparts of a value's consumers read."""
        consumers = set[int]()
        for reader in self.after.readers[value]:
            consumers.update(map(self.alignment.original, self.after.nodes[reader].makes))
        return [v for v in originals if not consumers.isdisjoint(self.before.readers[v])]

    def _read_by_consumers(self, value: int, equal: list[int]) -> list[int]:
        """Of equal tensors, the inputs of its consumers' counterparts.

        All of them if a consumer has no counterpart.
        """
        if len(equal) < 2:
            return equal
        consumers, queue, seen = set[int](), [value], {value}
        while queue:
            for reader in self.after.readers[queue.pop()]:
                for output in self.after.nodes[reader].makes:
                    if output in seen:
                        continue
                    seen.add(output)
                    makers = self._makers_of_equal(output)
                    if len(makers) == 1 and output not in self.alignment.further_originals:
                        consumers |= makers
                    elif len(seen) < _MOST_REPEATED and makers:
                        queue.append(output)  # it is one of several equal ones, too
                    else:
                        return equal
        return [one for one in equal if self._reaches(one, consumers)] or equal

    def _makers_of_equal(self, value: int) -> set[int]:
        """The original nodes that compute a tensor or equal ones."""
        numbers = self.alignment.numbers
        number = numbers.current(self.alignment.counterpart[value])
        return {maker for maker in self.alignment.makers(number) if not numbers.idle[maker]}

    def _reaches(self, value: int, nodes: set[int]) -> bool:
        """Whether a node of ``nodes`` depends on a tensor, only through results with equal ones."""
        queue, seen = [value], set[int]()
        members = self.alignment.numbers.members
        while queue and len(seen) < _MOST_REPEATED:
            for reader in self.before.readers[queue.pop()]:
                if reader in nodes:
                    return True
                outputs = [v for v in self.before.nodes[reader].makes if v not in seen]
                seen.update(outputs)
                queue += [v for v in outputs if len(members[self.number[v]]) > 1]
        return False

    def _repeated(self, value: int, behind: frozenset[int], live: bool) -> set[int]:
        """Original nodes that another node also replaces.

        None if an input is not available, or if there are too many.
        """
        before, queue, repeated = self.before, [value], set[int]()
        while queue:
            at = queue.pop()
            maker = before.maker[at]
            if self.number[at] in behind or maker in repeated:
                continue
            if live and not before.live[at]:
                continue
            if maker == NOTHING:
                if before.values[at].kind == "input":
                    return set()
                continue
            if len(repeated) == _MOST_REPEATED:
                return set()
            repeated.add(maker)
            queue += before.nodes[maker].reads
        return {maker for maker in repeated if not self.alignment.numbers.idle[maker]}
