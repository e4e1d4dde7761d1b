"""The fate of each module: one state machine for an export, `carry` and the passes.

Each provides its `FateEvidence`: the boundaries of modules in the present graph, and the inputs and
outputs that PyTorch passed to and from them. A module that lost a boundary tensor is *fused* with
the modules on the other side of it, and with theirs, until PyTorch knows every tensor at the common
boundary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from htp_export.format import tags
from htp_export.format.fates import Fate
from htp_export.format.hierarchy import Hierarchy
from htp_export.model.boundaries import Boundaries

_MOST_PARTNERS = 12
"""Partners of a fused module, at most: the module around them replaces a longer list."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The fate of one module, and for a fused one the modules with which it can be cut out."""

    fate: Fate
    fused_with: tuple[str, ...] = ()


class FateEvidence(ABC, Generic[Key]):
    """The evidence for fates: facts about modules, and their boundaries in the present graph."""

    def __init__(self, boundaries: Boundaries[Key]) -> None:
        self.boundaries = boundaries
        self._closed: dict[str, bool] = {}

    @abstractmethod
    def predetermined(self, path: str) -> Outcome | None:
        """The fate of a module that the graph does not decide: it never ran, or was not needed."""

    @abstractmethod
    def without_work(self, path: str) -> Fate | None:
        """The fate of a module that has no nodes because nothing was to compute; else None."""

    @abstractmethod
    def partners(self, path: str) -> Iterable[str] | None:
        """The modules beyond lost boundary tensors, or of an earlier fusion; None if unchanged."""

    @abstractmethod
    def ran(self, path: str) -> bool:
        """Whether a module ran, so that its inputs and outputs are known."""

    @abstractmethod
    def known(self, path: str) -> Collection[Hashable]:
        """The tensors that PyTorch passed to and from a module."""

    @abstractmethod
    def around(self, group: Sequence[str]) -> Iterable[Iterable[str]]:
        """The owners on the other side of modules' inputs and outputs, also of removed ones.

        In groups, the first group with the modules whose work continues: an output may be one of
        their internal tensors.
        """

    def counterpart(self, tensor: Key) -> Hashable:
        """The tensor of `known` that a tensor of the graph corresponds to."""
        return tensor

    def has_nodes(self, path: str) -> bool:
        """Whether a node has an owner at or below a module."""
        return path in self.boundaries.below

    def unknown(self, group: Sequence[str]) -> Iterator[tuple[Key, int, bool]]:
        """Crossings of the common boundary of modules that are unknown to PyTorch.

        As of `Boundaries.of`.
        """
        known = [self.known(path) for path in group]
        for crossing in self.boundaries.of(group):
            tensor = self.counterpart(crossing[0])
            if not any(tensor in tensors for tensors in known):
                yield crossing

    def is_closed(self, path: str) -> bool:
        """Whether a module ran, has nodes, and PyTorch knows all tensors at its boundary."""
        if path not in self._closed:
            ran = self.ran(path) and self.has_nodes(path)
            self._closed[path] = ran and next(self.unknown([path]), None) is None
        return self._closed[path]

    def around_fused(self, group: Sequence[str]) -> Iterator[str]:
        """The modules around members of a group that own a part of a fused node in the group's regions.

        The result of the node is a tensor of such a module. The boundary of the group alone would
        treat it as equal work of that module, see ``NodeCalls.blocks_outside``.
        """
        outermost = []
        for path in group:
            above = (up for up in tags.ancestors(path) if up != path)
            if path and not any(up in group for up in above):
                outermost.append(path)
        nodes = set[int]()
        for path in outermost:
            nodes.update(self.boundaries.below.get(path, ()))
        for node in sorted(nodes):
            if node not in self.boundaries.fused:
                continue
            for owner in self.boundaries.owners(node):
                is_around = any(tags.is_under(path, owner) for path in outermost)
                if is_around and not any(tags.is_under(owner, path) for path in group):
                    yield owner

    def behind_unknown(self, group: Sequence[str]) -> Iterator[str]:
        """The owners on the other side of crossings that are unknown to PyTorch.

        The root for the model's own inputs and outputs.
        """
        for _, node, _ in self.unknown(group):
            yield from self.boundaries.owners(node)


def fate_of(path: str, evidence: FateEvidence[Key]) -> Outcome:
    """The fate of a module."""
    predetermined = evidence.predetermined(path)
    if predetermined is not None:
        return predetermined
    has_nodes = evidence.has_nodes(path)
    if not has_nodes:
        without_work = evidence.without_work(path)
        if without_work:
            return Outcome(without_work)
    partners = evidence.partners(path)
    if partners is None and has_nodes:
        return Outcome(Fate.COMPUTED)
    return Outcome(Fate.FUSED, fused_with(path, partners or (), evidence))


def find_fates(
    hierarchy: Hierarchy, evidence: FateEvidence[Key]
) -> tuple[Hierarchy, list[tuple[str, Key, bool]]]:
    """Find the fates of all modules.

    Returns:
        The modules with their fates, and ``(module, tensor, whether it leaves)`` for tensors at the
        boundaries of computed modules that PyTorch does not know.
    """
    outcomes = {path: fate_of(path, evidence) for path in hierarchy}
    contamination: dict[tuple[str, Key, bool], None] = {}
    for path, outcome in outcomes.items():
        if not outcome.fate.is_exact or evidence.is_closed(path):
            continue
        if evidence.predetermined(path) is None:
            for tensor, _, leaves in evidence.unknown([path]):
                contamination[path, tensor, leaves] = None
    fates = {path: outcome.fate for path, outcome in outcomes.items()}
    partners = {path: one.fused_with for path, one in outcomes.items() if one.fate.is_merged}
    return hierarchy.with_results(fates=fates, fused_with=partners), list(contamination)


def fused_with(path: str, start: Iterable[str], evidence: FateEvidence[Key]) -> tuple[str, ...]:
    """The partners of a fused module: together, their common boundary is known to PyTorch.

    The group grows by the owners on the other side of its boundary, until this is known. In each
    step, modules around it that own a part of the same node come first. A group without a node (its
    modules cancelled out) takes a module beside it that has nodes.

    If the partners are too many, or none (calls of the module itself were merged with each other),
    the innermost module around it with a known boundary replaces them. The root has none around it.
    """
    group = list(dict.fromkeys((path, *start)))
    while len(group) <= _MOST_PARTNERS:
        added = list(dict.fromkeys(evidence.around_fused(group)))
        if not added:
            behind = dict.fromkeys(evidence.behind_unknown(group))
            added = [partner for partner in behind if partner not in group]
        if not added and not any(map(evidence.has_nodes, group)):
            added = _beside(group, evidence)
        if not added:
            break
        group.extend(added)
    if 1 < len(group) <= _MOST_PARTNERS:
        return tuple(group[1:])
    if not path:  # nothing is around the root
        return ()
    for up in tags.ancestors(path):
        if up != path and evidence.is_closed(up):
            return (up,)
    return ("",)


def _beside(group: Sequence[str], evidence: FateEvidence[Key]) -> list[str]:
    """For modules without a node, the innermost one beside them that has nodes, or else all."""
    beside: list[str] = []
    for side in evidence.around(group):
        candidates = [owner for owner in dict.fromkeys(side) if owner not in group]
        with_nodes = list(filter(evidence.has_nodes, candidates))
        if with_nodes:
            return [max(with_nodes, key=len)]
        beside.extend(candidates)
    return list(dict.fromkeys(beside))
