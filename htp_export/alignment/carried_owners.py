"""The owners of each node after a tool, and the modules' fates and boundaries that follow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import onnx_ir as ir

from htp_export.alignment.alignment import Alignment
from htp_export.alignment.graph_summary import NOTHING, GraphSummary, SummaryNode, summarize
from htp_export.alignment.origin_map import Origin
from htp_export.alignment.replaced_nodes import ReplacedNodes, replaced_nodes
from htp_export.format.call_tree import CallTree, NodeCalls
from htp_export.format.fates import Fate
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.signatures import Signature, is_unread, renamed_signatures
from htp_export.format.tags import Reason
from htp_export.lineage.fates import FateEvidence, Outcome, find_fates
from htp_export.lineage.owner_rule import OwnerRule, Replacement, Work
from htp_export.lineage.tagging import ModelTags, Owned
from htp_export.model.boundaries import OUTSIDE, Boundaries
from htp_export.model.tagged import TaggedModel
from htp_export.shapes.operator_kinds import SIZES_ONLY, base_op


class OwnersAfter:
    """The owners of the nodes of a tool's result, by the rule of `htp_export.lineage`.

    Args:
        alignment: The counterparts of the result's tensors.
        works: For each node of the result, the original nodes that it replaces.
        tree: The calls of the modules.
    """

    def __init__(
        self, alignment: Alignment, works: Sequence[ReplacedNodes], tree: CallTree
    ) -> None:
        self.before, self.after, self._works = alignment.before, alignment.after, works
        self._number = alignment.numbers.number
        self._originals = [Work(node.owners, node.call, node.reason) for node in self.before.nodes]
        order: dict[str, int] = {}
        for place, node in enumerate(self.before.nodes):
            for owner in node.owners:
                order.setdefault(owner, place)
        self._rule = OwnerRule(tree, order)

    def decide(self, decided: Mapping[int, Owned] | None = None) -> list[Owned]:
        """The owners of every node, in order; none for a node without neighbours that have owners.

        ``decided``: Node → owners that other evidence proves.
        """
        known: dict[int, Owned] = dict(decided or {})
        replacements: list[Replacement[int]] = []
        for index, work in enumerate(self._works):
            if index in known:
                continue
            node = self.after.nodes[index]
            if node.owners and self._agrees(node, work):
                known[index] = Owned(node.owners, node.reason or work.reason, node.call, kept=True)
            elif work.nodes and not any(self.before.nodes[old].owners for old in work.nodes):
                known[index] = Owned((), work.reason)
            elif work.nodes:
                replacements.append(Replacement(index, self._results(work.nodes), work.reason))
            elif work.ends and not node.owners:
                known[index] = self.owned_by(work.ends, Reason.INSERTED)
        nodes = range(len(self._works))
        owned = self._rule.owners(replacements, known, nodes, _NodesAfter(self.after))
        return [owned.get(index) or Owned((), Reason.INSERTED) for index in nodes]

    def owned_by(
        self, originals: Iterable[int], reason: str, paths: tuple[str, ...] | None = None
    ) -> Owned:
        """The owners of original nodes, or of them ``paths``, in the calls of these nodes."""
        return self._rule.merged(
            [self._originals[original] for original in originals], reason, paths
        )

    def _agrees(self, node: SummaryNode, work: ReplacedNodes) -> bool:
        """Whether a node has the tags of the nodes that it replaces, left by the tool."""
        originals = [self.before.nodes[index] for index in work.nodes]
        if not originals:
            return True
        if set(node.owners) == {path for old in originals for path in old.owners}:
            return True
        if not work.coarse:
            return False
        return any(old.op == node.op and old.owners == node.owners for old in originals)

    def _results(self, originals: Sequence[int]) -> list[list[Work]]:
        """Divide original nodes by owners if all owners did each step; else keep them together."""
        steps = defaultdict[tuple[int, ...], set[tuple[str, ...]]](set)
        by_owners = defaultdict[tuple[str, ...], list[Work]](list)
        for index in originals:
            node = self.before.nodes[index]
            steps[tuple(self._number[value] for value in node.makes)].add(node.owners)
            by_owners[node.owners].append(self._originals[index])
        if all(owners == by_owners.keys() for owners in steps.values()):
            return [*by_owners.values()]
        return [[self._originals[index] for index in originals]]


@dataclass(frozen=True)
class _NodesAfter:
    """A tool's result, for the rule of owners."""

    after: GraphSummary

    def consumers(self, node: int) -> list[int]:
        return sorted({*self.after.consumers(node)})

    def producers(self, node: int) -> list[int]:
        return sorted({*self.after.producers(node)})

    def holders(self, node: int) -> list[int]:
        summary = self.after.nodes[node]
        if summary.holder != NOTHING:
            return [summary.holder]
        if not summary.scope:
            return []
        return [
            place for place, caller in enumerate(self.after.nodes) if caller.op == summary.scope
        ]

    def is_live(self, node: int) -> bool:
        return self.after.depends(node)

    def reads_size(self, node: int) -> bool:
        return base_op(self.after.nodes[node].op) in SIZES_ONLY


# --- without tags ---


def optimized_works(tagged: TaggedModel, optimized: ir.Model) -> dict[ir.Node, NodeCalls]:
    """The owners and calls of each node of an optimized graph, as `carry` finds them without tags.

    Owners are in the order in which the original nodes run; these may not be in functions. A node
    without a counterpart and without neighbours that have owners has none.
    """
    before, before_nodes = summarize(tagged.model)
    after, after_nodes = summarize(optimized)
    for summarized, node in zip(before.nodes, before_nodes, strict=True):
        work = tagged.work_of(node)
        summarized.owners = work.owners
        summarized.call = tagged.calls.encode_calls(work.owners, work.calls)
    for summarized in after.nodes:
        summarized.owners = ()
    alignment = Alignment(before, after)
    owned = OwnersAfter(alignment, replaced_nodes(alignment), tagged.calls).decide()
    return {
        node: tagged.calls.work(entry.paths, entry.call)
        for node, entry in zip(after_nodes, owned, strict=True)
    }


def tag(
    model: ir.Model,
    nodes: Sequence[ir.Node],
    owned: Sequence[Owned],
    alignment: Alignment,
    origin: Origin,
) -> tuple[Hierarchy, list[tuple[str, str, bool]]]:
    """Write tags into a tool's result; return its modules with new fates, and contamination."""
    works = [origin.calls.work(entry.paths, entry.call) for entry in owned]
    fused = {place for place, entry in enumerate(owned) if entry.reason == Reason.FUSED}
    evidence = _CarriedEvidence(alignment, origin, works, fused)
    hierarchy, crossing = find_fates(origin.hierarchy, evidence)
    names = [value.name for value in alignment.after.values]
    contamination = list(
        dict.fromkeys((path, names[value], leaves) for path, value, leaves in crossing)
    )
    found = ModelTags.of(
        owned,
        hierarchy,
        signatures=evidence.signatures(),
        contamination=contamination,
        lasting=origin.lasting,
    )
    found.write(model, nodes)
    return hierarchy, contamination


class _CarriedEvidence(FateEvidence[int]):
    """The boundaries of modules after a tool, compared with the original model's.

    Known tensors are numbers of original tensors.

    Args:
        alignment: The counterparts of the result's tensors.
        origin: The original model.
        works: The owners and calls of the result's nodes.
        fused: The nodes that several modules were fused into, by index.
    """

    def __init__(
        self,
        alignment: Alignment,
        origin: Origin,
        works: Sequence[NodeCalls],
        fused: Collection[int],
    ) -> None:
        super().__init__(_boundaries_of(alignment.after, works, fused))
        self._alignment = alignment
        self._signatures = origin.signatures
        self._old = origin.hierarchy
        self._number = alignment.numbers.number
        before = [origin.calls.work(node.owners, node.call) for node in alignment.before.nodes]
        self._before = _boundaries_of(alignment.before, before)
        # original number → the first tensor that has its values
        self._remaining: dict[int, int] = {}
        for value, number in enumerate(alignment.counterpart):
            if number != NOTHING and alignment.exact[value]:
                self._remaining.setdefault(number, value)
        self._known = cache(self._find_known)

    def signatures(self) -> dict[str, tuple[Signature, ...]]:
        """The signatures with the new names of tensors; None for a removed tensor."""
        return renamed_signatures(self._signatures, self._name)

    def _name(self, name: str) -> str | None:
        number, value = self._numbered(name), self._alignment.after.find(name)
        if value == NOTHING or number == NOTHING or self.counterpart(value) != number:
            value = self._remaining.get(number, NOTHING)
        return None if value == NOTHING else self._alignment.after.values[value].name

    def _numbered(self, name: str) -> int:
        return self._number[self._alignment.before.find(name)]

    def _find_known(self, path: str) -> tuple[frozenset[int], frozenset[int]]:
        """The numbers of tensors at a module's boundary, and the subset that it has to compute."""
        info = self._old.get(path)
        inputs, outputs = set[int](), set[int]()
        for call in self._signatures.get(path, ()):
            inputs.update(map(self._numbered, call.taken))
            outputs.update(map(self._numbered, call.given))
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

    def predetermined(self, path: str) -> Outcome | None:
        info = self._old[path]
        is_open = info.fate.does_work and path in self._before.below
        return None if is_open else Outcome(info.fate, info.fused_with)

    def without_work(self, path: str) -> Fate | None:
        """The fate of a module without nodes.

        ``dead`` if nothing read its outputs, ``constant`` if its nodes were folded, ``identity`` if
        its outputs are its inputs.
        """
        before = self._alignment.before
        if is_unread(self._signatures.get(path, ())):
            return Fate.DEAD
        if not any(before.depends(node) for node in self._before.below[path]):
            return Fate.CONSTANT
        entering = {
            self._number[value] for value, _, leaves in self._before.of([path]) if not leaves
        }
        return Fate.IDENTITY if self._known(path)[1] <= entering else None

    def partners(self, path: str) -> Collection[str] | None:
        """The original owners beyond the tensors that a module lost; None if its boundary is exact."""
        info = self._old[path]
        if info.fate.is_exact and self.is_closed(path) and self._makes_all(path):
            return None
        lost = {number for number in self.known(path) if number not in self._remaining}
        if not lost and not info.fate.is_merged:
            return None
        return [*info.fused_with, *self._beyond(path, lost)]

    def _makes_all(self, path: str) -> bool:
        """Whether the nodes of a module compute all tensors that it has to compute."""
        nodes = self._alignment.after.nodes
        computed = set[int]()
        for node in self.boundaries.below[path]:
            computed.update(map(self.counterpart, nodes[node].makes))
        return self._known(path)[1] <= computed

    def _beyond(self, path: str, numbers: Collection[int]) -> dict[str, None]:
        """The owners of the original nodes on the other side of boundary tensors, in order."""
        neighbours = []
        for value, neighbour, _ in self._before.of([path]):
            if self._number[value] in numbers and neighbour != OUTSIDE:
                neighbours.append(neighbour)
        owners = dict[str, None]()
        for neighbour in sorted(neighbours):
            owners.update(dict.fromkeys(self._before.works[neighbour].owners))
        return owners

    def around(self, group: Sequence[str]) -> Iterator[list[str]]:
        yield [owner for path in group for owner in self._beyond(path, self.known(path))]


def _boundaries_of(
    summary: GraphSummary, works: Sequence[NodeCalls], fused: Collection[int] = ()
) -> Boundaries[int]:
    """The boundaries of modules in a summary's main graph."""
    passed = [([], []) if node.scope else (node.reads, node.makes) for node in summary.nodes]
    return Boundaries(
        passed, works, summary.live.__getitem__, frozenset(summary.outputs), fused=fused
    )
