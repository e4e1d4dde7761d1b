"""Child processes that are forked while other threads run: these threads do not exist in the child, their locks do.

A lock that such a thread held at the fork is never released in the child, and the child would wait
for it for ever.
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
    """Register a function that every forked child process calls first; those registered earlier are called earlier."""
    if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
        os.register_at_fork(after_in_child=do)
    return do


class Mutex:
    """A lock of the threads of this process; a child process begins with a free one.

    It is reached as ``lock``, and has no methods of its own: an interrupt can occur in those
    (`restoring.locked`).
    """

    def __init__(self) -> None:
        self.renew()
        _all.add(self)

    def renew(self) -> None:
        """Replace the lock by a free one. The thread that forked releases the lock that it holds, if it holds one."""
        self.lock = threading.RLock()


_all: weakref.WeakSet[Mutex] = weakref.WeakSet()


@in_forked_child
def _renew_all() -> None:
    for mutex in list(_all):
        mutex.renew()
    for cached in _properties_with_locks():
        cached.lock = threading.RLock()


def _properties_with_locks() -> Iterator[Any]:
    """The cached properties of this package: before Python 3.12, each has a lock, held while a value is computed."""
    if sys.version_info >= (3, 12):
        return
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != _PACKAGE:
            continue
        for found in list(vars(module).values()):
            members = list(vars(found).values()) if isinstance(found, type) else []
            yield from (
                member for member in members if isinstance(member, functools.cached_property)
            )
