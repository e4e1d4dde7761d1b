"""Locks in child processes that are forked while other threads run.

The other threads do not exist in the child: a lock that one of them held at the fork is never
released, and the child would wait for it forever.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

_PACKAGE = __name__.partition(".")[0]

_Function = TypeVar("_Function", bound=Callable[[], None])


def in_forked_child(do: _Function) -> _Function:
    """Register a function that each forked child process calls first, in the order of registration."""
    if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
        os.register_at_fork(after_in_child=do)
    return do


class Mutex:
    """A lock of the threads of this process, which is free in a forked child process.

    Use its attribute ``lock``. It has no methods to acquire it, because an interrupt can occur in
    Python code (`restoring.locked`).
    """

    def __init__(self) -> None:
        self.renew()
        _all.add(self)

    def renew(self) -> None:
        """Replace the lock by a free one; the thread that forked can still release the lock that it holds."""
        self.lock = threading.RLock()


_all: weakref.WeakSet[Mutex] = weakref.WeakSet()


@in_forked_child
def _renew_all() -> None:
    for mutex in list(_all):
        mutex.renew()
    for cached in _properties_with_locks():
        cached.lock = threading.RLock()


def _properties_with_locks() -> Iterator[Any]:
    """Iterate over the cached properties of this package: before Python 3.12, each has a lock for its computation."""
    if sys.version_info >= (3, 12):
        return
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != _PACKAGE:
            continue
        for value in list(vars(module).values()):
            if not isinstance(value, type):
                continue
            for member in list(vars(value).values()):
                if isinstance(member, functools.cached_property):
                    yield member
