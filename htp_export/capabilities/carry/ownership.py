"""The owners of each node after a tool, the evidence for them, and what they say of modules: fates and boundaries."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import onnx_ir as ir

from htp_export.capabilities.carry.alignment import Alignment
from htp_export.capabilities.carry.graph_summary import NOTHING, GraphSummary, SummaryNode, summarize
from htp_export.capabilities.carry.origins import Origin
from htp_export.capabilities.carry.replaced_nodes import ReplacedNodes, replaced_nodes
from htp_export.format import tags
from htp_export.format.call_tree import CallTree, NodeCalls
from htp_export.format.fates import Fate
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.model_metadata import write_model_metadata
from htp_export.format.signatures import Signature, is_unread
from htp_export.format.tags import Reason
from htp_export.model.boundaries import OUTSIDE, Boundaries
from htp_export.model.fates import FateEvidence, Outcome, find_fates
from htp_export.model.tagged import TaggedModel


@dataclass(frozen=True, slots=True)
class Owned:
    """The owners of one node after a tool."""

    paths: tuple[str, ...]  # the owners' module paths, in order of execution
    reason: str  # the evidence: the original ``htp.reason``, or one for a node that the tool changed
    call: str = ""  # their calls, as of ``tags.encoded_calls``
    kept: bool = False  # whether the tool left the node's tags, and they are correct
    is_fused: bool = False  # whether the owners did the node's work one after the other, not each the same


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
            reason, is_fused = node.reason or work.reason, _are_fused(nodes)
            return Owned(node.owners, reason, node.call, kept=True, is_fused=is_fused)
    return owned_by(tree, nodes, work.reason) if nodes else None


def owned_by(tree: CallTree, nodes: Sequence[SummaryNode], reason: str, paths: tuple[str, ...] | None = None) -> Owned:
    """The owners of original nodes, or those of them that are named, in the calls of these nodes."""
    if paths is None:
        paths = tuple(dict.fromkeys(path for old in nodes for path in old.owners))
    calls = tree.encode_merged_calls(paths, [(old.owners, old.call) for old in nodes])
    return Owned(paths, reason, calls, is_fused=reason != Reason.INSERTED and _are_fused(nodes))


def _are_fused(nodes: Sequence[SummaryNode]) -> bool:
    """Whether one of some original nodes reads what another made for other owners, or was fused before."""
    made = {value: node.owners for node in nodes for value in node.makes}
    for node in nodes:
        if node.reason == Reason.FUSED or any(made.get(value, node.owners) != node.owners for value in node.reads):
            return True
    return False


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


_IR_VERSION = 10  # the first with metadata on nodes


def tag(
    model: ir.Model, nodes: Sequence[ir.Node], owned: Sequence[Owned], alignment: Alignment, origin: Origin
) -> tuple[Hierarchy, list[tuple[str, str, bool]]]:
    """Write tags into a tool's result; return its modules with their new fates, and its contamination."""
    works = [origin.calls.work(entry.paths, entry.call) for entry in owned]
    fused = {place for place, entry in enumerate(owned) if entry.is_fused}
    evidence = _CarriedEvidence(alignment, origin, works, fused)
    hierarchy, crossing = find_fates(origin.hierarchy, evidence)
    names = [value.name for value in alignment.after.values]
    contamination = list(dict.fromkeys((path, names[value], leaves) for path, value, leaves in crossing))
    entry_of = cache(lambda paths, reason, call: tags.node_tags(paths, reason, hierarchy.called, call))
    for node, entry in zip(nodes, owned, strict=True):
        tags.tag_node(node.metadata_props, entry_of(entry.paths, entry.reason, entry.call))
    for key in tags.MODEL_KEYS:
        model.metadata_props.pop(key, None)
    signatures = evidence.signatures()
    write_model_metadata(model.metadata_props, hierarchy, signatures=signatures, contamination=contamination)
    model.metadata_props.update(origin.lasting)
    model.graph.name = hierarchy.root.simple_class or model.graph.name
    model.ir_version = max(model.ir_version, _IR_VERSION)
    return hierarchy, contamination


class _CarriedEvidence(FateEvidence[int]):
    """The boundaries of modules after a tool, whose nodes do ``works``, compared with those in the original model.

    ``fused`` are the places of nodes that several modules were fused into.

    ``known`` has the numbers of original tensors.
    """

    def __init__(
        self, alignment: Alignment, origin: Origin, works: Sequence[NodeCalls], fused: Collection[int]
    ) -> None:
        super().__init__(_boundaries_of(alignment.after, works, fused))
        self._alignment, self._signatures, self._old = alignment, origin.signatures, origin.hierarchy
        self._number = alignment.numbers.number
        before = [origin.calls.work(node.owners, node.call) for node in alignment.before.nodes]
        self._before = _boundaries_of(alignment.before, before)
        self._remaining = {
            number: value
            for value, number in reversed(list(enumerate(alignment.counterpart)))
            if number != NOTHING and alignment.exact[value]
        }
        self._known = cache(self._find_known)

    def signatures(self) -> dict[str, list[Signature]]:
        """The signatures with the new names of tensors; None for tensors that are gone."""
        return {path: [call.renamed(self._name) for call in calls] for path, calls in self._signatures.items()}

    def _name(self, name: str) -> str | None:
        number, value = self._numbered(name), self._alignment.after.find(name)
        if value == NOTHING or number == NOTHING or self.counterpart(value) != number:
            value = self._remaining.get(number, NOTHING)
        return None if value == NOTHING else self._alignment.after.values[value].name

    def _numbered(self, name: str) -> int:
        return self._number[self._alignment.before.find(name)]

    def _find_known(self, path: str) -> tuple[frozenset[int], frozenset[int]]:
        """The numbers of the tensors that may cross the boundary of a module, and of those that it has to compute."""
        info = self._old.get(path)
        inputs = {self._numbered(name) for call in self._signatures.get(path, ()) for name in call.taken}
        outputs = {self._numbered(name) for call in self._signatures.get(path, ()) for name in call.given}
        leaving = set[int]()
        if info is not None and (info.fate.is_exact or path not in self._signatures):
            for value, _, leaves in self._before.of([path]):
                (leaving if leaves else inputs).add(self._number[value])
        if not path:
            leaving.update(self._number[value] for value in self._alignment.before.outputs)
        known = (inputs | outputs | leaving) - {NOTHING}
        return frozenset(known), frozenset(leaving - inputs - {NOTHING})

    def counterpart(self, tensor: int) -> int:
        return self._alignment.counterpart[tensor] if self._alignment.exact[tensor] else NOTHING

    def known(self, path: str) -> Collection[int]:
        return self._known(path)[0]

    def ran(self, path: str) -> bool:
        return path in self._old and self._old[path].calls > 0

    def settled(self, path: str) -> Outcome | None:
        info = self._old[path]
        is_open = info.fate.does_work and path in self._before.below
        return None if is_open else Outcome(info.fate, info.fused_with)

    def without_work(self, path: str) -> Fate | None:
        """``constant`` if the nodes of a module were folded, ``identity`` if its outputs are its inputs.

        ``dead`` if nothing read its outputs.
        """
        before = self._alignment.before
        if is_unread(self._signatures.get(path, ())):
            return Fate.DEAD
        if not any(before.depends(node) for node in self._before.below[path]):
            return Fate.CONSTANT
        entering = {self._number[value] for value, _, leaves in self._before.of([path]) if not leaves}
        return Fate.IDENTITY if self._known(path)[1] <= entering else None

    def partners(self, path: str) -> Collection[str] | None:
        """The original owners beyond the tensors that a module lost, if its boundary is not exact any more."""
        info = self._old[path]
        if info.fate.is_exact and self.is_closed(path) and self._makes_all(path):
            return None
        lost = {number for number in self.known(path) if number not in self._remaining}
        return [*info.fused_with, *self._beyond(path, lost)] if lost or info.fate.is_merged else None

    def _makes_all(self, path: str) -> bool:
        nodes = self._alignment.after.nodes
        made = (value for node in self.boundaries.below[path] for value in nodes[node].makes)
        return self._known(path)[1] <= {*map(self.counterpart, made)}

    def _beyond(self, path: str, numbers: Collection[int]) -> dict[str, None]:
        """The owners of the original nodes on the other side of boundary tensors, in order."""
        crossing = self._before.of([path])
        neighbours = sorted(
            neighbour for value, neighbour, _ in crossing if self._number[value] in numbers and neighbour != OUTSIDE
        )
        return dict.fromkeys(owner for neighbour in neighbours for owner in self._before.works[neighbour].owners)

    def around(self, group: Sequence[str]) -> Iterator[list[str]]:
        yield [owner for path in group for owner in self._beyond(path, self.known(path))]


def _boundaries_of(summary: GraphSummary, works: Sequence[NodeCalls], fused: Collection[int] = ()) -> Boundaries[int]:
    """What crosses the boundaries of modules in a summary's main graph."""
    passed = [([], []) if node.scope else (node.reads, node.makes) for node in summary.nodes]
    return Boundaries(passed, works, summary.live.__getitem__, frozenset(summary.outputs), fused=fused)
