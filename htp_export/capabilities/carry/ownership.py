"""The owners of each node after a tool, and the evidence for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from htp_export.capabilities.carry.alignment import Alignment
from htp_export.capabilities.carry.graph_summary import NOTHING, GraphSummary, SummaryNode, summarize
from htp_export.capabilities.carry.replaced_nodes import ReplacedNodes, replaced_nodes
from htp_export.format.call_tree import CallTree, NodeCalls
from htp_export.format.tags import Reason
from htp_export.model.tagged import TaggedModel


@dataclass(frozen=True, slots=True)
class Owned:
    """The owners of one node after a tool."""

    paths: tuple[str, ...]  # the owners' module paths, in order of execution
    reason: str  # the evidence: the original ``htp.reason``, or one for a node that the tool changed
    call: str = ""  # their calls, as of ``tags.encoded_calls``
    kept: bool = False  # whether the tool left the node's tags, and they are correct


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
            results[index] = _serving(tree, (results[reader] for reader in sorted({*after.consumers(index)})))
    for index, node in enumerate(after.nodes):
        if results[index] is None:  # without consumers: its producers, or the node that holds its subgraph
            near = [results[maker] for maker in sorted({*after.producers(index)})]
            calls = (
                results[place] for place, caller in enumerate(after.nodes) if node.scope and caller.op == node.scope
            )
            held = [results[node.holder]] if node.holder != NOTHING else calls
            results[index] = _serving(tree, near) or _serving(tree, held)
    return [owned or Owned((), Reason.INSERTED) for owned in results]


def _by_work(before: GraphSummary, node: SummaryNode, work: ReplacedNodes, tree: CallTree) -> Owned | None:
    nodes = [before.nodes[index] for index in work.nodes]
    if not nodes and work.ends and not node.owners:
        return owned_by(tree, [before.nodes[end] for end in work.ends], Reason.INSERTED)
    if node.owners:
        same = not nodes or set(node.owners) == {path for old in nodes for path in old.owners}
        single = work.coarse and any(old.op == node.op and old.owners == node.owners for old in nodes)
        if same or single:
            return Owned(node.owners, node.reason or work.reason, node.call, kept=True)
    return owned_by(tree, nodes, work.reason) if nodes else None


def owned_by(tree: CallTree, nodes: Sequence[SummaryNode], reason: str, paths: tuple[str, ...] | None = None) -> Owned:
    """The owners of original nodes, or those of them that are named, in the calls of these nodes."""
    if paths is None:
        paths = tuple(dict.fromkeys(path for old in nodes for path in old.owners))
    return Owned(paths, reason, tree.encode_merged_calls(paths, [(old.owners, old.call) for old in nodes]))


def _serving(tree: CallTree, near: Iterable[Owned | None]) -> Owned | None:
    """The owners of all nodes next to an inserted one."""
    owned = [entry for entry in near if entry is not None]
    if not owned:
        return None
    paths = tuple(dict.fromkeys(path for entry in owned for path in entry.paths))
    calls = tree.encode_merged_calls(paths, [(entry.paths, entry.call) for entry in owned])
    return Owned(paths, Reason.INSERTED, calls)


# --- without tags ---


def optimized_works(tagged: TaggedModel, optimized: ir.Model) -> dict[ir.Node, NodeCalls]:
    """The owners and calls of each node of an optimised graph, as `carry` finds them, whatever its tags.

    They are in the order of the original nodes, which are in no functions; empty if nothing is known.
    """
    before, before_nodes = summarize(tagged.model)
    after, after_nodes = summarize(optimized)
    for summarized, node in zip(before.nodes, before_nodes, strict=True):
        work = tagged.work_of(node)
        summarized.owners, summarized.call = work.owners, tagged.calls.encode_calls(work.owners, work.calls)
    for summarized in after.nodes:
        summarized.owners = ()
    owned = owners_after(before, after, replaced_nodes(Alignment(before, after)), tagged.calls)
    return {node: tagged.calls.work(entry.paths, entry.call) for node, entry in zip(after_nodes, owned, strict=True)}
