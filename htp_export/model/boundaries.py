"""What crosses the boundaries of modules, in any graph whose nodes do the work of modules.

There is one rule. A tensor enters a module if a node of the module reads it and a node outside makes it. It leaves if
a node of the module makes it and a node outside reads it, or the graph returns it; but equal work of two blocks that
was merged into one node feeds both blocks (`NodeCalls.others`).
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar, overload

from htp_export.format.call_tree import Block, Instance, NodeCalls

OUTSIDE = -1  # in place of a node: the graph's own inputs and outputs, weights

Key = TypeVar("Key", bound=Hashable)
T = TypeVar("T")


class _Runs(Sequence[T]):
    """Some elements of a sequence, in its order; as a list, they would take memory for each module around each node."""

    __slots__ = ("_bounds", "_elements", "_size")

    def __init__(self, elements: Sequence[T]) -> None:
        self._elements = elements
        self._bounds = array("q")  # start and end of each run
        self._size = 0

    def add(self, place: int) -> None:
        if self._bounds and self._bounds[-1] == place:
            self._bounds[-1] += 1
        else:
            self._bounds.extend((place, place + 1))
        self._size += 1

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        bounds = zip(self._bounds[::2], self._bounds[1::2], strict=True)
        return itertools.chain.from_iterable(self._elements[start:stop] for start, stop in bounds)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return list(self)[index]


def runs_below(elements: Sequence[T], works: Iterable[NodeCalls | None]) -> dict[str, _Runs[T]]:
    """Module path → the nodes with an owner at or below it, without what such a module computed for other callers."""
    below: dict[str, _Runs[T]] = {}
    for place, work in enumerate(works):
        for path in () if work is None else work.modules:
            if path not in below:
                below[path] = _Runs(elements)
            below[path].add(place)
    return below


class Boundaries(Generic[Key]):
    """The nodes of each module, and the tensors that pass between them and all others.

    Args:
        nodes: What each node reads and what it makes, in order of execution; two empty tuples for one that is to be
            left out. A tensor that several nodes make (an argument of a function, by each call of it) comes from
            outside of those regions alone that have none of them.
        works: Whose work each node does.
        counts: Whether a tensor counts, as one whose values depend on the model's inputs.
        results: The tensors that the graph returns.
        holders: For each node, the one in whose subgraph it stands and with which it belongs to a module, or
            `OUTSIDE`; empty where all nodes stand for themselves.

    Attributes:
        works: Whose work each node does.
        below: Module path → the nodes in its region, in order; without those that they hold.

    Examples:
        >>> from htp_export.format.call_tree import CallTree
        >>> from htp_export.format.hierarchy import Hierarchy, ModuleInfo
        >>> work = CallTree(Hierarchy([ModuleInfo("", "Net", 1)])).work
        >>> nodes = [(["x"], ["h"]), (["h"], ["y"])]
        >>> boundaries = Boundaries(nodes, [work(("fc",)), work(("act",))], {"x", "h", "y"}.__contains__, {"y"})
        >>> list(boundaries.of(["fc"]))
        [('h', 1, True), ('x', -1, False)]
    """

    def __init__(
        self,
        nodes: Sequence[tuple[Sequence[Key], Sequence[Key]]],
        works: Sequence[NodeCalls],
        counts: Callable[[Key], bool],
        results: Container[Key],
        holders: Sequence[int] = (),
    ) -> None:
        self.works = works
        listed = [work if reads or makes else None for (reads, makes), work in zip(nodes, works, strict=True)]
        self.below: Mapping[str, Sequence[int]] = runs_below(range(len(listed)), listed)
        self._holders, self._counts = holders, counts
        self._makers: dict[Key, list[int]] = {}
        self._readers: dict[Key, list[int]] = {}
        for index, (reads, makes) in enumerate(nodes):
            for key in makes:
                self._makers.setdefault(key, []).append(index)
            for key in reads:
                self._readers.setdefault(key, []).append(index)
        self._leaving = [self._edges_out(index, makes, results) for index, (_, makes) in enumerate(nodes)]
        self._entering = [self._edges_in(index, reads) for index, (reads, _) in enumerate(nodes)]

    def _edges_out(self, index: int, makes: Sequence[Key], results: Container[Key]) -> list[tuple[Key, int]]:
        """What a node gives to which others that are not in the same regions."""
        edges: list[tuple[Key, int]] = []
        for key in makes:
            if self._counts(key):
                if key in results:
                    edges.append((key, OUTSIDE))
                edges += [(key, reader) for reader in self._readers.get(key, ()) if not self._together(index, reader)]
        return edges

    def _edges_in(self, index: int, reads: Sequence[Key]) -> list[tuple[Key, Sequence[int]]]:
        """What a node takes, from which others."""
        edges: list[tuple[Key, Sequence[int]]] = []
        for key in reads:
            if self._counts(key):
                makers = self._makers.get(key, (OUTSIDE,))
                if not any(maker != OUTSIDE and self._together(index, maker) for maker in makers):
                    edges.append((key, makers))
        return edges

    def _together(self, first: int, second: int) -> bool:
        same = self.works[first] is self.works[second]
        return same and (not self._holders or self._holders[first] == self._holders[second])

    def owners(self, node: int) -> tuple[str, ...]:
        """The modules that own a node; the root for what is outside, and for nodes that nobody owns."""
        return (() if node == OUTSIDE else self.works[node].owners) or ("",)

    def of(self, paths: Sequence[str]) -> Iterator[tuple[Key, int, bool]]:
        """``(tensor, node on the other side or OUTSIDE, whether it leaves)`` for the common boundary of modules."""
        region = {index for path in paths for index in self.below.get(path, ())}
        return self.around(sorted(region), paths)

    def around(
        self, nodes: Iterable[int], paths: Sequence[str], call: Instance | None = None
    ) -> Iterator[tuple[Key, int, bool]]:
        """The same for a region whose nodes are given, in order: those of one call, or with all that they hold."""
        nodes = list(nodes)
        region = {*nodes}
        for index in nodes:
            outwards = [edge for edge in self._leaving[index] if edge[1] not in region]
            others = self.works[index].others(paths, call) if outwards else ()
            for key, reader in outwards:
                if not (others and self._is_for(reader, others)):
                    yield key, reader, True
            for key, makers in self._entering[index]:
                if region.isdisjoint(makers):
                    yield key, makers[0], False

    def beside(self, is_wanted: Callable[[Key], bool]) -> Iterator[NodeCalls]:
        """Whose work the nodes do that make some tensors; for tensors from outside, the nodes that read them."""
        for key in dict.fromkeys((*self._makers, *self._readers)):
            if is_wanted(key) and self._counts(key):
                yield from (self.works[node] for node in self._makers.get(key) or self._readers[key])

    def _is_for(self, node: int, blocks: Collection[Block]) -> bool:
        """Whether a node, or one that holds it, does work of one of some blocks."""
        while node != OUTSIDE:
            if self.works[node].is_for(blocks):
                return True
            node = self._holders[node] if self._holders else OUTSIDE
        return False
