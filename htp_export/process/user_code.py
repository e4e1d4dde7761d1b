"""Code of the caller that htp_export calls: factories, metrics, data. What it raises is said to be its own.

A factory is named as ``package.module:factory``: a function that is called without arguments.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
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
# that code of the caller has read
_files: ContextVar[set[str] | None] = ContextVar("_files", default=None)
_is_running: ContextVar[bool] = ContextVar("_is_running", default=False)


@contextlib.contextmanager
def user_code(name: str) -> Iterator[None]:
    """Call code of the caller inside a ``with`` block; ``name`` says in the message what is called.

    Raises:
        UserCodeError: If it raises anything but an error of htp_export; with the line of it that
            ran last.

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
    """Note the files that code of the caller reads, for `is_read_by_user_code`, in a ``with`` block.

    These are files that Python opens, modules that it imports among them. It needs an audit hook,
    which a process keeps until it ends: for the command line, not for the library.
    """
    _add_hook()
    token = _files.set(set())
    try:
        yield
    finally:
        _files.reset(token)


def is_read_by_user_code(file: Path) -> bool:
    """Whether code of the caller has read an existing file, under whatever name; no where nothing is noted."""
    for path in _files.get() or ():
        with contextlib.suppress(OSError, ValueError):
            if file.samefile(_source(path)):
                return True
    return False


def _source(path: str) -> str:
    """The source of a compiled module; other files are their own."""
    return importlib.util.source_from_cache(path) if path.endswith(".pyc") else path


@functools.cache
def _add_hook() -> None:
    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not _is_running.get() or (files := _files.get()) is None:
            return
        path, mode, _ = arguments
        if isinstance(path, str | os.PathLike) and not set(mode or "r") & set("wax+"):
            files.add(os.path.abspath(path))  # noqa: PTH100 - no method of pathlib, as those open files, too

    sys.addaudithook(note)


def iterated(items: Iterable[_T], name: str) -> Iterator[_T]:
    """Iterate over what the caller gave, whose items may be computed by code of the caller; see `user_code`."""
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
    """The last line of the caller's own code that ran; of a library, if there is none."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not _is_below(frame.filename, (_OWN,))
    ]
    own = [
        frame
        for frame in frames
        if not (frame.filename.startswith("<frozen") or "site-packages" in frame.filename)
        and not _is_below(frame.filename, _LIBRARIES)
    ]
    last = next(reversed(own or frames), None)
    return f" ({last.filename}:{last.lineno}, in {last.name})" if last else ""


def _is_below(file: str, folders: Iterable[Path]) -> bool:
    return any(Path(file).is_relative_to(folder) for folder in folders)


def names_factory(text: object) -> bool:
    """Whether a text names a factory, and no file or folder.

    Examples:
        >>> names_factory("mypackage.data:runs"), names_factory("runs.npz"), names_factory("calibration/")
        (True, False, False)
    """
    if not isinstance(text, str) or ":" not in text or "\0" in text or text.endswith(".npz"):
        return False
    return not (os.path.isabs(text) or os.path.exists(text))  # noqa: PTH110, PTH117 - a text need be no path


def factory_file(text: object) -> Path | None:
    """The file of the module in ``package.module:factory``, which is not imported; None for other words."""
    if not names_factory(text):
        return None
    module = Path(*str(text).partition(":")[0].split("."))
    files = (Path(f"{module}.py"), module / "__init__.py")
    places = (folder / file for folder in map(Path, ("", *sys.path)) for file in files)
    return next((file for file in places if os.path.isfile(file)), None)  # noqa: PTH113 - a text of any length


def call_factory(entry: str, seed: int = 0) -> Any:
    """What ``package.module:factory`` returns. The current folder is looked in first.

    Torch's generator starts from the seed while the factory runs, and is as it was afterwards.

    Raises:
        ModelSourceError: If there is no such factory.
        UserCodeError: If it raises.
    """
    import torch

    module_name, colon, attribute = entry.partition(":")
    if not (colon and module_name and attribute):
        raise ModelSourceError(entry, "an entry is package.module:factory")
    if module_name.endswith(".py"):
        name = ".".join(Path(module_name).with_suffix("").parts)
        raise ModelSourceError(entry, f"an entry names a module, not its file: {name}:{attribute}")
    folder = os.fspath(Path.cwd())
    sys.path.insert(0, folder)
    try:
        with user_code(entry):
            module = import_module(module_name)
            factory = getattr(module, attribute, None)
            if not callable(factory):
                raise ModelSourceError(
                    entry, f"module {module_name!r} has no function {attribute!r}"
                )
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                return factory()
    finally:
        sys.path.remove(folder)
