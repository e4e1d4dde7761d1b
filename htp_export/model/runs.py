"""Elements of a sequence, such as the nodes of a module in graph order, kept as runs of neighbours."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar, overload

from htp_export.format.call_tree import NodeCalls

__all__ = ["Runs", "runs_below"]

T = TypeVar("T")


class Runs(Sequence[T]):
    """Some elements of a sequence, in its order.

    What a module computes lies together in a graph, so that a module takes the memory of a few numbers. As lists, the
    nodes of all modules take memory for each pair of a node and a module around it.

    Args:
        elements: The sequence.

    Examples:
        >>> runs = Runs("abcdef")
        >>> for place in (0, 1, 4):
        ...     runs.add(place)
        >>> list(runs), len(runs), runs[-1], "c" in runs
        (['a', 'b', 'e'], 3, 'e', False)
    """

    __slots__ = ("_bounds", "_elements", "_size")

    def __init__(self, elements: Sequence[T]) -> None:
        self._elements = elements
        self._bounds = array("q")  # start and end of each run
        self._size = 0

    def add(self, place: int) -> None:
        """Add the element at a place behind those that were added."""
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


def runs_below(elements: Sequence[T], works: Iterable[NodeCalls | None]) -> dict[str, Runs[T]]:
    """Module path → what lies in its region.

    These are the nodes with an owner at or below it, except what such a module computed when another one called it.

    Args:
        elements: The nodes, or their places.
        works: Whose work each does; None for a node to be left out.
    """
    below: dict[str, Runs[T]] = {}
    for place, work in enumerate(works):
        for path in () if work is None else work.modules:
            if path not in below:
                below[path] = Runs(elements)
            below[path].add(place)
    return below
