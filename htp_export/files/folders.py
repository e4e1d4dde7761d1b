"""Folders as outputs: checked, created, filled and replaced. Files of other origin are never removed."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from htp_export.errors import FileError
from htp_export.files.filesystem import why_not_writable
from htp_export.files.write_file import (
    Move,
    WorkFolder,
    clear_killed,
    foreign_entry,
    is_work_folder,
    removed_on_failure,
    work_folder,
)


def check_folder(folder: Path, what: str, is_ours: Callable[[str], bool]) -> None:
    """Refuse a folder that cannot be written, or that contains files of other origin.

    ``what`` describes the contents, such as ``"a partition"``; ``is_ours`` returns whether a
    relative path is a file of such a folder.
    """
    _check_is_folder(folder, what)
    _check_files(folder, what, is_ours)
    _check_writable(folder, folder)


def check_whole_folder(folder: Path, what: str, earlier: Collection[str]) -> None:
    """Refuse a folder that `whole_folder` cannot replace, or that contains files of other origin.

    ``what`` describes the contents, such as ``"a partition"``; ``earlier``: the relative paths of
    the files that an earlier run wrote.
    """
    _check_is_folder(folder, what)
    if is_filled(folder):
        _check_writable(folder, folder)
        return
    _check_writable(folder, folder.absolute().parent)
    if not folder.is_dir():
        return
    _check_files(folder, what, earlier.__contains__)
    foreign = foreign_entry(folder, earlier)  # an empty folder, or a mounted file system
    if foreign is not None:
        raise _foreign(folder, foreign, what)
    if os.path.ismount(folder):
        raise FileError(folder, f"{_MOUNTED}; empty it, or name a folder in it")


_MOUNTED = "is a mount point with files, which cannot be replaced"


def _check_is_folder(folder: Path, what: str) -> None:
    if os.path.lexists(folder) and not folder.is_dir():
        raise FileError(folder, f"is a file; name a folder for {what}")
    if folder.is_dir():
        clear_killed(folder)


def _check_files(folder: Path, what: str, is_ours: Callable[[str], bool]) -> None:
    for name in _files_in(folder):  # a generator: a folder of other origin may be large
        if not is_ours(name):
            raise _foreign(folder, name, what)


def _foreign(folder: Path, name: str, what: str) -> FileError:
    return FileError(
        folder, f"contains {name!r}, which does not belong to {what}; name an empty or a new folder"
    )


def _check_writable(folder: Path, parent: Path) -> None:
    """Refuse a folder if no file can be created in ``parent``, or in its nearest ancestor that exists."""
    parent = parent.absolute()
    existing = next(path for path in (parent, *parent.parents) if path.exists())
    error = why_not_writable(existing)
    if error is not None:
        raise FileError(folder, f"cannot be written: {error.strerror}: {existing}") from error


def is_filled(folder: Path) -> bool:
    """Return whether `whole_folder` fills a folder instead of replacing it: it exists and has no files."""
    return folder.is_dir() and next(_files_in(folder), None) is None


def _files_in(folder: Path) -> Iterator[str]:
    """Yield the relative paths of files, links, pipes and devices in a folder."""
    for parent, folders, files in os.walk(folder):
        # work folders are those of another process, which still writes or was killed
        if Path(parent) == folder:
            folders[:] = [name for name in folders if not is_work_folder(name)]
        links = [name for name in folders if Path(parent, name).is_symlink()]
        for name in (*sorted(files), *links):
            yield Path(parent, name).relative_to(folder).as_posix()


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Create a folder and its missing ancestors for a ``with`` block.

    If the block fails and the folder is new, the files that were renamed into it are removed, and
    then the new folders that are empty. A folder that existed keeps all of its files.
    """
    is_new = not folder.exists()
    with _created(folder), removed_on_failure(folder) if is_new else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _created(folder: Path) -> Iterator[None]:
    """Create a folder and its missing ancestors; if the ``with`` block fails, the empty ones are removed."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for path in missing:
            with contextlib.suppress(OSError):  # it is not empty, or was not created
                path.rmdir()
        raise


@contextlib.contextmanager
def whole_folder(
    folder: Path, earlier: Callable[[Path], Collection[str]], last: str
) -> Iterator[Path]:
    """Provide a temporary folder to write to, which then replaces ``folder``: completely or not at all.

    A folder with files of an earlier run is replaced. A folder without files, which may be a mount
    point, is filled. An `OSError` if this is not possible; then nothing has changed.

    Args:
        folder: The target.
        earlier: Returns the relative paths of the files in a folder that an earlier run wrote.
        last: The relative path of the file that is renamed last if the folder is filled, because it
            refers to the other files.
    """
    fills = is_filled(folder)
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    with work_folder(folder / last if fills else folder) as work:
        new = work.new / folder.absolute().name
        new.mkdir()
        yield new
        if fills:
            _fill(work, new, folder, last)
        elif os.path.ismount(folder):
            raise OSError(errno.EBUSY, _MOUNTED, os.fspath(folder))
        else:
            work.commit([Move(new, folder, free=not folder.is_dir(), earlier=earlier)])


def _fill(work: WorkFolder, new: Path, folder: Path, last: str) -> None:
    files = [path for path in new.rglob("*") if not path.is_dir()]
    names = sorted(path.relative_to(new).as_posix() for path in files)
    names.sort(key=lambda name: name == last)
    with contextlib.ExitStack() as new_folders:
        for name in names:
            new_folders.enter_context(_created((folder / name).parent))
        work.commit([Move(new / name, folder / name, free=True) for name in names])
