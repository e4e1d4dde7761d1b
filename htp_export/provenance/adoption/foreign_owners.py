"""The owners of the nodes of a file that others exported.

The engine of `carry` says which original nodes a node replaces. What it then chooses by operators alone, or shares out
among modules, is not known here, as the file was not made from the original: names decide, if they are proved, and
otherwise nothing does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from htp_export.format.call_tree import CallTree
from htp_export.format.reasons import Reason
from htp_export.format.tags import common_ancestor
from htp_export.model.operators import moves
from htp_export.provenance.adoption.foreign_alignment import ForeignAlignment
from htp_export.provenance.adoption.name_scopes import NameScopes, Scope
from htp_export.provenance.graph_summary import NOTHING, SummaryNode
from htp_export.provenance.ownership import Owned, owners_after
from htp_export.provenance.replaced_nodes import ReplacedNodes, replaced_nodes

__all__ = ["foreign_owners"]


def foreign_owners(alignment: ForeignAlignment, scopes: Sequence[Scope], tree: CallTree) -> list[Owned]:
    """The owners of every node; those that are not known have the reason ``unknown``.

    Args:
        alignment: The counterparts of its tensors.
        scopes: The scopes in the names of the nodes.
        tree: The calls of the modules.
    """
    return _Foreign(alignment, scopes, tree).owners()


class _Foreign:
    def __init__(self, alignment: ForeignAlignment, scopes: Sequence[Scope], tree: CallTree) -> None:
        self._known, self._scopes, self._tree = alignment, scopes, tree
        self._before, self._after = alignment.before, alignment.after
        self._all = replaced_nodes(alignment)
        self._works = [self._on_the_way(node, work) for node, work in zip(self._after.nodes, self._all, strict=True)]

    def owners(self) -> list[Owned]:
        open_nodes = [index for index in range(len(self._works)) if self._is_open(index)]
        settled = self._by_names(open_nodes)
        for index in open_nodes:
            if index not in settled:
                settled[index] = Owned((common_ancestor(self._candidates(index)),), Reason.UNKNOWN)
        found = owners_after(self._before, self._after, self._works, self._tree, settled)
        for index in range(len(found) - 1, -1, -1):
            if found[index].reason == Reason.INSERTED and not self._works[index].ends and self._serves_unknown(index, found):
                found[index] = Owned((common_ancestor(found[index].paths),), Reason.UNKNOWN)
        return [entry if entry.paths else Owned(("",), Reason.UNKNOWN) for entry in found]

    def _serves_unknown(self, index: int, found: Sequence[Owned]) -> bool:
        readers = [r for v in self._after.nodes[index].outputs if v != NOTHING for r in self._after.readers[v]]
        return any(found[reader].reason == Reason.UNKNOWN for reader in readers)

    def _candidates(self, index: int) -> list[str]:
        """The modules that may own a node."""
        return [*dict.fromkeys(path for old in self._all[index].nodes for path in self._before.nodes[old].owners)]

    def _is_open(self, index: int) -> bool:
        """Whether the owners of a node are not decided by weights, values and structure."""
        node, work = self._after.nodes[index], self._works[index]
        if work.nodes:
            several = len({(self._before.nodes[old].owners, self._before.nodes[old].call) for old in work.nodes}) > 1
            return several and (work.chosen or self._is_shared(node))
        lives = any(v != NOTHING and self._after.live[v] for v in node.outputs)
        return lives and not work.ends and not moves(node.op, views=True)

    def _is_shared(self, node: SummaryNode) -> bool:
        """Whether a node is next to others that do a part of the same work: a tensor between them is not known."""
        passed = (v for v in (*node.reads, *(v for v in node.outputs if v != NOTHING and self._after.readers[v])))
        return any(v != NOTHING and self._after.live[v] and not self._known.numbers_of(v) for v in passed)

    def _by_names(self, open_nodes: Sequence[int]) -> dict[int, Owned]:
        closed = set(range(len(self._works))) - set(open_nodes)
        known = [
            (self._scopes[index], self._owners_of(self._works[index]))
            for index in sorted(closed)
            if self._works[index].nodes and self._scopes[index]
        ]
        names = NameScopes(known, {path for node in self._before.nodes for path in node.owners})
        found = {}
        for index in open_nodes:
            module, candidates = names.module(self._scopes[index]), self._candidates(index)
            if module is not None and module in candidates:
                mine = [old for old in self._all[index].nodes if self._before.nodes[old].owners == (module,)]
                if not self._reads_no_more(index, mine):
                    continue
                calls = [(self._before.nodes[old].owners, self._before.nodes[old].call) for old in mine]
                found[index] = Owned((module,), Reason.NODE, self._tree.encode_merged_calls((module,), calls))
        return found

    def _reads_no_more(self, index: int, part: Sequence[int]) -> bool:
        """Whether a node reads and gives no more tensors than original nodes: otherwise it computes others, too."""
        node, before, after = self._after.nodes[index], self._before, self._after
        number = self._known.numbers.number
        made = {number[v] for old in part for v in before.nodes[old].outputs if v != NOTHING}
        read = {number[v] for old in part for v in before.nodes[old].reads if v != NOTHING and before.live[v]} - made
        given = {
            number[v]
            for old in part
            for v in before.nodes[old].outputs
            if v != NOTHING and (v in before.outputs or any(reader not in part for reader in before.readers[v]))
        }
        reads = {v for v in node.reads if v != NOTHING and after.live[v]}
        gives = {v for v in node.outputs if v != NOTHING and (after.readers[v] or v in after.outputs)}
        return len(reads) <= len(read) and len(gives) <= len(given)

    def _owners_of(self, work: ReplacedNodes) -> tuple[str, ...]:
        return tuple(dict.fromkeys(path for old in work.nodes for path in self._before.nodes[old].owners))

    def _on_the_way(self, node: SummaryNode, work: ReplacedNodes) -> ReplacedNodes:
        """Leave out the nodes that compute nothing from what the node reads.

        Example: an operator for attention that takes positions reads no angles; the module that computes these in the
        original has no nodes here.
        """
        starts = set[int]().union(*(self._known.anchors(v) for v in node.reads if v != NOTHING))
        if not starts or len(work.nodes) < 2:
            return work
        number, reached, kept = self._known.numbers.number, set(starts), list[int]()
        for old in work.nodes:
            reads = (number[value] for value in self._before.nodes[old].reads if value != NOTHING)
            if any(read in reached for read in reads):
                kept.append(old)
                reached.update(number[value] for value in self._before.nodes[old].outputs if value != NOTHING)
        return replace(work, nodes=tuple(kept)) if kept else work
