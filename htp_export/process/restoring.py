"""Changes to what the whole process shares, taken back whatever happens: on errors, and on a `KeyboardInterrupt` too.

An interrupt can come between any two lines, also between a change and the ``try`` after it, in a ``finally``, and right
before a ``with`` block calls ``__exit__``. So that one interrupt leaves nothing changed:

- how a change is taken back is noted before the change is made, and taking back what was not changed does no harm;
- everything is taken back twice, in two nested ``finally`` clauses; what the first one finished is not there any more
  for the second. There is no other ``try`` in the function that has these two: in CPython, an exception on the line
  of an inner ``try`` is handled by no clause of the same function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeVar

__all__ = ["Changes", "locked", "restored", "set_variable"]

_Result = TypeVar("_Result")


class Changes:
    """What was changed, and how to take it back.

    Examples:
        >>> import gc
        >>> changes = Changes()
        >>> try:
        ...     try:
        ...         changes.will_undo(gc.enable)
        ...         gc.disable()
        ...     finally:
        ...         changes.take_back()
        ... finally:
        ...     changes.take_back()
        >>> gc.isenabled()
        True
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def will_undo(self, undo: Callable[[], object]) -> None:
        """Note how a change is taken back, before it is made.

        Args:
            undo: Takes it back. It may run without the change, and more than once.
        """
        self._undo.append(undo)

    def inner(self) -> Changes:
        """Changes that are taken back earlier; with these at the latest."""
        inner = Changes()
        self.will_undo(inner.take_back)
        return inner

    def take_back(self) -> None:
        """Undo every change, the last one first."""
        while self._undo:
            self._undo[-1]()
            self._undo.pop()


@contextlib.contextmanager
def restored(make: Callable[[Changes], None]) -> Iterator[None]:
    """Make changes that hold inside a ``with`` block.

    Args:
        make: Makes them.
    """
    changes = Changes()
    try:
        try:
            make(changes)
            yield
        finally:
            changes.take_back()
    finally:
        changes.take_back()


def locked(lock: AbstractContextManager[Any], do: Callable[[], _Result]) -> _Result:
    """Do something while a lock is held.

    All on one line: a line of its own for the end of the ``with`` block is one more place for an interrupt, before the
    lock is released.

    Args:
        lock: The lock. Its methods are not written in Python, where an interrupt could come.
        do: What is done.
    """
    with lock: return do()  # fmt: skip  # noqa: E701


def set_variable(changes: Changes, variable: ContextVar[Any], value: Any) -> None:
    """Set a context variable; a token cannot put it back, as it is not there before the variable is set."""
    before = variable.get()
    changes.will_undo(lambda: variable.set(before))
    variable.set(value)
