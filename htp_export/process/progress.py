"""How far long work has come: loops count what they have done, and a program that wants to show it listens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import TypeAlias, TypeVar

__all__ = ["Listener", "counted", "listening"]

T = TypeVar("T")
Listener: TypeAlias = Callable[[str, int, int], None]
"""Takes what is counted, in the plural, how many of them are done, and how many there are."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def counted(items: Sequence[T], what: str) -> Iterator[T]:
    """Give items one by one, and tell the listener of this context how many are done.

    Only the outermost of loops within each other is told of. Without a listener, this is ``iter``.

    Args:
        items: The items.
        what: What they are, in the plural.

    Examples:
        >>> with listening(lambda what, done, total: print(f"{done} of {total} {what}")):
        ...     sum(counted([3, 4], "modules"))
        0 of 2 modules
        1 of 2 modules
        2 of 2 modules
        7
    """
    listener = _listener.get()
    if listener is None or not items:
        yield from items
        return
    with listening(None):
        for done, item in enumerate(items):
            listener(what, done, len(items))
            yield item
        listener(what, len(items), len(items))


@contextlib.contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Tell a listener of all that is counted inside, in this thread or task; None tells nobody.

    Args:
        listener: What is called.
    """
    before = _listener.get()
    _listener.set(listener)
    try:
        yield
    finally:
        _listener.set(before)
