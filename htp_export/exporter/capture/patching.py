"""Patches of torch and onnx_ir: wrappers that replace functions temporarily."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from htp_export.errors import InputError, TorchChangedError
from htp_export.process.forking import Mutex
from htp_export.process.restoring import Changes, locked


@dataclass(frozen=True)
class Patch:
    """A place in a package, and the wrapper to put there."""

    module: str
    name: str
    wrap: Callable[[Any], Any]

    def find(self) -> tuple[Any, str, Any]:
        """The object that has the attribute, the attribute's name, and its current value."""
        try:
            owner: Any = importlib.import_module(self.module)
            *path, last = self.name.split(".")
            for part in path:
                owner = getattr(owner, part)
            return owner, last, getattr(owner, last)
        except (ImportError, AttributeError) as error:
            if isinstance(error, ModuleNotFoundError):
                self._refuse_without_dependency(error)
            raise TorchChangedError(f"{self.module}.{self.name}") from error

    def _refuse_without_dependency(self, error: ModuleNotFoundError) -> None:
        """Raise an `InputError` if the missing module is of another package, which torch needs."""
        package = str(error.name).partition(".")[0]
        if package != self.module.partition(".")[0]:
            raise InputError(
                f"{self.module} needs {package}, which is not installed: pip install {package}"
            ) from error


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Creates the wrapper of a function."""


def replacing(instead: Callable[..., Any]) -> Wrap:
    """Create wrappers that call ``instead`` with the function and its arguments.

    They add a frame. Functions that are on the stack of every traced operation have wrappers
    without one.
    """

    @functools.wraps(instead)
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return instead(original, *args, **kwargs)

        return wrapper

    return wrap


def noting(
    running: ContextVar[Any],
    seam: str,
    method: str,
    place: int | None = None,
) -> Wrap:
    """Create the wrapper of a function whose result is passed to a method of the running capture.

    ``seam`` names the step, for an error; ``place`` is the position of the argument that is passed
    before the result, if any.
    """
    find = attrgetter(method)

    @replacing
    def note(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        capture = running.get()
        if capture is not None:
            record = find(capture)
            if place is None:
                capture.step(seam, record, result)
            else:
                capture.step(seam, record, args[place], result)
        return result

    return note


class Patches:
    """Patches that are applied together for the first user, and removed after the last one.

    ``optional``: one that cannot be applied is left out.
    ``lasting``: the wrappers have no state of one export, and are used again for the next one.
    """

    def __init__(self, *patches: Patch, optional: bool = False, lasting: bool = False) -> None:
        self.patches = patches
        self._optional = optional
        self._lasting = lasting
        # place → the function there when it was last replaced, and its wrapper
        self._wrappers: dict[Patch, tuple[Any, Any]] = {}
        self._mutex = Mutex()
        self._users: set[object] = set()
        self._changes = Changes(shared=True)

    def hold(self, changes: Changes) -> None:
        """Keep the patches applied until the changes are undone.

        Raises a `TorchChangedError` if one cannot be applied that is not optional.
        """
        user = object()
        changes.will_undo(lambda: locked(self._mutex.lock, functools.partial(self._leave, user)))
        locked(self._mutex.lock, functools.partial(self._enter, user))

    def _enter(self, user: object) -> None:
        if not self._users:
            # patches of another thread, interrupted before it was a user
            self._changes.take_back()
            self._put_in()
        self._users.add(user)

    def _leave(self, user: object) -> None:
        self._users.discard(user)
        if not self._users:
            self._changes.take_back()

    def _wrapper(self, patch: Patch, original: Any) -> Any:
        wrapped, wrapper = self._wrappers.get(patch, (None, None))
        if wrapped is not original:
            wrapper = patch.wrap(original)
            if self._lasting:
                self._wrappers[patch] = original, wrapper
        return wrapper

    def _put_in(self) -> None:
        """Apply all of them, or none, or those that can be applied; after an interrupt, `_leave` removes the rest."""
        for patch in self.patches:
            try:
                self._apply(patch)
            except TorchChangedError:
                if self._optional:
                    continue
                self._changes.take_back()
                raise

    def _apply(self, patch: Patch) -> None:
        owner, name, original = patch.find()
        own = vars(owner).get(name, original)  # getattr unwraps a static method
        put_back = functools.partial(setattr, owner, name, own)
        if isinstance(owner, type) and name not in vars(owner):
            put_back = functools.partial(_inherit_again, owner, name)
        try:
            wrapper = self._wrapper(patch, original)
            # raises if the attribute cannot be set: then there is nothing to undo
            setattr(owner, name, own)
        except Exception as error:
            raise TorchChangedError(f"{patch.module}.{patch.name}", "is not what it was") from error
        self._changes.will_undo(put_back)
        setattr(owner, name, wrapper)


def _inherit_again(owner: type, name: str) -> None:
    """Remove a method from a class that inherits it; more than once without an error."""
    if name in vars(owner):
        delattr(owner, name)
