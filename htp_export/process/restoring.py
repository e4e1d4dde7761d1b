"""Temporary changes of process-wide state that are always reverted, also on errors and on a `KeyboardInterrupt`.

An interrupt can occur between any two lines: between a change and the ``try`` after it, in a ``finally``, and before a
``with`` block calls ``__exit__``. Two rules make sure that a single interrupt leaves nothing changed:

- How to revert a change is recorded before the change is made, and reverting a change that was not made has no effect.
- All changes are reverted in two nested ``finally`` clauses; the second one reverts what the first did not complete.
  The function with these clauses has no other ``try``: in CPython, an exception on the line of an inner ``try`` is
  handled by no clause of the same function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_NOTHING = object()


class Changes:
    """The changes so far, and how to revert them."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def will_undo(self, undo: Callable[[], object]) -> None:
        """Record how to revert a change, before it is made; ``undo`` may run without the change, and more than once."""
        self._undo.append(undo)

    def inner(self) -> Changes:
        """Return nested changes, which are reverted with these at the latest."""
        inner = Changes()
        self.will_undo(inner.take_back)
        return inner

    def take_back(self) -> None:
        """Revert all changes, the last one first."""
        while self._undo:
            self._undo[-1]()
            self._undo.pop()


@contextlib.contextmanager
def restored(make: Callable[[Changes], None]) -> Iterator[None]:
    """Make changes for the duration of a ``with`` block."""
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
    """Call a function while a lock is held. No method of the lock is implemented in Python: no interrupt is in them.

    The ``with`` block is on one line: a separate line for its end would be another place for an interrupt before the
    lock is released.
    """
    with lock: return do()  # fmt: skip  # noqa: E701


def set_variable(changes: Changes, variable: ContextVar[Any], value: Any) -> None:
    """Set a context variable. A token could not restore it, because it only exists after the variable is set."""
    before = variable.get()
    changes.will_undo(lambda: variable.set(before))
    variable.set(value)


def set_item(changes: Changes, mapping: MutableMapping[str, Any], key: str, value: Any) -> None:
    """Set an item of a mapping, such as ``vars(module)`` or ``os.environ``; one that was not there is removed again."""
    before = mapping.get(key, _NOTHING)

    def put_back() -> None:
        mapping.pop(key, None)
        if before is not _NOTHING:
            mapping[key] = before

    changes.will_undo(put_back)
    mapping[key] = value
