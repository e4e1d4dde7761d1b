"""What crosses the borders of modules, in any graph whose nodes have owners."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from htp_export.format import tags
from htp_export.format.call_tree import Work

__all__ = ["OUTSIDE", "Boundaries", "Crossings", "fused_with"]

OUTSIDE = -1  # in place of a node: the graph's own inputs and outputs, weights

_MOST = 12  # modules that are named as merged with one, one by one

Key = TypeVar("Key", bound=Hashable)


class Crossings(Generic[Key]):
    """The nodes of each module, and the tensors that pass between them and all others.

    Args:
        nodes: What each node reads and what it makes, in order of execution; two empty tuples for one that is to be
            left out.
        works: Whose work each node does.
        live: The tensors that count: those whose values depend on the model's inputs.
        results: The tensors that the graph returns.

    Attributes:
        owners: The module paths that own each node.
        below: Module path → the nodes in its region, in order.

    Examples:
        >>> from htp_export.format.call_tree import CallTree
        >>> from htp_export.format.hierarchy import Hierarchy, ModuleInfo
        >>> work = CallTree(Hierarchy([ModuleInfo("", "Net", 1)])).work
        >>> nodes = [(["x"], ["h"]), (["h"], ["y"])]
        >>> there = Crossings(nodes, [work(("fc",)), work(("act",))], {"x", "h", "y"}, {"y"})
        >>> list(there.of(["fc"]))
        [('h', 1, True), ('x', -1, False)]
    """

    def __init__(
        self,
        nodes: Sequence[tuple[Sequence[Key], Sequence[Key]]],
        works: Sequence[Work],
        live: Container[Key],
        results: Container[Key],
    ) -> None:
        self.owners = [work.owners for work in works]
        self._works = works
        self.below: dict[str, list[int]] = {}
        self._maker: dict[Key, int] = {}
        self._readers: dict[Key, list[int]] = {}
        for index, ((reads, makes), work) in enumerate(zip(nodes, works, strict=True)):
            self._maker.update(dict.fromkeys(makes, index))
            for key in reads:
                self._readers.setdefault(key, []).append(index)
            if reads or makes:
                for path in work.modules:
                    self.below.setdefault(path, []).append(index)
        self._edges = [self._edges_of(index, *passed, live, results) for index, passed in enumerate(nodes)]

    def _edges_of(
        self, index: int, reads: Sequence[Key], makes: Sequence[Key], live: Container[Key], results: Container[Key]
    ) -> list[tuple[Key, int, bool]]:
        """What passes between a node and others, without those of the same owners: that crosses no border."""
        here = self._works[index]
        found: list[tuple[Key, int, bool]] = []
        for key in makes:
            if key in live:
                if key in results:
                    found.append((key, OUTSIDE, True))
                readers = self._readers.get(key, ())
                found += [(key, reader, True) for reader in readers if self._works[reader] is not here]
        for key in reads:
            if key in live:
                source = self._maker.get(key, OUTSIDE)
                if source == OUTSIDE or self._works[source] is not here:
                    found.append((key, source, False))
        return found

    def of(self, paths: Sequence[str]) -> Iterable[tuple[Key, int, bool]]:
        """``(tensor, node on the other side or OUTSIDE, whether it leaves)`` for what crosses the border of a region.

        The region is that of all nodes with an owner at or below one of ``paths``. What several modules own may be
        read by each of them, and by the blocks around them: see ``Work.others``.
        """
        region = {index for path in paths for index in self.below.get(path, ())}
        for index in sorted(region):
            outwards = [edge for edge in self._edges[index] if edge[1] not in region]
            others = self._works[index].others(paths) if outwards else []
            for key, other, leaves in outwards:
                shared = leaves and other != OUTSIDE and not self._works[other].modules.isdisjoint(others)
                if not shared:
                    yield key, other, leaves


class Boundaries(Protocol):
    """What `fused_with` asks of the boundaries of modules in a graph."""

    def has_nodes(self, path: str) -> bool:
        """Whether a node has an owner at or below a module."""

    def is_closed(self, path: str) -> bool:
        """Whether a module ran, has nodes, and all that crosses its boundary is known to PyTorch."""

    def behind_unknown(self, group: Sequence[str]) -> Iterable[str]:
        """The owners on the other side of what crosses the common boundary of modules, and is not known to PyTorch.

        The root for the model's own inputs and outputs.
        """

    def around(self, group: Sequence[str]) -> Iterable[Iterable[str]]:
        """The owners on the other side of what modules take and give, whether or not it is in the graph.

        In groups, those first with whose work the modules go on: a tensor that they give back may be one inside it.
        """


def fused_with(path: str, start: Iterable[str], boundaries: Boundaries) -> tuple[str, ...]:
    """The modules that are taken along with a fused one, so that their common boundary is one that PyTorch knows.

    First those on the other side of its boundary, then those on the other side of the common one, and so on. Modules
    without a node (they cancelled out) take one beside them that has nodes. Where all that goes far (in a layout of its
    own no tensor is what it was), the innermost module around it whose boundary is known is named in their place.

    An export, `carry` and the passes all find the partners of a module here.

    Args:
        path: The module.
        start: Modules that are taken along in any case.
        boundaries: The boundaries in the graph as it is.
    """
    group = list(dict.fromkeys((path, *start)))
    while len(group) <= _MOST:
        fresh = [other for other in dict.fromkeys(boundaries.behind_unknown(group)) if other not in group]
        if not fresh and not any(map(boundaries.has_nodes, group)):
            fresh = _beside(group, boundaries)
        if not fresh:
            return tuple(group[1:])
        group.extend(fresh)
    return (next((up for up in tags.ancestors(path) if up != path and boundaries.is_closed(up)), ""),)


def _beside(group: Sequence[str], boundaries: Boundaries) -> list[str]:
    """For modules without a node, the innermost one beside them that has nodes; all beside them if none has."""
    beside: list[str] = []
    for side in boundaries.around(group):
        found = [other for other in dict.fromkeys(side) if other not in group]
        with_nodes = list(filter(boundaries.has_nodes, found))
        if with_nodes:
            return [max(with_nodes, key=len)]
        beside.extend(found)
    return list(dict.fromkeys(beside))
