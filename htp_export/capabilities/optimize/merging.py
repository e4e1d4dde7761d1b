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

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import onnx_ir as ir

from htp_export.format import tags
from htp_export.format.call_tree import CallTree
from htp_export.format.reasons import Reason
from htp_export.model.dependence import dependence, given_values, reads_and_results
from htp_export.shapes.operator_kinds import SIZES_ONLY

__all__ = ["PassDifference", "Snapshot", "merge_tags"]

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
        self.given = given_values(model)
        self.input_names = tuple(value.name for value in model.graph.inputs)
        self.output_names = tuple(value.name for value in model.graph.outputs)
        self.results: dict[ir.Graph, tuple[ir.Value, ...]] = {}
        for graph in (model.graph, *(function.graph for function in model.functions.values())):
            self._add(graph)
        self.steps = list(reads_and_results(self.nodes))

    def holds(self, holder: ir.Node, node: ir.Node) -> bool:
        """Whether a node was in a subgraph of another one."""
        around = self._holders.get(node)
        while around is not None and around is not holder:
            around = self._holders.get(around)
        return around is holder

    def _add(self, graph: ir.Graph, holder: ir.Node | None = None) -> None:
        """Add the nodes of a graph and its subgraphs."""
        self.results[graph] = tuple(graph.outputs)
        for node in graph:
            attributes = tuple(node.attributes.data.values())
            operator = (node.domain, node.op_type, node.overload, *attributes)
            self.nodes[node] = seen = _Seen(node.inputs, node.outputs, operator, node.metadata_props)
            if holder is not None:
                self._holders[node] = holder
            for value in seen.outputs:
                self.makers[value] = node
                self.names[value] = value.name
            for attribute in attributes:
                if attribute.type == ir.AttributeType.GRAPH and not attribute.is_ref():
                    self._add(attribute.as_graph(), node)
                elif attribute.type == ir.AttributeType.GRAPHS and not attribute.is_ref():
                    for inner in attribute.as_graphs():
                        self._add(inner, node)


@dataclass(frozen=True)
class PassDifference:
    """The changes of a graph by a pass.

    Attributes:
        removed: Nodes that were removed or changed in place.
        added: New nodes, and those that were changed in place.
        equal: Old value → the equal value that replaces it.
        merged: Nodes that stayed, and now also do the work of others.
    """

    before: Snapshot
    after: Snapshot
    removed: tuple[ir.Node, ...]
    added: tuple[ir.Node, ...]
    equal: dict[ir.Value, ir.Value] = field(default_factory=dict)
    merged: dict[ir.Node, None] = field(default_factory=dict)

    @classmethod
    def between(cls, before: Snapshot, after: Snapshot) -> PassDifference:
        """Compare two snapshots of one model."""
        changed = {
            node
            for node, seen in before.nodes.items()
            if node in after.nodes and seen.operator != after.nodes[node].operator
        }
        removed = tuple(node for node in before.nodes if node not in after.nodes or node in changed)
        added = tuple(node for node in after.nodes if node not in before.nodes or node in changed)
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
        gone = {name: value for node in self.removed for value in self.before.nodes[node].outputs
                if (name := self.before.names[value])}  # fmt: skip
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

    def replaced(self, value: ir.Value) -> tuple[list[ir.Node], set[ir.Value]]:
        """The removed nodes behind an old value, back to values that have an equal one, and these values."""
        return _slice(value, self._removed, self.before.makers, self.equal)

    def replacing(self, value: ir.Value) -> list[ir.Node]:
        """The new nodes behind a value, back to values that replace an old one."""
        return _slice(value, self._added, self.after.makers, self._standing)[0]

    @cached_property
    def live(self) -> frozenset[ir.Node]:
        """The removed nodes that depend on values of the model's inputs, not on constants and sizes alone."""
        live = self.live_values
        return frozenset(node for node in self.removed if any(v in live for v in self.before.nodes[node].outputs))

    @cached_property
    def live_values(self) -> frozenset[ir.Value]:
        """The old values that depend on values of the model's inputs."""
        dependent = dependence(self.before.steps, self.before.given)
        return frozenset(value for value in dependent if value is not None)

    @cached_property
    def _removed(self) -> dict[ir.Node, _Seen]:
        return {node: self.before.nodes[node] for node in self.removed}

    @cached_property
    def _added(self) -> dict[ir.Node, _Seen]:
        return {node: self.after.nodes[node] for node in self.added}

    @cached_property
    def _standing(self) -> frozenset[ir.Value]:
        return frozenset(self.equal.values())


def _slice(
    value: ir.Value,
    nodes: Mapping[ir.Node, _Seen],
    makers: Mapping[ir.Value, ir.Node],
    stops: Collection[ir.Value],
) -> tuple[list[ir.Node], set[ir.Value]]:
    """The nodes behind a value, and the values at which the search ended."""
    behind: dict[ir.Node, None] = {}
    ends: set[ir.Value] = set()
    queue = [value]
    while queue:
        current = queue.pop()
        maker = makers.get(current)
        if maker not in nodes or maker is None or (current in stops and current is not value):
            ends.add(current)
        elif maker not in behind:
            behind[maker] = None
            queue.extend(read for read in nodes[maker].inputs if read is not None)
    return list(behind), ends


_Groups = list[list[Mapping[str, str]]]
"""Metadata of the nodes that one node replaces, those of one value together."""


def merge_tags(difference: PassDifference, order: Mapping[str, int], called: Collection[str], calls: CallTree) -> None:
    """Tag the nodes that replace others.

    Args:
        difference: The changes by a pass; ``merged`` is set.
        order: Owner → its place in the order of execution.
        called: Paths of the modules that ran.
        calls: Their calls.
    """
    work: defaultdict[ir.Node, _Groups] = defaultdict(list)
    before, after = difference.before, difference.after
    is_new = set(difference.added)
    for old, new in list(difference.equal.items()):
        maker = after.makers.get(new)
        if maker is None:  # an input or an initializer now
            continue
        replaced, ends = difference.replaced(old)
        if maker in is_new:
            # Nodes that compute on constants and sizes are replaced by no node, unless there are no others.
            done = [gone for gone in replaced if gone in difference.live] or replaced
            for node in difference.replacing(new):
                work[node].append([before.nodes[gone].metadata for gone in done])
        elif replaced and new not in ends:
            for gone, remaining in _twins(difference, old, new):
                if gone not in difference.live and not difference.same(gone, remaining):
                    continue  # sizes may come from any equal tensor
                if before.holds(gone, remaining):
                    continue  # an inlined branch: the node that held it only returned its results
                if tags.owners_of(before.nodes[gone].metadata) != tags.owners_of(remaining.metadata_props):
                    work[remaining] += [[remaining.metadata_props], [before.nodes[gone].metadata]]
                    difference.merged[remaining] = None
    tagged = {node for node, groups in work.items() if _tag(node, groups, order, called, calls)}
    _tag_by_neighbours([node for node in reversed(difference.added) if node not in tagged], order, called, calls)


def _twins(difference: PassDifference, old: ir.Value, new: ir.Value) -> Iterator[tuple[ir.Node, ir.Node]]:
    """A removed node and the remaining one with an equal output; and those before them, while they are alike."""
    queue, seen = [(old, new)], set[ir.Node]()
    while queue:
        was, now = queue.pop()
        gone, remaining = difference.before.makers.get(was), difference.after.makers.get(now)
        if gone is None or remaining is None or gone is remaining or gone not in difference._removed or gone in seen:
            continue
        seen.add(gone)
        yield gone, remaining
        seen_before, seen_after = difference.before.nodes[gone], difference.after.nodes[remaining]
        if (gone.domain, gone.op_type) == (remaining.domain, remaining.op_type) and gone.op_type not in SIZES_ONLY:
            queue.extend(
                (a, b)
                for a, b in zip(seen_before.inputs, seen_after.inputs, strict=False)
                if a is not None and b is not None and a is not b and a not in difference.equal
            )


def _tag(node: ir.Node, merged: _Groups, order: Mapping[str, int], called: Collection[str], calls: CallTree) -> bool:
    """Tag a node that replaces others; False if none of them has owners."""
    entries = [entry for group in merged for entry in group if tags.MODULE in entry]
    if not entries:
        return False
    owned = (dict.fromkeys(owner for entry in group for owner in tags.owners_of(entry)) for group in merged)
    groups = [group for group in owned if group]
    owners = sorted(dict.fromkeys(owner for group in groups for owner in group), key=lambda path: order.get(path, 0))
    works = {(tags.owners_of(entry), tags.encoded_calls(entry)): None for entry in entries}
    reasons = {entry.get(tags.REASON, Reason.FLOW) for entry in entries}
    if len(owners) == 1:
        reason = reasons.pop() if len(reasons) == 1 else Reason.SCOPE if Reason.SCOPE in reasons else Reason.FLOW
    elif len({owners for owners, _ in works}) == 1 and len(reasons) == 1:
        reason = reasons.pop()
    else:
        reason = Reason.SHARED if all(len(group) == 1 for group in groups) else Reason.FUSED
    entry = tags.node_tags(owners, reason, called, calls.encode_merged_calls(tuple(owners), works))
    tags.tag_node(node.metadata_props, entry)
    return True


def _tag_by_neighbours(
    nodes: Sequence[ir.Node], order: Mapping[str, int], called: Collection[str], calls: CallTree
) -> None:
    """Tag new nodes that replace none, from the last: by their consumers, or else by their producers."""
    for node in nodes:
        tags.tag_node(node.metadata_props, {})
    for neighbours, ordered in ((ir.Node.successors, nodes), (ir.Node.predecessors, nodes[::-1])):
        for node in ordered:
            if tags.MODULE not in node.metadata_props:
                around = [neighbour.metadata_props for neighbour in neighbours(node)]
                works = [
                    (tags.owners_of(metadata), tags.encoded_calls(metadata))
                    for metadata in around
                    if tags.MODULE in metadata
                ]
                if works:
                    every = dict.fromkeys(owner for owners, _ in works for owner in owners)
                    owners = sorted(every, key=lambda path: order.get(path, 0))
                    entry = tags.node_tags(owners, Reason.FLOW, called, calls.encode_merged_calls(tuple(owners), works))
                    tags.tag_node(node.metadata_props, entry)
