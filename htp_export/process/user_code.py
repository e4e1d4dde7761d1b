"""Calls of user code: factories, metrics, data. Its errors are marked as errors of user code.

A factory, ``package.module:factory``, is a function that is called without arguments.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from htp_export.errors import HtpExportError, ModelSourceError, UserCodeError, described

_T = TypeVar("_T")
_OWN = Path(__file__).parents[1]
_LIBRARIES = tuple(
    Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
# the files that user code has read
_files: ContextVar[set[str] | None] = ContextVar("_files", default=None)
_is_running: ContextVar[bool] = ContextVar("_is_running", default=False)


@contextlib.contextmanager
def user_code(name: str) -> Iterator[None]:
    """Mark errors of user code in a ``with`` block; ``name`` describes the code in the message.

    Raises:
        UserCodeError: If the code raises an error that is not one of htp_export; with the last line
            of user code that ran.

    Examples:
        >>> try:
        ...     with user_code("the metric"):
        ...         raise ValueError("no labels")
        ... except UserCodeError as error:
        ...     print(str(error).partition(" (")[0])
        the metric: raised ValueError: no labels
    """
    token = _is_running.set(True)
    try:
        yield
    except HtpExportError:
        raise
    except (Exception, SystemExit) as error:
        raise UserCodeError(name, f"raised {described(error, lines=2)}{_place(error)}") from error
    finally:
        _is_running.reset(token)


@contextlib.contextmanager
def noting_files() -> Iterator[None]:
    """Record the files that user code reads in a ``with`` block, for `is_read_by_user_code`.

    These are all files that Python opens, including imported modules. This installs an audit hook,
    which cannot be removed: it is for the command line, and not for the library.
    """
    _add_hook()
    token = _files.set(set())
    try:
        yield
    finally:
        _files.reset(token)


def is_read_by_user_code(file: Path) -> bool:
    """Return whether user code has read an existing file, under any name; False outside of `noting_files`."""
    for path in _files.get() or ():
        with contextlib.suppress(OSError, ValueError):
            if file.samefile(_source(path)):
                return True
    return False


def _source(path: str) -> str:
    """Return the source file of a compiled module; other paths are returned unchanged."""
    return importlib.util.source_from_cache(path) if path.endswith(".pyc") else path


@functools.cache
def _add_hook() -> None:
    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not _is_running.get():
            return
        files = _files.get()
        if files is None:
            return
        path, mode, _ = arguments
        is_read = not set(mode or "r") & set("wax+")
        if is_read and isinstance(path, str | os.PathLike):
            files.add(os.path.abspath(path))  # noqa: PTH100 - no method of pathlib, as those open files, too

    sys.addaudithook(note)


def iterated(items: Iterable[_T], name: str) -> Iterator[_T]:
    """Iterate over items of the caller, which user code may compute; see `user_code`."""
    with user_code(name):
        iterator = iter(items)
    while True:
        with user_code(name):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


def _place(error: BaseException) -> str:
    """Return the last line of user code that ran, for a message; that of a library if there is none."""
    last: traceback.FrameSummary | None = None
    last_of_user: traceback.FrameSummary | None = None
    for frame in traceback.extract_tb(error.__traceback__):
        if _is_below(frame.filename, (_OWN,)):
            continue
        last = frame
        if not _is_of_library(frame.filename):
            last_of_user = frame
    shown = last_of_user or last
    return f" ({shown.filename}:{shown.lineno}, in {shown.name})" if shown else ""


def _is_of_library(file: str) -> bool:
    if file.startswith("<frozen") or "site-packages" in file:
        return True
    return _is_below(file, _LIBRARIES)


def _is_below(file: str, folders: Iterable[Path]) -> bool:
    return any(Path(file).is_relative_to(folder) for folder in folders)


def names_factory(text: object) -> bool:
    """Return whether a text refers to a factory, and not to a file or folder.

    Examples:
        >>> names_factory("mypackage.data:runs"), names_factory("runs.npz"), names_factory("calibration/")
        (True, False, False)
    """
    if not isinstance(text, str) or ":" not in text or "\0" in text or text.endswith(".npz"):
        return False
    return not (os.path.isabs(text) or os.path.exists(text))  # noqa: PTH110, PTH117 - it may be no valid path


def factory_file(text: object) -> Path | None:
    """Return the file of the module in ``package.module:factory`` without importing it; None for other texts."""
    if not names_factory(text):
        return None
    module = Path(*str(text).partition(":")[0].split("."))
    files = (Path(f"{module}.py"), module / "__init__.py")
    places = (folder / file for folder in map(Path, ("", *sys.path)) for file in files)
    return next((file for file in places if os.path.isfile(file)), None)  # noqa: PTH113 - a text of any length


def _imported(module_name: str, entry: str) -> Any:
    """Import the module of a factory; an import inside of it that fails is an error of user code."""
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        missing = str(error.name)
        if missing != module_name and not module_name.startswith(f"{missing}."):
            raise
        raise ModelSourceError(
            entry, f"there is no module {missing!r} in this folder or on PYTHONPATH"
        ) from error


def call_factory(entry: str, seed: int = 0) -> Any:
    """Call ``package.module:factory``, and return its result. The current folder is searched first.

    Torch's generator is seeded for the call, and restored afterwards.

    Raises:
        ModelSourceError: If there is no such factory.
        UserCodeError: If it raises an error.
    """
    import torch

    factory = named_function(entry)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return factory()


def named_function(entry: str) -> Callable[..., Any]:
    """Return ``package.module:function`` without calling it. The current folder is searched first.

    Calls of it are calls of user code: errors are marked, and imports inside of it search the
    folder, too.

    Raises:
        ModelSourceError: If there is no such function.
        UserCodeError: If its module raises an error.
    """
    module_name, colon, attribute = entry.partition(":")
    if not (colon and module_name and attribute):
        raise ModelSourceError(entry, "an entry must be package.module:factory")
    if module_name.endswith(".py"):
        name = ".".join(Path(module_name).with_suffix("").parts)
        raise ModelSourceError(entry, f"an entry names a module, not its file: {name}:{attribute}")
    folder = os.fspath(Path.cwd())
    with _searched_first(folder), user_code(entry):
        module = _imported(module_name, entry)
        function = getattr(module, attribute, None)
        if not callable(function):
            raise ModelSourceError(entry, f"module {module_name!r} has no function {attribute!r}")

    def called(*args: Any, **kwargs: Any) -> Any:
        with _searched_first(folder), user_code(entry):
            return function(*args, **kwargs)

    return called


@contextlib.contextmanager
def _searched_first(folder: str) -> Iterator[None]:
    """Search a folder first for imports in a ``with`` block."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
