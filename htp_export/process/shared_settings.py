"""Settings of torch that all threads share, changed for a while and put back by the last user."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from htp_export.process.restoring import Changes, locked


class SharedSetting:
    """A setting of torch that all threads share: it has the value that is needed while anyone needs it."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], object], needed: Callable[[], Any]) -> None:
        self._read, self._write, self._needed = read, write, needed
        self._lock = threading.Lock()
        self._users: set[object] = set()
        self._before: Any = None

    def hold(self, changes: Changes) -> None:
        """Give it the value until the changes are taken back; the last user puts back what the first one found."""
        user = object()
        changes.will_undo(functools.partial(locked, self._lock, functools.partial(self._leave, user)))
        locked(self._lock, functools.partial(self._enter, user))

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
