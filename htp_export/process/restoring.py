"""Temporary changes of process-wide state that are always reverted, also on errors and on a `KeyboardInterrupt`.

An interrupt can occur between any two lines, also in a ``finally``. Therefore, the function that
reverts a change is recorded before the change (without the change, it has no effect), and all
changes are reverted in two nested ``finally`` clauses, the second one in case the first was
interrupted. The function with these clauses has no other ``try``: in CPython, no clause of the same
function handles an exception on the line of an inner ``try``.

A child process that is forked while another thread has changes reverts these at once: that thread
does not exist in the child, and cannot revert them.
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
    """A stack of changes that can be reverted.

    ``shared``: several threads need these changes, and the last thread reverts them.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self._undo: list[tuple[Callable[[], object], bool]] = []
        self._thread = None if shared else threading.get_ident()
        self._number = next(_numbers)
        _all_changes.add(self)

    def will_undo(self, undo: Callable[[], object], *, of_thread: bool = False) -> None:
        """Record a function that reverts the next change; it may run without the change, and more than once.

        ``of_thread``: the change affects only this thread, such as that of a context variable.
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
        """Revert the changes except those that affect only their thread, which does not exist; ignore errors."""
        while self._undo:
            undo, of_thread = self._undo.pop()
            if not of_thread:
                with contextlib.suppress(Exception):
                    undo()


_numbers = itertools.count()
_all_changes: weakref.WeakSet[Changes] = weakref.WeakSet()


@in_forked_child
def _take_back_changes_of_other_threads() -> None:
    own_threads = (None, threading.get_ident())
    others = [changes for changes in _all_changes if changes._thread not in own_threads]
    others.sort(key=lambda changes: changes._number, reverse=True)
    for changes in others:
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
    """Call a function while a lock is held; the methods of the lock must not be written in Python.

    An interrupt could occur in them. The ``with`` block is on one line, because an interrupt could
    also occur at a separate line at its end, before the lock is released.
    """
    with lock: return do()  # fmt: skip  # noqa: E701


def set_variable(changes: Changes, variable: ContextVar[Any], value: Any) -> None:
    """Set a context variable; not restored by its token, which would not exist if an interrupt follows the change."""
    before = variable.get()
    changes.will_undo(lambda: variable.set(before), of_thread=True)
    variable.set(value)


def set_attribute(changes: Changes, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of an object that has it."""
    changes.will_undo(functools.partial(setattr, owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def set_item(changes: Changes, mapping: MutableMapping[str, Any], key: str, value: Any) -> None:
    """Set an item of a mapping, such as ``vars(module)`` or ``os.environ``; a new item is removed again."""
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
    """Enter a context manager, and exit it when the changes are reverted; ``of_thread`` as in `Changes.will_undo`."""
    entered: list[bool] = []
    # one expression: between two lines, an interrupt could occur
    changes.will_undo(
        lambda: context.__exit__(None, None, None) if entered and entered.pop() else None,
        of_thread=of_thread,
    )
    context.__enter__()
    entered.append(True)


class SharedSetting:
    """A global setting that has another value while at least one thread needs it.

    ``read`` and ``write`` access the setting; ``needed`` returns the other value.
    """

    def __init__(
        self, read: Callable[[], Any], write: Callable[[Any], object], needed: Callable[[], Any]
    ) -> None:
        self._read, self._write, self._needed = read, write, needed
        self._mutex = Mutex()
        self._users: set[object] = set()
        self._before: Any = None

    def hold(self, changes: Changes) -> None:
        """Change the setting until the changes are reverted; the last user restores the original value."""
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
    """Disable the fused operators of ``nn.MultiheadAttention`` and ``nn.TransformerEncoder``, which ONNX lacks."""
    _FAST_PATH.hold(changes)


# allocations minus deallocations that trigger a collection of the youngest generation
_OBJECTS = 70_000


def no_collection(*, kept: bool = False) -> contextlib.AbstractContextManager[None]:
    """Suspend cyclic garbage collection: bulk allocation would trigger full collections.

    A full collection visits every object of the process, which takes a quarter of a second with
    transformers loaded. A trace of an export creates few cycles, and a profile is read in a third
    of the time. ``kept``: move the new objects into the oldest generation, because they stay alive.
    """
    return restored(functools.partial(hold_collection, kept=kept))


def hold_collection(changes: Changes, *, kept: bool = False) -> None:
    """Suspend garbage collection until the changes are reverted; see `no_collection`."""
    was_enabled = gc.isenabled()

    def enable_again() -> None:
        if not was_enabled:
            return
        # few new objects are visited fast
        many_objects = gc.get_count()[0] > _OBJECTS
        if kept and many_objects and not _has_frozen_objects():
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        gc.enable()

    changes.will_undo(enable_again)
    gc.disable()


def _has_frozen_objects() -> bool:
    """Whether the user left objects out of collection; Python counts them one by one."""
    return gc.get_freeze_count() > 0


_collections = 0  # full collections of the process when objects were last kept


def keep_objects(changes: Changes) -> None:
    """Leave the present objects out of garbage collection until the changes are reverted.

    Full collections during an export visit a million objects of imported packages otherwise. They
    are reverted into the oldest generation. Between two calls, there is at least one full
    collection, so that garbage of an earlier export does not stay.
    """
    global _collections
    if not gc.isenabled() or _has_frozen_objects():
        return
    if _collections and _collections == _full_collections():
        gc.collect()
    _collections = _full_collections()
    changes.will_undo(gc.unfreeze)
    gc.freeze()


def _full_collections() -> int:
    return int(gc.get_stats()[-1]["collections"]) + 1


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Run the garbage collector about a hundred times less often, for a program that imports much and then exits.

    Importing torch and exporting a small model creates about a million objects that stay alive.
    With Python's default thresholds, visiting them takes 0.8 s of 6 s of processor time.
    """
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
