"""Owners of the nodes that a pass changed: a node has the owners of all nodes that it replaces.

Passes do not know about tags. The graph is compared with the previous one. A node that stays computes what it did: if
it reads another value than before, the two values are equal, and so are values with the same name. Between these pairs
are the removed nodes, and the nodes that replace them.

- A new node has the owners of all nodes that it replaces: ``fused``, if these are several modules.
- A node that is read in place of an equal one has the owners of both: ``shared``.
- A removed node that returned its input unchanged leaves nothing.
- A new node that replaces none has the owners of its consumers: ``flow``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import onnx_ir as ir

from htp_export.editing.editing import REPLACED_BY
from htp_export.errors import HtpExportError
from htp_export.format import tags
from htp_export.format.call_tree import CallTree
from htp_export.format.tags import Reason
from htp_export.model.boundaries import dependence, given_values, reads_and_results
from htp_export.shapes.operator_kinds import SIZES_ONLY, is_standard, subgraphs, without_copies
from htp_export.shapes.schemas import settings

_Slots = Sequence[ir.Value | None]
_Groups = list[list[Mapping[str, str]]]
"""Metadata of the nodes that one node replaces, those of one value together."""


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
        self._ends = {
            "inputs": [value.name for value in model.graph.inputs],
            "outputs": [value.name for value in model.graph.outputs],
        }
        self.results: dict[ir.Graph, tuple[ir.Value, ...]] = {}
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
                raise HtpExportError(f"the {what} of the model were {before._ends[what]}, and are {names}")
        for node, seen in self.nodes.items():
            for value in seen.inputs:
                if value is not None and not self._is_available(value):
                    raise HtpExportError(f"{node.op_type} {node.name!r} reads {value.name!r}, which has no producer")
        for results in self.results.values():
            for value in results:
                if not self._is_available(value):
                    raise HtpExportError(f"the output {value.name!r} has no producer")

    def _is_available(self, value: ir.Value) -> bool:
        return value in self.makers or value.is_graph_input() or value.is_initializer()

    def _add(self, graph: ir.Graph, versions: Mapping[str, int], holder: ir.Node | None = None) -> None:
        self.results[graph] = tuple(graph.outputs)
        for node in graph:
            operator = (node.domain, node.op_type, node.overload, *settings(node, versions))
            self.nodes[node] = _Seen(node.inputs, node.outputs, operator, node.metadata_props)
            if holder is not None:
                self._holders[node] = holder
            for value in node.outputs:
                self.makers[value], self.names[value] = node, value.name
            for body in subgraphs(node):
                self._add(body, versions, node)


@dataclass(frozen=True)
class PassDifference:
    """The changes of a graph by a pass."""

    before: Snapshot
    after: Snapshot
    removed: Mapping[ir.Node, None]  # nodes that were removed or changed in place, in order
    added: Mapping[ir.Node, None]  # new nodes, and those that were changed in place, in order
    equal: dict[ir.Value, ir.Value] = field(default_factory=dict)  # old value → the equal value that replaces it
    merged: dict[ir.Node, None] = field(default_factory=dict)  # nodes that stayed, and now also do the work of others

    @classmethod
    def between(cls, before: Snapshot, after: Snapshot) -> PassDifference:
        """Compare two snapshots of one model."""
        old, new = before.nodes, after.nodes
        changed = {node for node, seen in old.items() if node in new and seen.operator != new[node].operator}
        removed = dict.fromkeys(node for node in old if node not in new or node in changed)
        added = dict.fromkeys(node for node in new if node not in old or node in changed)
        difference = cls(before, after, removed, added)
        difference._pair(changed)
        return difference

    def __bool__(self) -> bool:
        return bool(self.removed or self.added or self.equal)

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

    def _pair_slots(self, old: _Slots, new: _Slots) -> None:
        if old == new:
            return
        for was, now in zip(old, new, strict=False):
            if was is not now and was is not None and now is not None:
                self.equal[was] = now

    def same(self, gone: ir.Node, remaining: ir.Node) -> bool:
        """Whether a removed node and a remaining one have the same operator and equal inputs."""
        old, new = self.before.nodes[gone], self.after.nodes[remaining]
        alike = (gone.domain, gone.op_type, len(old.inputs)) == (remaining.domain, remaining.op_type, len(new.inputs))
        return alike and all(
            a is b or (a is not None and self.equal.get(a) is b) for a, b in zip(old.inputs, new.inputs, strict=True)
        )

    def counterpart(self, value: ir.Value, remaining: Collection[ir.Value]) -> ir.Value | None:
        """The remaining value that is equal to an old one, whose consumers are gone, too; None if there is none.

        Of two nodes in a row that returned their input, the result of the first one is read by no node that remains.
        """
        seen = {value}
        while value not in remaining:
            equal = self.equal.get(value) or value.meta.get(REPLACED_BY) or self._copied(value)
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
class Tagging:
    """Tags nodes that replace others."""

    order: Mapping[str, int]  # owner → its place in the order of execution
    called: Collection[str]  # paths of the modules that ran
    calls: CallTree

    def update(self, difference: PassDifference) -> None:
        """Tag the nodes that a pass added or merged others into, and set ``merged`` of its changes."""
        work: defaultdict[ir.Node, _Groups] = defaultdict(list)
        results: Counter[int] = Counter()  # results for which the work of a removed node is done anew, by its metadata
        before, after = difference.before, difference.after
        for old, new in list(difference.equal.items()):
            maker = after.makers.get(new)
            if maker is None:  # an input or an initializer now
                continue
            replaced, ends = difference.replaced(old)
            if maker in difference.added:
                # Nodes that compute on constants and sizes are replaced by no node, unless there are no others.
                live = [*filter(before.is_live, replaced)] or replaced
                done = [before.nodes[gone].metadata for gone in live]
                results.update(map(id, done))
                for node in difference.replacing(new):
                    work[node].append(done)
                new = without_copies(new)  # a result of the model keeps its name
            if replaced and new not in ends and after.makers.get(new) not in difference.added:
                for gone, remaining in _twins(difference, old, new):
                    if not before.is_live(gone) and not difference.same(gone, remaining):
                        continue  # sizes may come from any equal tensor
                    if before.holds(gone, remaining):
                        continue  # an inlined branch: the node that held it only returned its results
                    if tags.owners_of(before.nodes[gone].metadata) != tags.owners_of(remaining.metadata_props):
                        work[remaining] += [[remaining.metadata_props], [before.nodes[gone].metadata]]
                        difference.merged[remaining] = None
        for node in difference.added:
            if len(work.get(node, ())) > 1 and not after.is_live(node):  # sizes for results whose work it does not do
                del work[node]
        for groups in work.values():
            groups[:] = [_for_one_result(group, results) for group in groups]
        tagged = {node for node, groups in work.items() if self._tag_as_replaced(node, groups)}
        self._tag_by_neighbours([node for node in reversed([*difference.added]) if node not in tagged], difference)

    def _tag_as_replaced(self, node: ir.Node, merged: _Groups) -> bool:
        """Tag a node that replaces others; False if none of them has owners."""
        entries = [entry for group in merged for entry in group if tags.MODULE in entry]
        if not entries:
            return False
        of_groups = [{owner for entry in group for owner in tags.owners_of(entry)} for group in merged]
        owners = set(map(tags.owners_of, entries))
        reasons = {entry.get(tags.REASON, Reason.FLOW) for entry in entries}
        if len(owners) == len(reasons) == 1:
            reason = reasons.pop()
        elif len(set().union(*of_groups)) == 1:
            reason = Reason.SCOPE if Reason.SCOPE in reasons else Reason.FLOW
        else:
            reason = Reason.FUSED if any(len(group) > 1 for group in of_groups) else Reason.SHARED
        self._tag(node, entries, reason)
        return True

    def _tag_by_neighbours(self, nodes: Sequence[ir.Node], difference: PassDifference) -> None:
        """Tag new nodes that replace none, from the last: by their consumers, or else by their producers.

        What is computed of sizes for several modules belongs to the module above them, as in an export.
        """
        for node in nodes:
            tags.tag_node(node.metadata_props, {})
        for neighbours, ordered in ((ir.Node.successors, nodes), (ir.Node.predecessors, nodes[::-1])):
            for node in ordered:
                around = [neighbour.metadata_props for neighbour in neighbours(node)]
                entries = [metadata for metadata in around if tags.MODULE in metadata]
                if entries and tags.MODULE not in node.metadata_props:
                    self._tag(node, entries, Reason.FLOW)
                    owners = tags.owners_of(node.metadata_props)
                    if len(owners) > 1 and not difference.after.is_live(node):
                        above = tags.common_ancestor(owners)
                        module = above if above in self.called else tags.nearest_above(above, self.called) or ""
                        tags.tag_node(node.metadata_props, tags.node_tags([module], Reason.FLOW, self.called))

    def _tag(self, node: ir.Node, entries: Sequence[Mapping[str, str]], reason: str) -> None:
        """Give a node the owners and calls of some others."""
        works = dict.fromkeys((tags.owners_of(entry), tags.encoded_calls(entry)) for entry in entries)
        every = dict.fromkeys(owner for owners, _ in works for owner in owners)
        owners = sorted(every, key=lambda path: self.order.get(path, 0))
        calls = self.calls.encode_merged_calls(tuple(owners), works)
        tags.tag_node(node.metadata_props, tags.node_tags(owners, reason, self.called, calls))


def _for_one_result(group: list[Mapping[str, str]], results: Mapping[int, int]) -> list[Mapping[str, str]]:
    """What one result needs of replaced nodes: of a node that several modules shared, the work for its own module.

    A shared node that is done anew for several results is left out if what else is replaced says whose result this is.
    """
    shared = [entry for entry in group if results[id(entry)] > 1 and entry.get(tags.REASON) == Reason.SHARED]
    own = {owner for entry in group if all(entry is not each for each in shared) for owner in tags.owners_of(entry)}
    left_out = {id(entry) for entry in shared if own.intersection(tags.owners_of(entry))}
    return [entry for entry in group if id(entry) not in left_out]


def _twins(difference: PassDifference, old: ir.Value, new: ir.Value) -> Iterator[tuple[ir.Node, ir.Node]]:
    """A removed node and the remaining one with an equal output; and those before them, while they are alike."""
    queue, seen = [(old, new)], set[ir.Node]()
    while queue:
        was, now = queue.pop()
        gone, remaining = difference.before.makers.get(was), difference.after.makers.get(now)
        if gone is None or remaining is None or gone is remaining or gone not in difference.removed or gone in seen:
            continue
        seen.add(gone)
        yield gone, remaining
        if (gone.domain, gone.op_type) == (remaining.domain, remaining.op_type) and gone.op_type not in SIZES_ONLY:
            inputs = zip(difference.before.nodes[gone].inputs, difference.after.nodes[remaining].inputs, strict=False)
            queue.extend(
                (a, b)
                for a, b in inputs
                if a is not None and b is not None and a is not b and a not in difference.equal
            )
