"""Things that belong together, found pair by pair."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["Groups"]

_Item = TypeVar("_Item", bound=Hashable)


class Groups(Generic[_Item]):
    """Disjoint sets (union-find); iterated over, they come in the order in which their first members were added.

    Example:
        >>> groups = Groups()
        >>> for item in "abcd":
        ...     groups.add(item)
        >>> groups.join("a", "c")
        >>> list(groups)
        [('a', 'c'), ('b',), ('d',)]
    """

    def __init__(self) -> None:
        self._parent: dict[_Item, _Item] = {}

    def __contains__(self, item: object) -> bool:
        return item in self._parent

    def add(self, item: _Item) -> None:
        """Put in an item, in a set of its own if it is new."""
        self._parent.setdefault(item, item)

    def join(self, one: _Item, other: _Item) -> None:
        """Make one set of those of two items."""
        self._parent[self._root(other)] = self._root(one)

    def __iter__(self) -> Iterator[tuple[_Item, ...]]:
        sets: dict[_Item, list[_Item]] = {}
        for item in self._parent:
            sets.setdefault(self._root(item), []).append(item)
        yield from map(tuple, sets.values())

    def _root(self, item: _Item) -> _Item:
        while self._parent[item] != item:
            self._parent[item] = self._parent[self._parent[item]]  # halve the way for the next who asks
            item = self._parent[item]
        return item
