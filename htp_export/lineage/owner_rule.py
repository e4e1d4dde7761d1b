"""The rule that derives the owners of a node from the nodes that it replaces.

An export, a pass and another tool change a graph in the same ways, and the rule is the same for all
of them:

1. A node that replaces nodes of one module belongs to this module.
2. A node that replaces equal work of several modules belongs to all of them: ``shared``.
3. A node that replaces parts of the work of several modules belongs to all of them: ``fused``.
4. Work that several modules shared, and that is repeated for each result, belongs to the module of
   that result.
5. A node that replaces none has the owners of its consumers; if these have none, of its producers;
   if these have none, of the node that holds its subgraph.
6. A new node that computes a size for several modules belongs to the innermost module around them
   that ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from htp_export.format import tags
from htp_export.format.call_tree import CallTree
from htp_export.format.tags import Reason
from htp_export.lineage.tagging import Owned
from htp_export.model.neighbours import reached

Node = TypeVar("Node")
Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """The tags of one node before a change. Two nodes with equal tags are different work.

    Attributes:
        owners: The owners' module paths, in order of execution; empty for a node without tags.
        calls: Their calls, as of ``tags.encoded_calls``.
        reason: Its ``htp.reason``.
    """

    owners: tuple[str, ...]
    calls: str = ""
    reason: str = ""

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> Work:
        """Read the tags of a node.

        Examples:
            >>> Work.of({"htp.module": "fc", "htp.reason": "scope"}).owners
            ('fc',)
        """
        return cls(
            tags.owners_of(metadata), tags.encoded_calls(metadata), metadata.get(tags.REASON, "")
        )


@dataclass(frozen=True, slots=True)
class Replacement(Generic[Node]):
    """The nodes that one node replaces.

    Attributes:
        node: The node after the change.
        results: The replaced nodes, grouped by result of the change; nodes that replace them
            together have the same object.
        evidence: How they were found, a `Reason`; empty if the node has the reason of the nodes
            that it replaces.
    """

    node: Node
    results: Sequence[Sequence[Work]]
    evidence: str = ""


class Links(Protocol[Node]):
    """The neighbours of nodes in a graph."""

    def consumers(self, node: Node) -> Iterable[Node]:
        """The consumers of a node's outputs, in order."""

    def producers(self, node: Node) -> Iterable[Node]:
        """The producers of a node's inputs, in order."""

    def holders(self, node: Node) -> Iterable[Node]:
        """The nodes whose subgraph contains a node, or that call the function that contains it."""


class Neighbours(Links[Node], Protocol[Node]):
    """The graph after a change, for the rule."""

    def is_live(self, node: Node) -> bool:
        """Whether an output of a node depends on values of the inputs, not only on their sizes."""

    def reads_size(self, node: Node) -> bool:
        """Whether a node reads the size of its input, and none of its values."""


class OwnerRule:
    """The owners of nodes after a change of a graph.

    Args:
        calls: The calls of the modules.
        order: Module path → its place in the order of execution.

    Examples:
        >>> from htp_export.format.hierarchy import Hierarchy, ModuleInfo
        >>> tree = Hierarchy([ModuleInfo(path, "M", 1) for path in ("", "conv", "norm")])
        >>> rule = OwnerRule(CallTree(tree), {"conv": 0, "norm": 1})
        >>> conv, norm = Work(("conv",), reason="scope"), Work(("norm",), reason="scope")
        >>> print(rule.replacing([[conv, norm]]).reason, rule.replacing([[conv], [norm]]).reason)
        fused shared
        >>> rule.replacing([[conv]], "tensor")
        Owned(paths=('conv',), reason='tensor', call='', kept=False)
    """

    def __init__(self, calls: CallTree, order: Mapping[str, int]) -> None:
        self.calls, self.order = calls, order

    def owners(
        self,
        replacements: Iterable[Replacement[Node]],
        known: Mapping[Node, Owned],
        new: Sequence[Node],
        graph: Neighbours[Node],
    ) -> dict[Node, Owned]:
        """The owners of nodes that replace others, and of new nodes.

        Args:
            replacements: For each node that replaces others, these nodes.
            known: The owners of nodes that are not to be decided.
            new: The nodes that have no owners yet, in the order of the graph.
            graph: The graph after the change.

        Returns:
            Node → its owners, for ``known``, the nodes of ``replacements``, and new nodes with a
            neighbour that has owners.
        """
        listed = list(replacements)
        # How many results each replaced node belongs to; nodes may share the object of a result.
        distinct = {id(result): result for each in listed for result in each.results}
        repeats = Counter(id(work) for result in distinct.values() for work in result)
        owned = dict(known)
        for each in listed:
            results = [_for_this_result(result, repeats) for result in each.results]
            owners = self.replacing(results, each.evidence)
            if owners is not None:
                owned[each.node] = owners
        complete(new, owned, graph, lambda node, near: self._serving(node, near, graph))
        return owned

    def replacing(self, results: Sequence[Sequence[Work]], evidence: str = "") -> Owned | None:
        """The owners of a node that replaces others; None if none of them has owners."""
        works = [work for result in results for work in result if work.owners]
        if not works:
            return None
        return self.merged(works, _reason(results, works, evidence))

    def _serving(self, node: Node, near: Sequence[Owned], graph: Neighbours[Node]) -> Owned | None:
        """The owners of a new node that replaces none, by its neighbours."""
        works = [Work(entry.paths, entry.call, entry.reason) for entry in near if entry.paths]
        if not works:
            return None
        owned = self.merged(works, Reason.INSERTED)
        if len(owned.paths) == 1 or not _computes_size(node, graph):
            return owned
        return Owned((self._innermost_called(owned.paths),), Reason.INSERTED)

    def merged(
        self, works: Iterable[Work], reason: str, paths: Sequence[str] | None = None
    ) -> Owned:
        """All owners of some nodes, or those of ``paths``, in the calls of these nodes."""
        parts = dict.fromkeys((work.owners, work.calls) for work in works)
        # The number of a call is that of the last owner: the order must not change.
        if paths is None and len(parts) == 1:
            [(owners, calls)] = parts
            return Owned(owners, reason, calls)
        if paths is None:
            paths = list(dict.fromkeys(path for owners, _ in parts for path in owners))
        ordered = tuple(sorted(paths, key=lambda path: self.order.get(path, 0)))
        return Owned(ordered, reason, self.calls.encode_merged_calls(ordered, parts))

    def _innermost_called(self, paths: Iterable[str]) -> str:
        """The innermost module around some modules that ran."""
        above = tags.common_ancestor(paths)
        if above in self.calls.called:
            return above
        return tags.nearest_above(above, self.calls.called) or ""


def _reason(results: Sequence[Sequence[Work]], works: Sequence[Work], evidence: str) -> str:
    """The reason of a node that replaces others."""
    owners = {work.owners for work in works}
    reasons = {work.reason or Reason.FLOW for work in works}
    if len(owners) > 1:
        return Reason.FUSED if _is_fused(results, works) else Reason.SHARED
    if len(owners.pop()) > 1:
        # The replaced nodes had several owners before the change.
        if len(reasons) == 1:
            return reasons.pop()
        is_shared = Reason.SHARED in reasons and Reason.FUSED not in reasons
        return Reason.SHARED if is_shared else Reason.FUSED
    if evidence:
        return evidence
    if len(reasons) == 1:
        return reasons.pop()
    return Reason.SCOPE if Reason.SCOPE in reasons else Reason.FLOW


def _is_fused(results: Sequence[Sequence[Work]], works: Sequence[Work]) -> bool:
    """Whether nodes of different owners are parts of one work: one result needs several of them."""
    if any(len(work.owners) > 1 and work.reason == Reason.FUSED for work in works):
        return True
    for result in results:
        owners = {work.owners for work in result if work.owners}
        if len(owners) > 1:
            return True
    return False


def _computes_size(node: Node, graph: Neighbours[Node]) -> bool:
    """Whether an output of a node depends on sizes of tensors, and on no values of the inputs."""
    if graph.is_live(node):
        return False
    return any(map(graph.reads_size, reached([node], graph.producers)))


def _for_this_result(result: Sequence[Work], repeats: Mapping[int, int]) -> list[Work]:
    """The replaced nodes of one result, without shared ones that are repeated for other results.

    A repeated node remains if no other replaced node has its owner.
    """
    again = [work for work in result if repeats[id(work)] > 1 and work.reason == Reason.SHARED]
    if not again:
        return list(result)
    left_out = set(map(id, again))
    own = {path for work in result if id(work) not in left_out for path in work.owners}
    return [work for work in result if id(work) not in left_out or own.isdisjoint(work.owners)]


def complete(
    nodes: Sequence[Node],
    entries: MutableMapping[Node, Entry],
    graph: Links[Node],
    combine: Callable[[Node, Sequence[Entry]], Entry | None],
) -> None:
    """Copy entries to nodes without one: from consumers, or else producers, or else holders.

    Args:
        nodes: The nodes, in the order of the graph.
        entries: Node → its entry; completed.
        graph: The graph.
        combine: Returns the entry of a node from the entries of its neighbours, of which there may
            be none; None if they decide nothing.
    """

    def fill(ordered: Iterable[Node], neighbours: Callable[[Node], Iterable[Node]]) -> None:
        for node in ordered:
            if node in entries:
                continue
            near = [entries[other] for other in neighbours(node) if other in entries]
            entry = combine(node, near)
            if entry is not None:
                entries[node] = entry

    fill(reversed(nodes), graph.consumers)
    fill(nodes, graph.producers)
    fill(nodes, graph.holders)
