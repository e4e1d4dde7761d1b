"""The difference of two states of a graph: which nodes replace which, for passes that record nothing.

A node that stays computes what it did: if it reads another value than before, the two values are
equal, and so are values with the same name. Between these pairs are the removed nodes, and the
nodes that replace them. A node that is read in place of an equal one does the work of both. A
removed node that returned its input unchanged leaves nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import onnx_ir as ir

from htp_export.errors import HtpExportError
from htp_export.lineage.owner_rule import NOBODYS, Owned, OwnerRule, Replacement, Work
from htp_export.lineage.records import last_replacement_of, replacement_of
from htp_export.model.boundaries import dependence, given_values, reads_and_results
from htp_export.shapes.operator_kinds import (
    LAYOUT,
    RANDOM,
    SIZES_ONLY,
    base_op,
    is_standard,
    moves,
    operator_of,
    subgraphs,
    without_copies,
)
from htp_export.shapes.schemas import settings

_Slots = Sequence[ir.Value | None]


@dataclass(frozen=True, slots=True)
class _Seen:
    """A node at that time; ``metadata`` is that of the node itself, which does not change after its removal."""

    inputs: _Slots
    outputs: Sequence[ir.Value]
    operator: tuple[object, ...]
    metadata: Mapping[str, str]


class Snapshot:
    """The nodes of a model at one time, with their inputs, outputs and owners."""

    def __init__(self, model: ir.Model) -> None:
        self.nodes: dict[ir.Node, _Seen] = {}
        self.makers: dict[ir.Value, ir.Node] = {}
        self.names: dict[ir.Value, str | None] = {}
        self._holders: dict[ir.Node, ir.Node] = {}
        self._works: dict[ir.Node, Work] = {}
        self._ends = {
            "inputs": [value.name for value in model.graph.inputs],
            "outputs": [value.name for value in model.graph.outputs],
        }
        self.results: dict[ir.Graph, tuple[ir.Value, ...]] = {}
        # value → the one that was recorded to replace it, until then
        self.replaced: dict[ir.Value, ir.Value] = {}
        self._add(model.graph, model.opset_imports)
        for function in model.functions.values():
            self._add(function.graph, function.opset_imports)
        self._dependence = [*reads_and_results(self.nodes)], given_values(model)

    @cached_property
    def live(self) -> Collection[ir.Value | None]:
        """The values that depend on values of the model's inputs, not on constants and sizes alone."""
        return dependence(*self._dependence)

    def is_live(self, node: ir.Node) -> bool:
        """Whether a result of a node depends on values of the model's inputs."""
        return any(value in self.live for value in self.nodes[node].outputs)

    def work_of(self, node: ir.Node) -> Work:
        """The tags that a node had, always the same object for a node."""
        if node not in self._works:
            self._works[node] = Work.of(self.nodes[node].metadata)
        return self._works[node]

    def holders(self, node: ir.Node) -> tuple[ir.Node, ...]:
        """The node that holds the subgraph in which a node is, if it is in one."""
        return (self._holders[node],) if node in self._holders else ()

    def holds(self, holder: ir.Node, node: ir.Node) -> bool:
        """Whether a node was in a subgraph of another one."""
        around = self._holders.get(node)
        while around is not None and around is not holder:
            around = self._holders.get(around)
        return around is holder

    def check(self, before: Snapshot) -> None:
        """Check what every pass ensures: the model's inputs and outputs keep their names; every tensor has a producer.

        The level of a pass, which it ensures too, is checked by ``optimize(verify=True)``.
        """
        for what, names in self._ends.items():
            if names != before._ends[what]:
                raise HtpExportError(
                    f"the {what} of the model were {before._ends[what]}, and are {names}"
                )
        for node, seen in self.nodes.items():
            for value in seen.inputs:
                if value is not None and not self._is_available(value):
                    raise HtpExportError(
                        f"{node.op_type} {node.name!r} reads {value.name!r}, which has no producer"
                    )
        for results in self.results.values():
            for value in results:
                if not self._is_available(value):
                    raise HtpExportError(f"the output {value.name!r} has no producer")

    def _is_available(self, value: ir.Value) -> bool:
        return value in self.makers or value.is_graph_input() or value.is_initializer()

    def _add(
        self, graph: ir.Graph, versions: Mapping[str, int], holder: ir.Node | None = None
    ) -> None:
        self.results[graph] = tuple(graph.outputs)
        for node in graph:
            operator = (node.domain, node.op_type, node.overload, *settings(node, versions))
            self.nodes[node] = _Seen(node.inputs, node.outputs, operator, node.metadata_props)
            if holder is not None:
                self._holders[node] = holder
            for value in node.outputs:
                self.makers[value], self.names[value] = node, value.name
            for read in node.inputs:
                if read is not None and (replacement := replacement_of(read)) is not None:
                    self.replaced[read] = replacement
            for body in subgraphs(node):
                self._add(body, versions, node)


@dataclass(frozen=True)
class PassDifference:
    """The changes of a graph by a pass."""

    before: Snapshot
    after: Snapshot
    removed: Mapping[ir.Node, None]  # nodes that were removed or changed in place, in order
    added: Mapping[ir.Node, None]  # new nodes, and those that were changed in place, in order
    # old value → the equal value that replaces it
    equal: dict[ir.Value, ir.Value] = field(default_factory=dict)
    # nodes that stayed, and now also do the work of others
    merged: dict[ir.Node, None] = field(default_factory=dict)

    @classmethod
    def between(cls, before: Snapshot, after: Snapshot) -> PassDifference:
        """Compare two snapshots of one model."""
        old, new = before.nodes, after.nodes
        changed = {
            node
            for node, seen in old.items()
            if node in new and seen.operator != new[node].operator
        }
        removed = dict.fromkeys(node for node in old if node not in new or node in changed)
        added = dict.fromkeys(node for node in new if node not in old or node in changed)
        difference = cls(before, after, removed, added)
        difference._pair(changed)
        return difference

    def __bool__(self) -> bool:
        return bool(self.removed or self.added or self.equal)

    def check_records(self) -> None:
        """Compare the recorded replacements with the tensors that nodes read before and after.

        Raises:
            HtpExportError: If a tensor was recorded to be replaced by another than the one that its
                consumers read.
        """
        for node, seen in self.before.nodes.items():
            if node not in self.after.nodes:
                continue
            for was, now in zip(seen.inputs, self.after.nodes[node].inputs, strict=False):
                if was is None or now is None or was is now:
                    continue
                if now.is_initializer():  # a constant of this consumer alone, not of all
                    continue
                recorded = replacement_of(was)
                if recorded is None or recorded is self.before.replaced.get(was):
                    continue
                if last_replacement_of(recorded) is not last_replacement_of(now):
                    raise HtpExportError(
                        f"{node.op_type} {node.name!r} reads {now.name!r} in place of {was.name!r}, and "
                        f"{recorded.name!r} was recorded to replace it"
                    )

    def _pair(self, changed: Collection[ir.Node]) -> None:
        """Pair old values with those that replace them, by consumers and by names."""
        for node, seen in self.before.nodes.items():
            if node in self.after.nodes and node not in changed:
                self._pair_slots(seen.inputs, self.after.nodes[node].inputs)
        for graph, results in self.before.results.items():
            self._pair_slots(results, self.after.results.get(graph, ()))
        for node in changed:  # changed in place; it may still give the same result
            self.equal.update({value: value for value in self.before.nodes[node].outputs})
        old = (value for node in self.removed for value in self.before.nodes[node].outputs)
        gone = {name: value for value in old if (name := self.before.names[value])}
        for node in self.added:
            for value in self.after.nodes[node].outputs:
                if value.name in gone:
                    self.equal.setdefault(gone[value.name], value)
        self._pair_by_node_names()
        self._pair_chains()

    def _pair_chains(self) -> None:
        """Pair what removed nodes computed with what remains, where equal nodes read equal values.

        Of two equal chains of nodes, only the last results are paired by their consumers: those
        within had none other.
        """
        twins: dict[ir.Node, ir.Node] = {}
        for old, new in list(self.equal.items()):
            for was, now in _twins(self, old, new):
                twins.setdefault(self.before.makers[was], self.after.makers[now])
        for gone in self.removed:  # in order, so that what a node reads is paired before
            remaining = twins.get(gone)
            if remaining is None or is_standard(gone, *RANDOM):
                continue
            seen, twin = self.before.nodes[gone], self.after.nodes[remaining]
            if seen.operator == twin.operator and self.same(gone, remaining):
                for old, new in zip(seen.outputs, twin.outputs, strict=False):
                    self.equal.setdefault(old, new)

    def _pair_by_node_names(self) -> None:
        """Pair the results of a removed node with those of a new node of its name and operator, if nothing else does.

        A quantizer lets the node give another precision of the tensor, under another name.
        """
        named = {
            (str(node.name), node.op_type): node
            for node in self.removed
            if node.name and node not in self.added
        }
        for node in self.added:
            gone = named.get((str(node.name), node.op_type))
            if gone is None:
                continue
            for was, now in zip(
                self.before.nodes[gone].outputs, self.after.nodes[node].outputs, strict=False
            ):
                if was not in self.equal and now.uses():
                    self.equal[was] = now

    def _pair_slots(self, old: _Slots, new: _Slots) -> None:
        if old == new:
            return
        for was, now in zip(old, new, strict=False):
            if was is not now and was is not None and now is not None:
                self.equal[was] = now

    def neighbours_of(self, nodes: Iterable[ir.Node]) -> dict[ir.Node, None]:
        """The nodes that compute what some nodes read, that read what these compute, and that hold them."""
        around: dict[ir.Node, None] = {}
        for node in nodes:
            for near in (node.successors(), node.predecessors(), self.after.holders(node)):
                around.update(dict.fromkeys(near))
        return around

    def same(self, gone: ir.Node, remaining: ir.Node) -> bool:
        """Whether a removed node and a remaining one have the same operator and equal inputs."""
        old, new = self.before.nodes[gone], self.after.nodes[remaining]
        alike = (gone.domain, gone.op_type, len(old.inputs)) == (
            remaining.domain,
            remaining.op_type,
            len(new.inputs),
        )
        return alike and all(
            a is b or (a is not None and self.equal.get(a) is b)
            for a, b in zip(old.inputs, new.inputs, strict=True)
        )

    def counterpart(self, value: ir.Value, remaining: Collection[ir.Value]) -> ir.Value | None:
        """The remaining value that is equal to an old one, whose consumers are gone, too; None if there is none.

        Of two nodes in a row that returned their input, the result of the first one is read by no
        node that remains.
        """
        seen = {value}
        while value not in remaining:
            equal = self.equal.get(value) or replacement_of(value) or self._copied(value)
            if equal is None or equal in seen:
                return None
            seen.add(equal)
            value = equal
        return value

    def _copied(self, value: ir.Value) -> ir.Value | None:
        """The value that an ``Identity`` copied."""
        maker = self.before.makers.get(value)
        return self.before.nodes[maker].inputs[0] if is_standard(maker, "Identity") else None  # type: ignore[index]

    def replaced(self, value: ir.Value) -> tuple[list[ir.Node], set[ir.Value]]:
        """The removed nodes behind an old value, back to values that have an equal one, and these values."""
        return _slice(value, self.before, self.removed, self.equal)

    def replacing(self, value: ir.Value) -> list[ir.Node]:
        """The new nodes behind a value, back to values that replace an old one."""
        return _slice(value, self.after, self.added, self._standing)[0]

    @cached_property
    def _standing(self) -> frozenset[ir.Value]:
        return frozenset(self.equal.values())


def _slice(
    value: ir.Value, snapshot: Snapshot, among: Collection[ir.Node], stops: Collection[ir.Value]
) -> tuple[list[ir.Node], set[ir.Value]]:
    """The nodes behind a value, of some nodes, and the values at which the search ended."""
    behind: dict[ir.Node, None] = {}
    ends: set[ir.Value] = set()
    queue = [value]
    while queue:
        current = queue.pop()
        maker = snapshot.makers.get(current)
        if maker is None or maker not in among or (current in stops and current is not value):
            ends.add(current)
        elif maker not in behind:
            behind[maker] = None
            queue.extend(read for read in snapshot.nodes[maker].inputs if read is not None)
    return list(behind), ends


@dataclass(frozen=True)
class _NodesAfter:
    """The graph after a change, as the rule of owners reads it."""

    snapshot: Snapshot
    scope: Collection[ir.Node] | None = None  # the nodes that count as neighbours; all if None

    def consumers(self, node: ir.Node) -> Iterable[ir.Node]:
        return self._in_scope(node.successors())

    def producers(self, node: ir.Node) -> Iterable[ir.Node]:
        return self._in_scope(node.predecessors())

    def _in_scope(self, nodes: Iterable[ir.Node]) -> Iterable[ir.Node]:
        return nodes if self.scope is None else [node for node in nodes if node in self.scope]

    def holders(self, node: ir.Node) -> Iterable[ir.Node]:
        return self.snapshot.holders(node)

    def is_live(self, node: ir.Node) -> bool:
        return self.snapshot.is_live(node)

    def reads_size(self, node: ir.Node) -> bool:
        return node.op_type in SIZES_ONLY


def update_owners(
    difference: PassDifference, rule: OwnerRule, part: Collection[ir.Node] | None = None
) -> None:
    """Tag the nodes that a change added or merged others into, and set ``merged`` of the difference.

    Args:
        difference: The change.
        rule: The rule of owners.
        part: The nodes that were to be changed, if only some were: a new node that replaces none
            serves its neighbours among these and the new nodes, and others only if there are none.
    """
    replacements = _replacements(difference)
    new = dict.fromkeys(difference.added)
    for each in replacements:
        new.setdefault(each.node)
    known = {
        node: Owned(work.owners, work.reason, work.calls)
        for node in difference.neighbours_of(new)
        if node not in new and (work := Work.of(node.metadata_props)).owners
    }
    added = [*difference.added]
    owned = known
    if part is not None:
        owned = rule.owners(
            replacements, owned, added, _NodesAfter(difference.after, {*part, *added})
        )
        replacements = []
    owned = rule.owners(replacements, owned, added, _NodesAfter(difference.after))
    for node in new:
        owned.get(node, NOBODYS).write(node.metadata_props, rule.calls.called)


def _replacements(difference: PassDifference) -> list[Replacement[ir.Node]]:
    """For each node after a change, the nodes that it replaces."""
    results: defaultdict[ir.Node, list[list[Work]]] = defaultdict(list)
    before, after = difference.before, difference.after
    for old, new in list(difference.equal.items()):
        maker = after.makers.get(new)
        if maker is None:  # an input or an initializer now
            continue
        replaced, ends = difference.replaced(old)
        if maker in difference.added:
            # Nodes that compute on constants and sizes are replaced by no node, unless there are no
            # others.
            live = [*filter(before.is_live, replaced)] or replaced
            works = [before.work_of(gone) for gone in live]
            for node in difference.replacing(new):
                if node is maker or not _is_inserted(node, replaced):
                    results[node].append(works)
            new = without_copies(new)  # a result of the model keeps its name
        if replaced and new not in ends and after.makers.get(new) not in difference.added:
            for was, now in _twins(difference, old, new):
                gone, remaining = before.makers[was], after.makers[now]
                # it replaces the nodes of one chain, and stands for all
                if remaining in difference.added:
                    works = [before.work_of(node) for node in difference.replaced(was)[0]]
                    for node in difference.replacing(now):
                        results[node].append(works)
                    continue
                if not before.is_live(gone) and not difference.same(gone, remaining):
                    continue  # sizes may come from any equal tensor
                if before.holds(gone, remaining):
                    continue  # an inlined branch: the node that held it only returned its results
                work, other = before.work_of(gone), before.work_of(remaining)
                if (work.owners, work.calls) != (other.owners, other.calls):
                    results[remaining] += [[other], [work]]
                    difference.merged[remaining] = None
    for node in difference.added:
        if len(results.get(node, ())) > 1 and not after.is_live(node):
            del results[node]  # sizes for results whose work it does not do
    return [Replacement(node, works) for node, works in results.items()]


def _is_inserted(node: ir.Node, replaced: Collection[ir.Node]) -> bool:
    """Whether a new node only moves numbers, or changes their precision, and none of the replaced nodes did that."""
    operator = operator_of(node)
    if not moves(operator):
        return False
    kinds = LAYOUT if base_op(operator) in LAYOUT else {base_op(operator)}
    return not any(base_op(operator_of(gone)) in kinds for gone in replaced)


def _twins(
    difference: PassDifference, old: ir.Value, new: ir.Value
) -> Iterator[tuple[ir.Value, ir.Value]]:
    """An output of a removed node and the equal one of another; and those before them, while the nodes are alike."""
    queue, seen = [(old, new)], set[ir.Node]()
    while queue:
        was, now = queue.pop()
        gone, remaining = difference.before.makers.get(was), difference.after.makers.get(now)
        if (
            gone is None
            or remaining is None
            or gone is remaining
            or gone not in difference.removed
            or gone in seen
        ):
            continue
        seen.add(gone)
        yield was, now
        if (gone.domain, gone.op_type) == (
            remaining.domain,
            remaining.op_type,
        ) and gone.op_type not in SIZES_ONLY:
            inputs = zip(
                difference.before.nodes[gone].inputs,
                difference.after.nodes[remaining].inputs,
                strict=False,
            )
            queue.extend(
                (a, b)
                for a, b in inputs
                if a is not None and b is not None and a is not b and a not in difference.equal
            )
