"""Sets that share their elements: what lies around a module costs memory once, not once for each module inside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Any, TypeVar

T = TypeVar("T")


class LinkedSet(AbstractSet[T]):
    """A set that holds only what another one, its rest, has not, and a reference to that one.

    The sets of all modules around a module, for all modules of a tree, take memory for each module once. As frozensets
    they take it for each pair of modules: 260 MB in a tree of 2,000 levels. What set
    operations give is a frozenset, except for an intersection of sets with a common rest.

    Examples:
        >>> outer = LinkedSet(["encoder", ""])
        >>> inner = LinkedSet(["encoder.fc", ""], outer)
        >>> list(inner), "encoder" in inner, inner == {"", "encoder", "encoder.fc"}, (inner & outer) is outer
        (['encoder.fc', 'encoder', ''], True, True, True)
    """

    __slots__ = ("__weakref__", "_hash_value", "_own", "_rest", "_size")

    def __init__(self, elements: Iterable[T] = (), rest: LinkedSet[T] | None = None) -> None:
        known: AbstractSet[T] = frozenset() if rest is None else frozenset(rest)
        self._own = tuple(element for element in dict.fromkeys(elements) if element not in known)
        self._rest = rest
        self._size = len(self._own) + len(known)
        self._hash_value = hash(frozenset(self._own)) ^ (0 if rest is None else hash(rest))

    def _links(self) -> Iterator[LinkedSet[T]]:
        link: LinkedSet[T] | None = self
        while link is not None:
            yield link
            link = link._rest

    def __iter__(self) -> Iterator[T]:
        elements: list[T] = []
        link: LinkedSet[T] | None = self
        while link is not None:  # without a call for each link: trees are thousands of levels deep
            elements += link._own
            link = link._rest
        return iter(elements)

    def __contains__(self, element: object) -> bool:
        return element in _unlinked(self)

    def __len__(self) -> int:
        return self._size

    def __hash__(self) -> int:
        return self._hash_value

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, AbstractSet) and frozenset(self) == frozenset(other))

    def __and__(self, other: AbstractSet[Any]) -> AbstractSet[T]:
        if not isinstance(other, LinkedSet):
            return frozenset(self).intersection(other)
        links = {id(link) for link in other._links()}
        rest = next((link for link in self._links() if id(link) in links), None)
        if rest is self or rest is other:
            return rest
        own, others = (frozenset(each) for each in (self, other))
        return LinkedSet(own & others, rest)

    def isdisjoint(self, other: Iterable[Any]) -> bool:
        """Whether no element is in both."""
        return _unlinked(self).isdisjoint(other)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({[*self]!r})"

    @classmethod
    def _from_iterable(cls, elements: Iterable[Any]) -> AbstractSet[Any]:
        return frozenset(elements)


@lru_cache(maxsize=32)  # few: each is as long as its tree is deep, and who asks for one element asks for more
def _unlinked(linked: LinkedSet[T]) -> frozenset[T]:
    return frozenset(linked)
