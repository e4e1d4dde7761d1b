"""Progress of long loops: completed items are counted, and reported to a listener if there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Listener: TypeAlias = Callable[[str, int, int], None]
"""Called with the plural noun for the items, the number of completed items, and the total."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def counted(items: Sequence[T], what: str) -> Iterator[T]:
    """Iterate over items, and report the progress to the listener of this context, if there is one.

    Of nested loops, only the outermost one is reported. ``what`` is a plural noun for the items.

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
def report_counts(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Provide a function that reports the number of completed items, for work without a loop over items.

    Examples:
        >>> with listening(lambda what, done, total: print(f"{done} of {total} {what}")):
        ...     with report_counts("trials", 2) as report:
        ...         report(1)
        1 of 2 trials
    """
    listener = _listener.get()

    def report(done: int) -> None:
        if listener is not None:
            listener(what, done, total)

    with listening(None):
        yield report


@contextlib.contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Report the progress in a ``with`` block, in this thread or task, to a listener; None suppresses it."""
    before = _listener.get()
    _listener.set(listener)
    try:
        yield
    finally:
        _listener.set(before)
