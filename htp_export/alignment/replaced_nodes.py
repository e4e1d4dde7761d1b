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
from htp_export.alignment.numbering import repeats
from htp_export.format.tags import Reason
from htp_export.shapes.operator_kinds import LAYOUT, base_op, moves

_REPEATED = 40  # original nodes that one node is assumed to compute a second time
_SHARED: frozenset[int] = frozenset()


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


class _Division:
    def __init__(self, alignment: Alignment) -> None:
        self.known = alignment
        self.before, self.after = alignment.before, alignment.after
        self.number = alignment.numbers.number
        kept = (value for value in range(len(self.after.values)) if alignment.keeps_name(value))
        self._taken = {alignment.origin(value) for value in kept if self._is_made(value)}
        self._slices: dict[tuple[frozenset[int], frozenset[int]], tuple[int, ...]] = {}
        self._behind, self._ahead = self._surroundings()
        # unmatched value → original nodes that are replaced before it
        self._done: dict[int, frozenset[int]] = {}
        # Unmatched value → nodes before it that share their original nodes with others, and compute
        # something
        self._sharing: dict[int, frozenset[int]] = {}
        # such a node → original nodes that others point at
        self._pointed: dict[int, set[int]] = defaultdict(set)
        self._alike = self._by_operator()
        self.result = [self._work(index, node) for index, node in enumerate(self.after.nodes)]
        for index, pointed in self._pointed.items():
            work = self.result[index]
            left = tuple(n for n in work.nodes if n not in pointed)
            if left:
                self.result[index] = replace(work, nodes=left)

    def _is_made(self, value: int) -> bool:
        """Whether an original value that remains under its name is still computed: not given back from an equal one."""
        maker = self.after.maker[value]
        return maker == NOTHING or not repeats(self.after.nodes[maker])

    def _surroundings(self) -> tuple[list[frozenset[int]], list[frozenset[int]]]:
        """For each node: numbers of the nearest matched tensors before it, and the nearest matched values after it."""
        counterpart, nodes = self.known.counterpart, self.after.nodes
        behind, ahead = [_SHARED] * len(nodes), [_SHARED] * len(nodes)
        carried: dict[int, frozenset[int]] = {}
        for index, node in enumerate(nodes):
            nearest = set[int]().union(*(self.known.numbers_of(v) for v in node.reads))
            behind[index] = frozenset(nearest.union(*(carried.get(v, _SHARED) for v in node.reads)))
            carried.update((v, behind[index]) for v in node.makes if counterpart[v] == NOTHING)
        carried = {}
        for index in range(len(nodes) - 1, -1, -1):
            nearest = {v for v in nodes[index].makes if counterpart[v] != NOTHING}
            ahead[index] = frozenset(
                nearest.union(*(carried.get(v, _SHARED) for v in nodes[index].makes))
            )
            for value in nodes[index].reads:
                if counterpart[value] == NOTHING:
                    carried[value] = carried.get(value, _SHARED) | ahead[index]
        return behind, ahead

    def _by_operator(self) -> dict[int, list[int]]:
        """Node after → the original nodes of its operator that it replaces, as their number says.

        Equally many on both sides of a region are in the same order. Several products of one tensor
        became one.
        """
        rivals = defaultdict[tuple[frozenset[int], str], list[int]](list)
        for index, node in enumerate(self.after.nodes):
            rivals[self._ahead[index], base_op(node.op)].append(index)
        alike: dict[int, list[int]] = {}
        for (ahead, op), ours in rivals.items():
            region = set[int]().union(
                *(self._between(ahead, self._behind[index]) for index in ours)
            )
            theirs = sorted(n for n in region if base_op(self.before.nodes[n].op) == op)
            if len(ours) == len(theirs):
                alike |= {mine: [original] for mine, original in zip(ours, theirs, strict=True)}
            elif len(ours) == 1 and len({self.known.read_by(n) for n in theirs}) == 1:
                alike[ours[0]] = theirs
        return alike

    # --- one node ---

    def _work(self, index: int, node: SummaryNode) -> ReplacedNodes:
        counterpart, nodes = self.known.counterpart, self.before.nodes
        unknown = [v for v in node.makes if counterpart[v] == NOTHING and self.after.readers[v]]
        if not node.inputs and not node.has_bodies and unknown:
            return ReplacedNodes((), Reason.INSERTED)
        part = self._between(self._ahead[index], self._behind[index])
        inner = [v for v in node.reads if counterpart[v] == NOTHING]
        done = _SHARED.union(*(self._done.get(v, _SHARED) for v in inner))
        sharing = _SHARED.union(*(self._sharing.get(v, _SHARED) for v in inner))
        if any(v in self.known.also for v in node.makes):
            done = _SHARED  # it may be any of several equal tensors
        rest = tuple(n for n in part if n not in done) if done else part
        if node.makes and not self.after.depends(index):  # it computes on weights only
            rest = tuple(n for n in rest if not self.before.depends(n))
        rest = self._without_movers(node, rest)
        if moves(node.op):
            work = self._moved(index, node, rest, bool(unknown))
        elif not rest:
            work = self._inserted(index, node)
        elif (unknown or sharing) and self.before.with_several_owners(rest):
            work = self._pointed_at(index, node, rest, sharing)
        else:
            work = ReplacedNodes(rest, self._reason(node, rest), coarse=bool(unknown or inner))
        # an inlined branch
        if not node.has_bodies and any(nodes[n].has_bodies for n in work.nodes):
            work = replace(work, nodes=tuple(sorted({*work.nodes, *self._inside(work.nodes)})))
        work = replace(work, among=part)
        if unknown:
            replaced = done if work.coarse else done.union(work.nodes)
            # what is before belongs to those that share it
            if sharing and not work.coarse and not moves(node.op):
                replaced = replaced.union(self._up_to(work.nodes, rest))
            self._done.update(dict.fromkeys(unknown, replaced))
            if work.coarse and not moves(node.op):
                sharing |= {index}
            self._sharing.update(dict.fromkeys(unknown, sharing))
        return work

    def _inside(self, holders: Iterable[int]) -> Iterator[int]:
        held = set(holders)
        for index, node in enumerate(self.before.nodes):
            if node.holder in held:
                held.add(index)
                yield index

    def _without_movers(self, node: SummaryNode, part: tuple[int, ...]) -> tuple[int, ...]:
        """Leave layout operators out if the node is one of the others: they were removed, or moved elsewhere."""
        nodes = self.before.nodes
        if len(part) < 2 or not any(
            nodes[n].op == node.op and nodes[n].attributes == node.attributes for n in part
        ):
            return part
        return tuple(
            n for n in part if base_op(nodes[n].op) not in LAYOUT or nodes[n].op == node.op
        )

    def _reason(self, node: SummaryNode, part: tuple[int, ...]) -> str:
        """The evidence of its outputs' matches if a node replaces one node; otherwise ``region``."""
        named = [self.known.named[v] for v in node.makes if self.known.named[v]]
        if named and len(part) == 1:
            return named[0]
        return Reason.REGION

    def _moved(
        self, index: int, node: SummaryNode, part: tuple[int, ...], open_ended: bool
    ) -> ReplacedNodes:
        """The original nodes of a layout operator: those of its kind."""
        base = base_op(node.op)
        kinds = LAYOUT if base in LAYOUT else frozenset((base,))
        moved = tuple(n for n in part if base_op(self.before.nodes[n].op) in kinds)
        if (
            not moved
            and not open_ended
            and part
            and all(moves(self.before.nodes[n].op, views=True) for n in part)
        ):
            moved = part
        if not moved:
            return self._inserted(index, node)
        return ReplacedNodes(moved, self._reason(node, moved), coarse=open_ended and len(moved) > 1)

    def _inserted(self, index: int, node: SummaryNode) -> ReplacedNodes:
        """An inserted node; it may restore original tensors, under their names or others."""
        known, ends = self.known, dict[int, None]()
        for value in node.makes:
            maker = known.original(value)
            if maker != NOTHING and (
                known.keeps_name(value) or self._gives_back(index, node, value)
            ):
                ends[maker] = None
        return ReplacedNodes((), Reason.INSERTED, ends=tuple(sorted(ends)))

    def _gives_back(self, index: int, node: SummaryNode, value: int) -> bool:
        """Whether the output of a node is exactly an original tensor, and no input is, except in another form."""
        known = self.known
        same = [v for v in node.reads if known.counterpart[value] in known.numbers_of(v)]
        if not known.exact[value] or any(known.exact[v] for v in same):
            return False
        return bool(same) or known.counterpart[value] not in self._behind[index]

    def _pointed_at(
        self, index: int, node: SummaryNode, part: tuple[int, ...], sharing: frozenset[int]
    ) -> ReplacedNodes:
        """The part of the nodes shared by several nodes that the node's name, weights or operator indicates.

        What is before these nodes belongs to the node, too, unless nodes before it share the part
        (``sharing``), and nothing indicates which of it they replace.
        """
        nodes = self.before.nodes
        named = [n for n in part if node.name and nodes[n].name == node.name]
        reading = self._reading(index, part)
        alike = [n for n in self._alike.get(index, ()) if n in part]
        for selected, reason in (
            (named, Reason.NODE),
            (reading, Reason.INITIALIZER),
            (alike, Reason.REGION),
        ):
            if not selected:
                continue
            if not sharing or selected is alike:
                return ReplacedNodes(self._up_to(selected, part), reason, chosen=selected is alike)
            own = self._between_each_other(selected, part)
            for other in sharing:
                self._pointed[other].update(own)
            return ReplacedNodes(own, reason)
        return ReplacedNodes(part, Reason.REGION, coarse=True)

    def _reading(self, index: int, part: tuple[int, ...]) -> list[int]:
        """The nodes of a part that read the weights of a node; shared with later nodes that read the same, in order."""
        key = self._ahead[index], self._weights_of(index)
        reading = [n for n in part if not key[1].isdisjoint(self._read_by(n))]
        each, left = divmod(len(reading), sum(rival >= index for rival in self._readers[key]))
        return reading if left else reading[:each]

    def _weights_of(self, index: int) -> frozenset[int | str]:
        """The names and numbers of the weights that a node reads."""
        known, values = self.known, self.after.values
        weights = [
            v for v in self.after.nodes[index].inputs if v != NOTHING and not self.after.live[v]
        ]
        names, numbers = {values[v].name for v in weights}, {known.counterpart[v] for v in weights}
        return frozenset((names - {""}) | (numbers - {NOTHING}))

    def _read_by(self, original: int) -> set[int | str]:
        inputs = self.before.nodes[original].inputs
        return {self.before.values[v].name for v in inputs if v != NOTHING} | {
            self.number[v] for v in inputs
        }

    @cached_property
    def _readers(self) -> dict[tuple[frozenset[int], frozenset[int | str]], list[int]]:
        """The nearest matched values after a node, and the weights that it reads → the nodes of which this is true."""
        readers = defaultdict[tuple[frozenset[int], frozenset[int | str]], list[int]](list)
        for index, ahead in enumerate(self._ahead):
            readers[ahead, self._weights_of(index)].append(index)
        return readers

    def _between_each_other(self, ends: list[int], part: tuple[int, ...]) -> tuple[int, ...]:
        """Some nodes, and those of a part that depend on one of them and on which another one depends."""
        found = set(ends)
        for node in self._up_to(ends, part):  # in order of execution
            makers = {self.before.maker[value] for value in self.before.nodes[node].reads}
            if not found.isdisjoint(makers):
                found.add(node)
        return tuple(sorted(found))

    def _up_to(self, ends: Iterable[int], part: tuple[int, ...]) -> tuple[int, ...]:
        """Some nodes, and those of a part on which they depend."""
        inside, queue, behind = set(part), list(ends), set(ends)
        while queue:
            for value in self.before.nodes[queue.pop()].reads:
                maker = self.before.maker[value]
                if maker in inside and maker not in behind:
                    behind.add(maker)
                    queue.append(maker)
        return tuple(sorted(behind))

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
        before, number = self.before, self.number
        starts = self._starts(value, behind)
        live = any(before.live[v] for v in starts)
        queue, elsewhere = list(starts), list[int]()
        first = set(starts)
        seen: set[int] = set()
        while queue:
            at = queue.pop()
            maker = before.maker[at]
            if maker == NOTHING or maker in seen or (live and not before.live[at]):
                continue
            if at not in first:
                if number[at] in behind:
                    continue
                if number[at] in self.known.known:
                    elsewhere.append(at)
                    continue
            seen.add(maker)
            if not self.known.numbers.idle[maker] or at in first:
                collected.add(maker)
            queue += before.nodes[maker].reads
        for at in elsewhere:
            collected |= self._repeated(at, behind, live)

    def _starts(self, value: int, behind: frozenset[int]) -> list[int]:
        """The original values that a value replaces: its counterpart, and equal values that were eliminated."""
        known, origin = self.known, self.known.origin(value)
        if origin == NOTHING:
            return []
        if known.counterpart[value] in behind:  # its output is its input
            if known.keeps_name(value) and known.numbers.idle[self.before.maker[origin]]:
                return [origin, *self._merged_copies(value, origin)]
            return []
        equal = [
            member
            for member in known.numbers.members.get(known.counterpart[value], ())
            if self.before.maker[member] != NOTHING
            and not known.numbers.idle[self.before.maker[member]]
            and (member == origin or member not in self._taken)
        ]
        more = (*known.also.get(value, ()), *known.parts.get(value, ()))
        also = [further for further in more if self.number[further] not in behind]
        if known.by_consumers:
            return self._read_by_consumers(value, [*dict.fromkeys((equal or [origin]) + also)])
        return [*dict.fromkeys((self._read_alike(value, equal) or [origin]) + also)]

    def _merged_copies(self, value: int, origin: int) -> list[int]:
        """Equal outputs of eliminated nodes that gave back their input as the node does, and that its consumers read.

        Two casts to the type that a tensor has are such nodes: common-subexpression elimination
        leaves one of them.
        """
        node = self.before.nodes[self.before.maker[origin]]
        copies = []
        for member in self.known.numbers.members[
            self.known.numbers.current(self.known.counterpart[value])
        ]:
            maker = self.before.maker[member]
            if (
                maker == NOTHING
                or member == origin
                or member in self._taken
                or not self.known.numbers.idle[maker]
            ):
                continue
            other = self.before.nodes[maker]
            if (other.op, other.attributes) == (node.op, node.attributes):
                copies.append(member)
        return self._read_by_counterparts(value, copies)

    def _read_alike(self, value: int, equal: list[int]) -> list[int]:
        """Of equal constants, those that the counterparts of its consumers read; all if there is none."""
        if len(equal) < 2 or any(self.before.nodes[self.before.maker[one]].inputs for one in equal):
            return equal
        return self._read_by_counterparts(value, equal) or equal

    def _read_by_counterparts(self, value: int, originals: list[int]) -> list[int]:
        """The original tensors among some that the counterparts of a value's consumers read."""
        outputs = (
            output
            for reader in self.after.readers[value]
            for output in self.after.nodes[reader].makes
        )
        consumers = {*map(self.known.original, outputs)}
        return [
            original
            for original in originals
            if not consumers.isdisjoint(self.before.readers[original])
        ]

    def _read_by_consumers(self, value: int, equal: list[int]) -> list[int]:
        """Of equal tensors, those that the counterparts of its consumers read; all if that is not known of one."""
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
                    if len(makers) == 1 and output not in self.known.also:
                        consumers |= makers
                    elif len(seen) < _REPEATED and makers:
                        queue.append(output)  # it is one of several equal ones, too
                    else:
                        return equal
        return [one for one in equal if self._before_one_of(one, consumers)] or equal

    def _makers_of_equal(self, value: int) -> set[int]:
        """The original nodes that compute a tensor or equal ones."""
        number = self.known.numbers.current(self.known.counterpart[value])
        return {maker for maker in self.known.makers(number) if not self.known.numbers.idle[maker]}

    def _before_one_of(self, value: int, nodes: set[int]) -> bool:
        """Whether an original tensor is read by one of some nodes, or by one whose result is equal to others."""
        queue, seen = [value], set[int]()
        while queue and len(seen) < _REPEATED:
            for reader in self.before.readers[queue.pop()]:
                if reader in nodes:
                    return True
                outputs = [v for v in self.before.nodes[reader].makes if v not in seen]
                seen.update(outputs)
                queue += [v for v in outputs if len(self.known.numbers.members[self.number[v]]) > 1]
        return False

    def _repeated(self, value: int, behind: frozenset[int], live: bool) -> set[int]:
        """Original nodes that another node also replaces; none if an input is not available, or there are too many."""
        before, queue, repeated = self.before, [value], set[int]()
        while queue:
            at = queue.pop()
            maker = before.maker[at]
            if self.number[at] in behind or maker in repeated or (live and not before.live[at]):
                continue
            if maker == NOTHING:
                if before.values[at].kind == "input":
                    return set()
                continue
            if len(repeated) == _REPEATED:
                return set()
            repeated.add(maker)
            queue += before.nodes[maker].reads
        return {maker for maker in repeated if not self.known.numbers.idle[maker]}
