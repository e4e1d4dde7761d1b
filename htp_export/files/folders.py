"""Folders that are written: checked, made, filled, and replaced. What lies in them and is of others stays."""

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
    """Refuse a folder that cannot be written, or that holds other files than an earlier one of its kind.

    ``what`` it is to hold: ``"a partition"``; ``is_ours``: whether a file of such a folder has this
    path in it.
    """
    _check_is_folder(folder, what)
    _check_files(folder, what, is_ours)
    _check_writable(folder, folder)


def check_whole_folder(folder: Path, what: str, earlier: Collection[str]) -> None:
    """Refuse a folder that `whole_folder` cannot write: it would not be able to, or would remove what is of others.

    ``what`` it is to hold: ``"a partition"``; ``earlier``: the files of an earlier one, by their
    paths in the folder.
    """
    _check_is_folder(folder, what)
    if is_filled(folder):
        _check_writable(folder, folder)
        return
    _check_writable(folder, folder.absolute().parent)
    if not folder.is_dir():
        return
    _check_files(folder, what, earlier.__contains__)
    foreign = foreign_entry(folder, earlier)  # an empty folder, or what is mounted
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
    for name in _files_in(folder):  # one by one: the folder may be a large one of somebody else's
        if not is_ours(name):
            raise _foreign(folder, name, what)


def _foreign(folder: Path, name: str, what: str) -> FileError:
    return FileError(
        folder, f"holds {name!r}, which is not of {what}; name an empty or a new folder"
    )


def _check_writable(folder: Path, place: Path) -> None:
    """Refuse a folder if nothing can be written into the place, or into the nearest folder above it that exists."""
    place = place.absolute()
    existing = next(each for each in (place, *place.parents) if each.exists())
    error = why_not_writable(existing)
    if error is not None:
        raise FileError(folder, f"cannot be written: {error.strerror}: {existing}") from error


def is_filled(folder: Path) -> bool:
    """Whether `whole_folder` fills a folder, which exists and has no files, in place of replacing it."""
    return folder.is_dir() and next(_files_in(folder), None) is None


def _files_in(folder: Path) -> Iterator[str]:
    """The paths of files, links, pipes and devices in a folder."""
    for inside, folders, files in os.walk(folder):
        if Path(inside) == folder:  # another process writes into it, or was killed there
            folders[:] = [name for name in folders if not is_work_folder(name)]
        linked = (name for name in folders if Path(inside, name).is_symlink())
        for name in (*sorted(files), *linked):
            yield Path(inside, name).relative_to(folder).as_posix()


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Make a folder, and those above it, for a ``with`` block.

    If the block fails and the folder was made, the files that were put into it are removed, and it
    and those above it if nobody else has put anything into them. One that existed keeps all of its
    files.
    """
    is_new = not folder.exists()
    with _made(folder), removed_on_failure(folder) if is_new else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make a folder, and those above it; those that are empty are removed again if the ``with`` block fails."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for each in missing:
            with contextlib.suppress(OSError):  # it is not empty, or was not made
                each.rmdir()
        raise


@contextlib.contextmanager
def whole_folder(
    folder: Path, earlier: Callable[[Path], Collection[str]], last: str
) -> Iterator[Path]:
    """Provide a folder to write, which then comes into its place: whole, or not at all.

    A folder with files of an earlier one is replaced. One without files, which may be mounted,
    stays and is filled. An `OSError` if that is not possible; nothing has changed then.

    Args:
        folder: The place.
        earlier: Returns which files of a folder, by their paths in it, are those of an earlier one.
        last: The path in the folder of the file that comes last if it is filled, because it names
            the others.
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
    names = sorted(path.relative_to(new).as_posix() for path in new.rglob("*") if not path.is_dir())
    names.sort(key=lambda name: name == last)
    with contextlib.ExitStack() as until:
        for name in names:
            until.enter_context(_made((folder / name).parent))
        work.commit([Move(new / name, folder / name, free=True) for name in names])
