"""What became of each module: one state machine for an export, `carry` and the passes.

Each of them hands in its `FateEvidence`: the boundaries in the graph as it is, and what it knows of
the tensors that the modules took and gave in PyTorch. A module with a boundary tensor that is gone
is *fused* with the modules on the other side of it, and with theirs, until every tensor at the
common boundary is one that PyTorch knows.
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
"""Modules that are taken along with a fused one, at most: a longer list says less than the module around them all."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one module; if it was merged, the modules with which it can be cut out as a whole."""

    fate: Fate
    fused_with: tuple[str, ...] = ()


class FateEvidence(ABC, Generic[Key]):
    """What is known of the modules of a graph, and what crosses their boundaries in the graph as it is."""

    def __init__(self, boundaries: Boundaries[Key]) -> None:
        self.boundaries = boundaries
        self._closed: dict[str, bool] = {}

    @abstractmethod
    def predetermined(self, path: str) -> Outcome | None:
        """The fate of a module that the graph does not decide: it never ran, or nothing of its work was needed."""

    @abstractmethod
    def without_work(self, path: str) -> Fate | None:
        """``constant`` or ``identity`` for a module that has no nodes because there was nothing for them to compute."""

    @abstractmethod
    def partners(self, path: str) -> Iterable[str] | None:
        """For a module that was fused, or lost a tensor of its boundary, the modules beyond; None for any other."""

    @abstractmethod
    def ran(self, path: str) -> bool:
        """Whether a module ran, and what it took and gave is known."""

    @abstractmethod
    def known(self, path: str) -> Collection[Hashable]:
        """The tensors that a module took and gave in PyTorch."""

    @abstractmethod
    def around(self, group: Sequence[str]) -> Iterable[Iterable[str]]:
        """The owners on the other side of what modules take and give, whether or not it is in the graph.

        In groups, those first with whose work the modules go on: a tensor that they give back may
        be one inside it.
        """

    def counterpart(self, tensor: Key) -> Hashable:
        """What a tensor of the graph is among those of ``known``."""
        return tensor

    def has_nodes(self, path: str) -> bool:
        """Whether a node has an owner at or below a module."""
        return path in self.boundaries.below

    def unknown(self, group: Sequence[str]) -> Iterator[tuple[Key, int, bool]]:
        """What crosses the common boundary of modules, as of `Boundaries.of`, and is not known to PyTorch."""
        known = [self.known(path) for path in group]
        for crossing in self.boundaries.of(group):
            tensor = self.counterpart(crossing[0])
            if not any(tensor in tensors for tensors in known):
                yield crossing

    def is_closed(self, path: str) -> bool:
        """Whether a module ran, has nodes, and all that crosses its boundary is known to PyTorch."""
        if path not in self._closed:
            ran = self.ran(path) and self.has_nodes(path)
            self._closed[path] = ran and next(self.unknown([path]), None) is None
        return self._closed[path]

    def around_fused(self, group: Sequence[str]) -> Iterator[str]:
        """The modules around members of a group that do a part of the work of a fused node in their regions.

        The result of the node is what such a module computed: the boundary of the group alone would
        have it as equal work of that module, see ``NodeCalls.others``.
        """
        outermost = [
            path
            for path in group
            if path and not any(up in group for up in tags.ancestors(path) if up != path)
        ]
        for node in sorted(
            {node for path in outermost for node in self.boundaries.below.get(path, ())}
        ):
            if node not in self.boundaries.fused:
                continue
            for owner in self.boundaries.owners(node):
                is_around = any(tags.is_under(path, owner) for path in outermost)
                if is_around and not any(tags.is_under(owner, path) for path in group):
                    yield owner

    def behind_unknown(self, group: Sequence[str]) -> Iterator[str]:
        """The owners on the other side of what crosses the common boundary of modules, and is not known to PyTorch.

        The root for the model's own inputs and outputs.
        """
        for _, node, _ in self.unknown(group):
            yield from self.boundaries.owners(node)


def fate_of(path: str, evidence: FateEvidence[Key]) -> Outcome:
    """What became of a module."""
    settled = evidence.predetermined(path)
    if settled is not None:
        return settled
    has_nodes = evidence.has_nodes(path)
    if not has_nodes and (without_work := evidence.without_work(path)):
        return Outcome(without_work)
    partners = evidence.partners(path)
    if partners is None and has_nodes:
        return Outcome(Fate.COMPUTED)
    return Outcome(Fate.FUSED, fused_with(path, partners or (), evidence))


def find_fates(
    hierarchy: Hierarchy, evidence: FateEvidence[Key]
) -> tuple[Hierarchy, list[tuple[str, Key, bool]]]:
    """What became of all modules.

    Returns:
        The modules with their fates, and ``(module, tensor, whether it leaves)`` for tensors at the
        boundaries of computed modules that PyTorch does not know.
    """
    outcomes = {path: fate_of(path, evidence) for path in hierarchy}
    contamination: dict[tuple[str, Key, bool], None] = {}
    for path, outcome in outcomes.items():
        if (
            outcome.fate.is_exact
            and not evidence.is_closed(path)
            and evidence.predetermined(path) is None
        ):
            contamination.update(
                ((path, key, leaves), None) for key, _, leaves in evidence.unknown([path])
            )
    tree = hierarchy.with_results(
        fates={path: outcome.fate for path, outcome in outcomes.items()},
        fused_with={
            path: outcome.fused_with for path, outcome in outcomes.items() if outcome.fate.is_merged
        },
    )
    return tree, list(contamination)


def fused_with(path: str, start: Iterable[str], evidence: FateEvidence[Key]) -> tuple[str, ...]:
    """The modules that are taken along with a fused one, so that their common boundary is one that PyTorch knows.

    First those on the other side of its boundary, then those on the other side of the common one,
    and so on. Before these come modules around it that do a part of the work of the same node.
    Modules without a node (they cancelled out) take one beside them that has nodes. If there are
    many, the innermost module around it whose boundary is known is named in their place; so it is
    if there are none, as calls of the module itself were merged with each other. The root has none
    around it.
    """
    group = list(dict.fromkeys((path, *start)))
    while len(group) <= _MOST_PARTNERS:
        fresh = list(dict.fromkeys(evidence.around_fused(group)))
        if not fresh:
            fresh = [
                partner
                for partner in dict.fromkeys(evidence.behind_unknown(group))
                if partner not in group
            ]
        if not fresh and not any(map(evidence.has_nodes, group)):
            fresh = _beside(group, evidence)
        if not fresh:
            break
        group.extend(fresh)
    if 1 < len(group) <= _MOST_PARTNERS:
        return tuple(group[1:])
    if not path:  # nothing is around the root
        return ()
    return (next((up for up in tags.ancestors(path) if up != path and evidence.is_closed(up)), ""),)


def _beside(group: Sequence[str], evidence: FateEvidence[Key]) -> list[str]:
    """For modules without a node, the innermost one beside them that has nodes; all beside them if none has."""
    beside: list[str] = []
    for side in evidence.around(group):
        candidates = [owner for owner in dict.fromkeys(side) if owner not in group]
        with_nodes = list(filter(evidence.has_nodes, candidates))
        if with_nodes:
            return [max(with_nodes, key=len)]
        beside.extend(candidates)
    return list(dict.fromkeys(beside))
