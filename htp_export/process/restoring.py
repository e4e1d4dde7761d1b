"""Temporary changes of process-wide state that are always reverted, also on errors and on a `KeyboardInterrupt`.

An interrupt can occur between any two lines, also in a ``finally``. Therefore, how to revert a
change is recorded before the change is made (reverting one that was not made has no effect), and
all are reverted in two nested ``finally`` clauses, the second for what the first did not complete.
The function with these has no other ``try``: in CPython, an exception on the line of an inner
``try`` is handled by no clause of the same function.

A child process that is forked while another thread has made changes reverts them at once: that
thread does not exist in the child, and would never do it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeVar

from htp_export.process.forking import Mutex, in_forked_child

_Result = TypeVar("_Result")
_NOTHING = object()


class Changes:
    """The changes so far, and how to revert them.

    ``shared``: several threads need them, each with changes of its own whose end reverts these.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self._undo: list[tuple[Callable[[], object], bool]] = []
        self._thread = None if shared else threading.get_ident()
        self._number = next(_numbers)
        _all_changes.add(self)

    def will_undo(self, undo: Callable[[], object], *, of_thread: bool = False) -> None:
        """Record how to revert a change, before it is made; ``undo`` may run without the change, and more than once.

        ``of_thread``: the change concerns this thread alone, as that of a context variable does.
        """
        self._undo.append((undo, of_thread))

    def inner(self) -> Changes:
        """Return nested changes, which are reverted with these at the latest."""
        inner = Changes()
        self.will_undo(inner.take_back)
        return inner

    def take_back(self) -> None:
        """Revert all changes, the last one first."""
        while self._undo:
            self._undo[-1][0]()
            self._undo.pop()

    def take_back_without_thread(self) -> None:
        """Revert the changes, except those of their thread, which does not exist any more; errors are ignored."""
        while self._undo:
            undo, of_thread = self._undo.pop()
            if not of_thread:
                with contextlib.suppress(Exception):
                    undo()


_numbers = itertools.count()
_all_changes: weakref.WeakSet[Changes] = weakref.WeakSet()


@in_forked_child
def _take_back_changes_of_other_threads() -> None:
    others = [each for each in _all_changes if each._thread not in (None, threading.get_ident())]
    for changes in sorted(others, key=lambda each: each._number, reverse=True):
        changes.take_back_without_thread()


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

    The ``with`` block is on one line: a separate line for its end would be another place for an
    interrupt before the lock is released.
    """
    with lock: return do()  # fmt: skip  # noqa: E701


def set_variable(changes: Changes, variable: ContextVar[Any], value: Any) -> None:
    """Set a context variable. A token could not restore it, because it only exists after the variable is set."""
    before = variable.get()
    changes.will_undo(lambda: variable.set(before), of_thread=True)
    variable.set(value)


def set_attribute(changes: Changes, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of an object that has it."""
    changes.will_undo(functools.partial(setattr, owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def set_item(changes: Changes, mapping: MutableMapping[str, Any], key: str, value: Any) -> None:
    """Set an item of a mapping, such as ``vars(module)`` or ``os.environ``; one that was not there is removed again."""
    before = mapping.get(key, _NOTHING)

    def put_back() -> None:
        mapping.pop(key, None)
        if before is not _NOTHING:
            mapping[key] = before

    changes.will_undo(put_back)
    mapping[key] = value


def enter(
    changes: Changes, context: AbstractContextManager[Any], *, of_thread: bool = False
) -> None:
    """Enter a context manager, which is left when the changes are reverted; ``of_thread`` as of `Changes.will_undo`."""
    entered: list[bool] = []
    changes.will_undo(
        lambda: context.__exit__(None, None, None) if entered and entered.pop() else None,
        of_thread=of_thread,
    )
    context.__enter__()
    entered.append(True)


class SharedSetting:
    """A setting of torch that all threads share: it has the value that is needed while anyone needs it."""

    def __init__(
        self, read: Callable[[], Any], write: Callable[[Any], object], needed: Callable[[], Any]
    ) -> None:
        self._read, self._write, self._needed = read, write, needed
        self._mutex = Mutex()
        self._users: set[object] = set()
        self._before: Any = None

    def hold(self, changes: Changes) -> None:
        """Give it the value until the changes are taken back; the last user puts back what the first one found."""
        user = object()
        changes.will_undo(lambda: locked(self._mutex.lock, functools.partial(self._leave, user)))
        locked(self._mutex.lock, functools.partial(self._enter, user))

    def _enter(self, user: object) -> None:
        if not self._users:
            self._before = self._read()
        self._users.add(user)
        self._write(self._needed())

    def _leave(self, user: object) -> None:
        if self._users == {user}:
            self._write(self._before)
        self._users.discard(user)


def _attention() -> Any:
    from torch.backends import mha

    return mha


_FAST_PATH = SharedSetting(
    lambda: _attention().get_fastpath_enabled(),
    lambda enabled: _attention().set_fastpath_enabled(enabled),
    lambda: False,
)


def turn_attention_fast_path_off(changes: Changes) -> None:
    """Run ``nn.MultiheadAttention`` and ``nn.TransformerEncoder`` in their plain form, which ONNX can express."""
    _FAST_PATH.hold(changes)


# allocations minus deallocations that trigger a collection of the youngest generation
_OBJECTS = 70_000


def no_collection(*, kept: bool = False) -> contextlib.AbstractContextManager[None]:
    """Suspend cyclic garbage collection: bulk allocation would trigger full collections.

    A full collection visits every object of the process and takes a quarter of a second with
    transformers loaded. A trace of an export creates few cycles, and a profile is read in a third
    of the time. If the objects that are created inside are ``kept`` alive, they are moved into the
    oldest generation.
    """
    return restored(functools.partial(hold_collection, kept=kept))


def hold_collection(changes: Changes, *, kept: bool = False) -> None:
    """Do the same until the changes are reverted."""
    running, kept = gc.isenabled(), kept and not gc.get_freeze_count()

    def go_on() -> None:
        if running:
            if kept:
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()

    changes.will_undo(go_on)
    gc.disable()


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Run the garbage collector about a hundred times less often, for a program that imports much and then ends.

    Importing torch and exporting a small model creates about a million objects that stay alive.
    Visiting them with Python's own thresholds takes 0.8 s of 6 s of processor time.
    """
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
