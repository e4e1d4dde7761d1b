"""Putting wrappers in place of parts of torch and onnx_ir, and taking them out again."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from htp_export.errors import TorchChangedError


@dataclass(frozen=True)
class Patch:
    """A place in a package, and the wrapper that goes there."""

    module: str
    name: str
    wrap: Callable[[Any], Any]

    def find(self) -> tuple[Any, str, Any]:
        """The object that has the attribute, the attribute's name, and what is there now."""
        try:
            owner: Any = importlib.import_module(self.module)
            *path, last = self.name.split(".")
            for part in path:
                owner = getattr(owner, part)
            return owner, last, getattr(owner, last)
        except (ImportError, AttributeError) as error:
            raise TorchChangedError(f"{self.module}.{self.name}") from error

    def wrapped(self, original: Any) -> Any:
        """The wrapper of what is there now."""
        with self.problems("is not what it was"):
            return self.wrap(original)

    @contextlib.contextmanager
    def problems(self, said: str) -> Iterator[None]:
        """Turn any error into a `TorchChangedError` that names the place."""
        try:
            yield
        except Exception as error:
            raise TorchChangedError(f"{self.module}.{self.name}", said) from error


class Patches:
    """Patches that go in together when the first user comes, and out when the last one leaves."""

    def __init__(self, *patches: Patch) -> None:
        self.patches = patches
        self._lock = threading.RLock()
        self._users = 0
        self._undo: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the patches in place.

        Raises:
            TorchChangedError: A place is gone, or cannot be wrapped; none of the patches is in.
        """
        with self._lock:
            if self._users == 0:
                self._put_in()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._take_out()

    def _put_in(self) -> None:
        """All of them, or none: wrappers are made first, as a wrapper may not fit what is there."""
        places = [patch.find() for patch in self.patches]
        wrapped = [patch.wrapped(original) for patch, (_, _, original) in zip(self.patches, places, strict=True)]
        try:
            for patch, (owner, name, original), wrapper in zip(self.patches, places, wrapped, strict=True):
                own = vars(owner).get(name, original)  # a static method is not what getattr gives
                with patch.problems("cannot be replaced"):
                    setattr(owner, name, wrapper)
                self._undo.append(functools.partial(setattr, owner, name, own))
        except BaseException:
            self._take_out()
            raise

    def _take_out(self) -> None:
        while self._undo:
            self._undo.pop()()
