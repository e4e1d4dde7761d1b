"""Write files beside their targets, and rename them to their targets together.

New files are written to a *work folder*, ``.htp-<random>``. It contains a lock, which is released
when the process ends, and, before the first of several changes, a journal of renames and removals.
One rename of a file needs none: it is done or not. Each process that creates a work folder first
removes those of killed processes: if there is a journal, its remaining steps are completed, unless
a target was changed meanwhile.

Only regular files are replaced and removed. A folder is replaced by a folder if it contains only
files of an earlier run. This is checked after it was moved into the work folder, where other
processes do not add files to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from htp_export.files import filesystem
from htp_export.files.filesystem import Identity

_NAME = re.compile(r"\.htp-[0-9a-f]{12}")
_NO_JOURNAL = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""Errors for the contents of a file that is not a valid journal."""

_ATTEMPTS = 100  # if so many random names exist, the cause is another problem


def _random_path(parent: Path) -> Path:
    return parent / f".htp-{secrets.token_hex(6)}"


@dataclass(frozen=True)
class Move:
    """The rename of a new file or folder to its target; if this is a symbolic link, the link is followed.

    ``free``: the target must not exist. ``like``: a file whose owner and mode are copied if the
    target does not exist. ``may_replace`` returns whether an existing file may be replaced; None if
    any file may be. ``earlier`` returns the relative paths of the files that an existing folder may
    contain.
    """

    new: Path
    target: Path
    free: bool = False
    like: Path | None = None
    may_replace: Callable[[Path], bool] | None = None
    earlier: Callable[[Path], Collection[str]] | None = None


class WorkFolder:
    """A temporary folder beside a target, for files that are being written.

    ``lock`` is that of an existing work folder; `make` creates a new one.
    """

    def __init__(self, path: Path, lock: filesystem.Lock | None = None) -> None:
        self._lock = lock
        self._keeps_old = False  # whether it contains the only copy of a replaced file
        self._process = os.getpid()
        self._set_path(path)

    def _set_path(self, path: Path) -> None:
        self.path = path
        self.new, self._old, self._journal = path / "new", path / "old", path / "journal"

    @classmethod
    def beside(cls, target: Path) -> WorkFolder:
        """Return a work folder beside a target; `make` creates it."""
        return cls(_random_path(target.absolute().parent))

    def make(self) -> None:
        """Create the folder, and remove the work folders of killed processes."""
        parent = self.path.parent
        clear_killed(parent)
        for _ in range(_ATTEMPTS):
            try:
                filesystem.make_work_folder(self.path)
            except FileExistsError:
                self._set_path(_random_path(parent))
                continue
            except OSError as error:
                raise filesystem.why_not_writable(parent) or error from None
            self._lock = filesystem.Lock.new(self.path / "lock")
            if self._lock is not None:  # otherwise another process removed the folder meanwhile
                self.new.mkdir()
                return
        raise OSError(f"cannot lock a folder in {parent}")

    def close(self) -> None:
        """Remove the folder and its contents; a folder with a journal is left for a later run."""
        if os.getpid() != self._process:  # the folder belongs to the process that forked this one
            return
        if self._lock is None and not os.path.lexists(self.path):  # closed before
            return
        # after a signal behind the last rename, or if an obsolete file cannot be removed now
        if os.path.lexists(self._journal):
            self.finish()
        if os.path.lexists(self._journal):
            self._release()
            return
        folders = [self.new] if self._keeps_old else [self.new, self._old]
        for folder in folders:
            _remove_tree(folder)
        if not filesystem.removes_open_files():
            self._release()
        filesystem.remove(self.path / "lock")
        with contextlib.suppress(OSError):
            self.path.rmdir()
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def commit(self, moves: Sequence[Move], obsolete: Callable[[], Iterable[Path]] = list) -> None:
        """Rename the new files to their targets, directly one after the other: all of them, or none.

        Commits in one folder are serialized across processes. A FileExistsError if a target exists
        that must not, or is not a regular file. After an OSError all targets are unchanged; a note
        of the error names a target that could not be restored, and the file with its old contents.

        Args:
            moves: The new files and their targets.
            obsolete: Returns files to remove after the renames. Called while no other process can
                commit in the folder.
        """
        with (
            filesystem.one_at_a_time(self.path.parent),
            contextlib.ExitStack() as other_work_folders,
        ):
            # first everything that can fail, then the journal, then the renames
            steps = [
                self._prepared(move, number, other_work_folders)
                for number, move in enumerate(moves)
            ]
            removals = [_Removal(path.absolute(), Identity.at(path)) for path in obsolete()]
            has_old_files = bool(removals) or any(step.old is not None for step in steps)
            # without a flush, a crash of the machine could lose the old files and the new ones
            if has_old_files:
                for step in steps:
                    _sync(step.new)
            if len(steps) != 1 or removals or steps[0].new.is_dir():
                self._old.mkdir(exist_ok=True)
                self._write_journal(steps, removals)
            is_renamed = False
            try:
                self._rename(steps)
                is_renamed = True
                if has_old_files:
                    for folder in {step.target.parent for step in steps}:
                        filesystem.sync_folder(folder)
            finally:
                # a signal can end the block after the last rename: then the removals are due, too
                if is_renamed or all(step.is_done for step in steps):
                    _note_placed(steps)
                    if _all_done(removals):
                        self._journal.unlink(missing_ok=True)

    def _write_journal(self, steps: Sequence[_Step], removals: Sequence[_Removal]) -> None:
        """Write the journal completely: with a part of it, a later process could not finish the renames."""
        journal = {"steps": list(map(vars, steps)), "obsolete": list(map(vars, removals))}
        text = json.dumps(journal, default=_plain)
        try:
            self._journal.write_text(text, encoding="utf-8", newline="\n")
        except BaseException:
            self._journal.unlink(missing_ok=True)
            raise

    def _prepared(self, move: Move, number: int, other_work_folders: contextlib.ExitStack) -> _Step:
        """Return the step of a move; everything that can fail before the first rename is done here."""
        target = real_path(move.target)
        new = move.new
        # a file behind a symbolic link: a rename does not work across file systems
        if target.parent.stat().st_dev != self.path.stat().st_dev:
            work = other_work_folders.enter_context(work_folder(target))
            copied = work.new / new.name
            if new.is_dir():
                shutil.copytree(new, copied)
            else:
                shutil.copy(new, copied)
            new = copied
        made = Identity.at(new)
        if made is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", os.fspath(new))
        _check_kind(move, target, is_folder=new.is_dir())
        template = target if os.path.lexists(target) else move.like
        if template is not None and template.exists() and template.is_dir() == new.is_dir():
            filesystem.keep_owner_and_mode(new, template.stat())
        holds = _replaceable_contents(target, move) if target.is_dir() else None
        old = Identity.at(target)
        return _Step(new, target, move.free, old, made, self._old / str(number), holds)

    def _rename(self, steps: Sequence[_Step]) -> None:
        begun: list[_Step] = []
        try:
            for number, step in enumerate(steps):
                # the last file needs no second name: if its rename fails, it is unchanged
                if number < len(steps) - 1 or step.new.is_dir():
                    begun.append(step)
                    step.keep()
                step.do()
        except BaseException as error:
            if all(step.is_done for step in steps):  # a signal after the last rename
                raise
            self._keeps_old = True  # in case another signal interrupts the following lines
            self._journal.unlink(missing_ok=True)
            put_back = [_put_back(step, error) for step in reversed(begun)]
            self._keeps_old = not all(put_back)
            raise

    def finish(self) -> None:
        """Complete the journal of a killed process; do nothing if a target was changed meanwhile."""
        if os.path.lexists(self._journal) and not filesystem.is_plain_file(self._journal):
            return  # no process of htp_export wrote it: leave the folder
        try:
            with filesystem.opened_plain(self._journal) as file:
                journal = json.load(file)
            steps = [_step_of(entry) for entry in journal["steps"]]
            removals = [
                _Removal(Path(entry["target"]), _identity(entry["old"]))
                for entry in journal["obsolete"]
            ]
            is_complete = self._finish(steps, removals)
        except FileNotFoundError:
            return
        except _NO_JOURNAL:  # the machine crashed before the journal was on disk
            is_complete = True
        if is_complete:
            filesystem.remove(self._journal)

    def _finish(self, steps: Sequence[_Step], removals: Sequence[_Removal]) -> bool:
        """Do the remaining steps, or revert them; return False if some must be tried again later."""
        remaining = [step for step in steps if os.path.lexists(step.new)]
        try:
            is_possible = all(step.can_be_finished for step in remaining)
            if is_possible:
                # ends at the first step that fails
                is_possible = all(step.finish() for step in remaining)
            if not is_possible:
                put_back = [step.folder_is_back() for step in remaining]
                self._keeps_old = not all(put_back)
        except OSError:
            return False
        return not is_possible or _all_done(removals)


def _remove_tree(folder: Path) -> None:
    """Remove a folder, if it exists; what cannot be removed stays."""
    try:
        folder.rmdir()  # it is usually empty
    except FileNotFoundError:
        return
    except OSError:
        # rmtree would wait for a pipe in the place of a folder
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)


def _replaceable_contents(target: Path, move: Move) -> dict[str, Identity]:
    """Return the contents of a folder; a FileExistsError if it contains more than files of an earlier run."""
    earlier = () if move.earlier is None else move.earlier(target)
    foreign = foreign_entry(target, earlier)
    if foreign is not None:
        problem = f"it contains {foreign!r}, which is not replaced"
        raise FileExistsError(errno.EEXIST, problem, os.fspath(target))
    return _contents(target)


@dataclass(frozen=True)
class _Step:
    """One rename of a journal, with the identities of the existing target and of the new file.

    ``away``: the path in the work folder for the replaced file. ``holds``: the contents of the
    replaced folder; None for a file.
    """

    new: Path
    target: Path
    free: bool
    old: Identity | None
    made: Identity
    away: Path
    holds: Mapping[str, Identity] | None

    def keep(self) -> None:
        """Link the existing target to a second name, or move it away; refuse a folder with new contents."""
        if self.old is None:
            return
        if self.holds is None:
            with contextlib.suppress(OSError):  # a file system without hard links
                os.link(self.target, self.away)  # unlike a rename, the target never disappears
                return
        os.replace(self.target, self.away)  # noqa: PTH105 - one function for all renames: tests make it fail
        if self.holds is not None and _contents(self.away) != self.holds:
            problem = "files were added to the folder meanwhile"
            raise FileExistsError(errno.EEXIST, problem, os.fspath(self.target))

    def do(self) -> None:
        """Rename the new file to the target."""
        is_file = self.holds is None
        if is_file and os.path.lexists(self.target) and not filesystem.is_plain_file(self.target):
            problem = "another process replaced it by something that is not a regular file"
            raise FileExistsError(errno.EEXIST, problem, os.fspath(self.target))
        if self.free:
            filesystem.place_new(self.new, self.target)
        else:
            os.replace(self.new, self.target)  # noqa: PTH105

    @property
    def is_done(self) -> bool:
        """Whether the new file is at the target."""
        return not os.path.lexists(self.new) and Identity.at(self.target) == self.made

    @property
    def can_be_finished(self) -> bool:
        """Whether the new file is the one that was written, and the target was not changed meanwhile.

        A journal from an archive cannot contain the identity of the file: nothing is renamed then.
        """
        is_in_work_folder = _NAME.fullmatch(self.new.parent.parent.name) is not None
        if not is_in_work_folder or Identity.at(self.new) != self.made:
            return False
        return Identity.at(self.target) in (self.old, self.made, None)

    def finish(self) -> bool:
        """Do the rename; return False if the contents of the replaced folder changed since the process was killed."""
        if self.holds is not None:
            if self.target.is_dir():
                os.replace(self.target, self.away)  # noqa: PTH105
            if os.path.lexists(self.away) and _contents(self.away) != self.holds:
                return False
        os.replace(self.new, self.target)  # noqa: PTH105
        return True

    def folder_is_back(self) -> bool:
        """Move a folder back that was moved away; return False if the target exists again."""
        if self.holds is not None and os.path.lexists(self.away):
            if os.path.lexists(self.target):
                return False
            os.replace(self.away, self.target)  # noqa: PTH105
        return True


@dataclass(frozen=True)
class _Removal:
    """The removal of an obsolete file, if it is still the same file."""

    target: Path
    old: Identity | None

    def done(self) -> bool:
        """Remove the file; return False if it cannot be removed now."""
        return Identity.at(self.target) != self.old or filesystem.remove(self.target)


def _all_done(removals: Iterable[_Removal]) -> bool:
    """Remove files, and return whether none remains; a failure does not end the loop."""
    results = [removal.done() for removal in removals]
    return all(results)


def _plain(value: Path | Identity) -> str | dict[str, int]:
    """Return a path or an identity as it is written into a journal."""
    if isinstance(value, Path):
        return os.fspath(value)
    return dataclasses.asdict(value)


def _step_of(entry: Mapping[str, Any]) -> _Step:
    """Return the step of an entry of a journal."""
    holds = entry["holds"]
    if holds is not None:
        holds = {name: Identity(**identity) for name, identity in holds.items()}
    return _Step(
        Path(entry["new"]),
        Path(entry["target"]),
        entry["free"],
        _identity(entry["old"]),
        Identity(**entry["made"]),
        Path(entry["away"]),
        holds,
    )


def _identity(entry: dict[str, int] | None) -> Identity | None:
    return None if entry is None else Identity(**entry)


def _check_kind(move: Move, target: Path, *, is_folder: bool) -> None:
    """Refuse an existing target that must not be replaced, or is of another kind than the new file or folder."""
    if not os.path.lexists(target):
        return
    if move.free:
        raise FileExistsError(errno.EEXIST, "it exists", os.fspath(target))
    if target.is_dir() and not is_folder:
        raise IsADirectoryError(errno.EISDIR, "it is a folder", os.fspath(target))
    if is_folder and not target.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is not a folder", os.fspath(target))
    if not is_folder and not filesystem.is_plain_file(target):
        raise FileExistsError(errno.EEXIST, "it is not a regular file", os.fspath(target))
    if move.may_replace is not None and not move.may_replace(target):
        problem = "it belongs to something else, and is not replaced"
        raise FileExistsError(errno.EEXIST, problem, os.fspath(target))


def _entries(folder: Path) -> Iterator[tuple[str, Identity]]:
    """Yield relative paths and identities of the entries below a folder.

    The path of a folder ends with ``/``, and comes before the entries in it.
    """
    pending = [folder]
    while pending:
        with os.scandir(pending.pop()) as scanned:
            entries = sorted(scanned, key=lambda entry: entry.name)
        for entry in entries:
            state = entry.stat(follow_symlinks=False)
            name = Path(entry.path).relative_to(folder).as_posix()
            if stat.S_ISDIR(state.st_mode):
                pending.append(Path(entry.path))
                name = f"{name}/"
            yield name, Identity.of(state)


def _contents(folder: Path) -> dict[str, Identity]:
    """Return the entries below a folder: relative path → identity."""
    return dict(_entries(folder))


def foreign_entry(folder: Path, earlier: Collection[str]) -> str | None:
    """Return the first entry below a folder that does not come from an earlier run; None without one.

    ``earlier``: the relative paths of the files of that run. An entry on another file system, below
    a mount point, is always foreign.
    """
    folders = set[str]()
    for name in earlier:
        folders.update(f"{parent}/" for parent in Path(name).parents)
    device = folder.stat().st_dev
    for name, identity in _entries(folder):
        is_earlier = name in earlier and filesystem.is_plain_file(folder / name)
        if identity.device != device or not (is_earlier or name in folders):
            return name
    return None


def _put_back(step: _Step, error: BaseException) -> bool:
    """Revert a rename; if that is not possible, return False and add a note to the error."""
    is_kept = os.path.lexists(step.away)
    try:
        current = Identity.at(step.target)
        if current not in (None, step.old, step.made):
            raise OSError(errno.EEXIST, "another process replaced it")
        if current == step.made and step.target.is_dir():
            os.replace(step.target, step.new)  # noqa: PTH105
        elif current == step.made and not is_kept:
            step.target.unlink()
        if is_kept:
            os.replace(step.away, step.target)  # noqa: PTH105
            if step.holds is None:
                # if both are names of the same file, the rename has no effect
                step.away.unlink(missing_ok=True)
    except OSError as second_error:
        backup = f"; its previous contents are in {step.away}" if is_kept else ""
        error.add_note(f"{step.target} could not be restored ({second_error}){backup}")
        return False
    return True


_placed: ContextVar[list[tuple[Path, Identity]] | None] = ContextVar("_placed", default=None)


def _note_placed(steps: Iterable[_Step]) -> None:
    placed = _placed.get()
    if placed is not None:
        placed += [(step.target, step.made) for step in steps]


@contextlib.contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    """If a ``with`` block fails, remove the files that it has renamed into a folder, unless they were changed."""
    placed: list[tuple[Path, Identity]] = []
    token = _placed.set(placed)
    try:
        yield
    except BaseException:
        for path, made in placed:
            if path.is_relative_to(folder.absolute()) and Identity.at(path) == made:
                filesystem.remove(path)
        raise
    finally:
        _placed.reset(token)


def real_path(path: Path) -> Path:
    """Return the path of a file after following symbolic links; an OSError if they form a cycle."""
    real = Path(os.path.realpath(path)) if path.is_symlink() else path.absolute()
    # Path.resolve raises a RuntimeError or nothing, depending on the version of Python
    if real.is_symlink():
        raise OSError(errno.ELOOP, "the symbolic links form a cycle", os.fspath(path))
    return real


@contextlib.contextmanager
def work_folder(target: Path) -> Iterator[WorkFolder]:
    """Provide a work folder beside a target; it is removed at the end, even if a signal interrupts the removal."""
    work = WorkFolder.beside(target)
    try:
        try:
            work.make()
            yield work
        finally:
            work.close()
    finally:
        work.close()


@contextlib.contextmanager
def replace_file(target: Path) -> Iterator[Path]:
    """Provide a path to write a file, which then replaces the target, or is copied to a device or a pipe.

    A `TargetError` if the target is a folder, a socket or a block device.
    """
    filesystem.check_kind_of_target(target)
    if filesystem.is_special(target):
        with filesystem.temporary_folder() as folder:
            new = folder / (target.name or "new")
            yield new
            with new.open("rb") as source, target.open("wb") as stream:
                shutil.copyfileobj(source, stream, filesystem.CHUNK_BYTES)
        return
    with work_folder(target) as work:
        new = work.new / target.name
        yield new
        work.commit([Move(new, target)])


def is_work_folder(name: str) -> bool:
    """Return whether the name of a folder is that of a work folder."""
    return _NAME.fullmatch(name) is not None


def clear_killed(parent: Path) -> None:
    """Complete the journals of killed processes in a folder, and remove their work folders."""
    try:
        with os.scandir(parent) as entries:
            named = [entry for entry in entries if is_work_folder(entry.name)]
            folders = [Path(entry.path) for entry in named if _is_ours(entry)]
    except OSError:
        return
    for path in folders:
        lock = filesystem.Lock.left(path / "lock")
        if lock is None:
            # the process was killed before it created the lock: otherwise the folder is not empty
            with contextlib.suppress(OSError):
                path.rmdir()
            continue
        work = WorkFolder(path, lock)
        work.finish()
        work.close()


def _is_ours(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder of this user: no other user's journal is followed."""
    user = os.geteuid() if hasattr(os, "geteuid") else 0
    return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == user


def _sync(new: Path) -> None:
    for path in new.rglob("*") if new.is_dir() else [new]:
        if path.is_file():
            filesystem.sync_file(path)
