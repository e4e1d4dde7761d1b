"""The owners of each node after a tool, and the evidence for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from htp_export.capabilities.carry.graph_summary import NOTHING, GraphSummary, SummaryNode
from htp_export.capabilities.carry.replaced_nodes import ReplacedNodes
from htp_export.format.call_tree import CallTree
from htp_export.format.reasons import Reason

__all__ = ["Owned", "owners_after"]


@dataclass(frozen=True, slots=True)
class Owned:
    """The owners of one node after a tool.

    Attributes:
        paths: The owners' module paths, in order of execution.
        reason: The evidence: the original ``htp.reason``, or one for a node that the tool changed.
        call: Their calls, as of ``tags.encoded_calls``.
        kept: Whether the tool left the node's tags, and they are correct.
    """

    paths: tuple[str, ...]
    reason: str
    call: str = ""
    kept: bool = False


def owners_after(
    before: GraphSummary,
    after: GraphSummary,
    works: Sequence[ReplacedNodes],
    tree: CallTree,
    settled: Mapping[int, Owned] | None = None,
) -> list[Owned]:
    """The owners of every node after, in order; none for a node without neighbours that have owners.

    ``settled``: Node after → owners that are known from elsewhere.
    """
    results: list[Owned | None] = [
        _by_work(before, node, work, tree) for node, work in zip(after.nodes, works, strict=True)
    ]
    for index, owned in (settled or {}).items():
        results[index] = owned
    for index in range(len(after.nodes) - 1, -1, -1):
        if results[index] is None:  # an inserted node serves its consumers
            readers = (
                reader for value in after.nodes[index].outputs if value != NOTHING for reader in after.readers[value]
            )
            results[index] = _together(tree, (results[reader] for reader in sorted(set(readers))))
    for index, node in enumerate(after.nodes):
        if results[index] is None:  # without consumers: its producers, or the node that holds its subgraph
            makers = (after.maker[value] for value in node.reads if value != NOTHING)
            near = [results[maker] for maker in sorted(set(makers) - {NOTHING})]
            calls = (
                results[place] for place, caller in enumerate(after.nodes) if node.scope and caller.op == node.scope
            )
            held = [results[node.holder]] if node.holder != NOTHING else calls
            results[index] = _together(tree, near) or _together(tree, held)
    return [owned or Owned((), Reason.INSERTED) for owned in results]


def _by_work(before: GraphSummary, node: SummaryNode, work: ReplacedNodes, tree: CallTree) -> Owned | None:
    nodes = [before.nodes[index] for index in work.nodes]
    if not nodes and work.ends and not node.owners:
        return _together(
            tree, (Owned(end.owners, Reason.INSERTED, end.call) for end in map(before.nodes.__getitem__, work.ends))
        )
    paths = tuple(dict.fromkeys(path for old in nodes for path in old.owners))
    if node.owners:
        same = not nodes or set(node.owners) == set(paths)
        single = work.coarse and any(old.op == node.op and old.owners == node.owners for old in nodes)
        if same or single:
            return Owned(node.owners, node.reason or work.reason, node.call, kept=True)
    if not nodes:
        return None
    return Owned(paths, work.reason, tree.encode_merged_calls(paths, [(old.owners, old.call) for old in nodes]))


def _together(tree: CallTree, near: Iterable[Owned | None]) -> Owned | None:
    owned = [entry for entry in near if entry is not None]
    if not owned:
        return None
    paths = tuple(dict.fromkeys(path for entry in owned for path in entry.paths))
    return Owned(
        paths, Reason.INSERTED, tree.encode_merged_calls(paths, [(entry.paths, entry.call) for entry in owned])
    )
