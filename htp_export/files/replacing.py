"""Write files beside their targets, and rename them to their places together.

What is written lies in a *work folder*, ``.htp-<random>``, with a lock that is free once the process has ended and,
from before the first rename on, a journal of renames and removals. Whoever opens a work folder clears away those of
killed processes: with a journal, what is left to do is done, unless somebody changed a target meanwhile.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from htp_export.files import filesystem
from htp_export.files.filesystem import Identity

_NAME = re.compile(r"\.htp-[0-9a-f]{12}")
_ATTEMPTS = 100  # random names that are all taken mean another problem


@dataclass(frozen=True)
class Move:
    """A new file or folder, and its target, of which a symbolic link is followed.

    ``free``: the target must not exist. ``like``: a file whose owner and mode it gets if the target does not exist.
    """

    new: Path
    target: Path
    free: bool = False
    like: Path | None = None


class WorkFolder:
    """A folder beside a target, for files that are being written; without a lock, one that is to be cleared."""

    def __init__(self, path: Path, lock: filesystem.Lock | None) -> None:
        self.path, self._lock = path, lock
        self.new, self._old, self._journal = path / "new", path / "old", path / "journal"
        self._keeps_old = False  # what could not be put back

    @classmethod
    def open(cls, parent: Path) -> WorkFolder:
        """Create a work folder, and remove those of killed processes."""
        clear_killed(parent)
        for _ in range(_ATTEMPTS):
            path = parent / f".htp-{secrets.token_hex(6)}"
            try:
                filesystem.make_work_folder(path)
            except OSError as error:
                raise filesystem.why_not_writable(parent) or error from None
            lock = filesystem.Lock.new(path / "lock")
            if lock is not None:  # else another process has just cleared it away
                work = cls(path, lock)
                work.new.mkdir()
                return work
        raise OSError(f"no folder can be locked in {parent}")

    def close(self) -> None:
        """Remove the folder and its contents; a folder with a journal is left for a later run."""
        if self._journal.exists():
            self._release()
            return
        for folder in (self.new, *(() if self._keeps_old else (self._old,))):
            shutil.rmtree(folder, ignore_errors=True)
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

        Processes that write into one folder do this one at a time. ``obsolete`` returns files that are removed
        afterwards; called when no other process replaces the target. A FileExistsError if a target exists that must
        not. After an OSError all targets are unchanged; a note names a target that cannot be restored, and the file
        that has its contents.
        """
        with filesystem.one_at_a_time(self.path.parent), contextlib.ExitStack() as others:
            steps = [self._prepared(move, others) for move in moves]
            removed = [_Removal(path.absolute(), Identity.at(path)) for path in obsolete()]
            replaces = bool(removed) or any(step.old is not None for step in steps)
            if replaces:  # without that, a crash of the machine could lose the old files and the new ones
                for step in steps:
                    _sync(step.new)
            self._old.mkdir()
            try:
                journal = {"steps": [*map(_plain, steps)], "obsolete": [*map(_plain, removed)]}
                self._journal.write_text(json.dumps(journal), encoding="utf-8", newline="\n")
            except BaseException:
                self._journal.unlink(missing_ok=True)
                raise
            self._rename(steps)
            if replaces:
                for folder in {step.target.parent for step in steps}:
                    filesystem.sync_folder(folder)
            if _all_done(removed):
                self._journal.unlink()

    def _prepared(self, move: Move, others: contextlib.ExitStack) -> _Step:
        """Do everything that can fail before the first rename."""
        target = real_path(move.target)
        new, folder = move.new, target.parent
        if folder.stat().st_dev != self.path.stat().st_dev:  # behind a link: files are not renamed across file systems
            work = WorkFolder.open(folder)
            others.callback(work.close)
            copied = work.new / new.name
            shutil.copytree(new, copied) if new.is_dir() else shutil.copy(new, copied)
            new = copied
        model = target if os.path.lexists(target) else move.like
        if model is not None and model.is_file() and not new.is_dir():
            filesystem.keep_owner_and_mode(new, model.stat())
        made = Identity.at(new)
        if made is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", os.fspath(new))
        return _Step(new, target, move.free, Identity.at(target), made)

    def _rename(self, steps: Sequence[_Step]) -> None:
        kept: list[tuple[_Step, Path | None]] = []
        try:
            for number, step in enumerate(steps):
                if number < len(steps) - 1 or step.new.is_dir():  # a last file needs no copy: it is replaced, or is not
                    kept.append((step, self._kept(step, number)))
                step.do()
        except BaseException as error:
            self._journal.unlink(missing_ok=True)
            for step, old in reversed(kept):
                self._keeps_old |= not _put_back(step, old, error)
            raise

    def _kept(self, step: _Step, number: int) -> Path | None:
        """Give the existing target a second name; None if there is no target."""
        if step.old is None:
            return None
        kept = self._old / str(number)
        if not step.target.is_dir():
            with contextlib.suppress(OSError):  # no file system has to have links
                os.link(step.target, kept)  # so that the target is there all the time
                return kept
        os.replace(step.target, kept)  # noqa: PTH105 - one function for all renames: tests make it fail
        return kept

    def finish(self) -> None:
        """Do what the journal of a killed process still lists; nothing if a target was changed meanwhile."""
        try:
            plan = json.loads(self._journal.read_text(encoding="utf-8"))
            steps = [
                _Step(Path(e["new"]), Path(e["target"]), e["free"], _identity(e["old"]), Identity(**e["made"]))
                for e in plan["steps"]
            ]
            removed = [_Removal(Path(entry["target"]), _identity(entry["old"])) for entry in plan["obsolete"]]
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError):  # the machine crashed before it was on the disk
            filesystem.remove(self._journal)
            return
        waiting = [step for step in steps if os.path.lexists(step.new)]
        is_wanted = all(step.can_be_finished for step in waiting)
        try:
            for step in waiting if is_wanted else ():
                if step.target.is_dir():
                    os.replace(step.target, self._old / secrets.token_hex(6))  # noqa: PTH105
                os.replace(step.new, step.target)  # noqa: PTH105
        except OSError:
            return  # another time
        if not is_wanted or _all_done(removed):
            filesystem.remove(self._journal)


@dataclass(frozen=True)
class _Step:
    """One rename of a journal, and the identities of the file that it replaces and of the new one."""

    new: Path
    target: Path
    free: bool
    old: Identity | None
    made: Identity

    def do(self) -> None:
        if self.free:
            filesystem.place_new(self.new, self.target)
        else:
            os.replace(self.new, self.target)  # noqa: PTH105

    @property
    def can_be_finished(self) -> bool:
        """Whether the new file is the one that was written, and nobody else has taken the place of the target.

        A journal that came from elsewhere, in an archive, cannot know the identity: nothing is renamed for it.
        """
        return Identity.at(self.new) == self.made and Identity.at(self.target) in (self.old, self.made, None)


@dataclass(frozen=True)
class _Removal:
    target: Path
    old: Identity | None

    def done(self) -> bool:
        """Remove the file, and return whether it could be removed."""
        return Identity.at(self.target) != self.old or filesystem.remove(self.target)


def _all_done(removed: Iterable[_Removal]) -> bool:
    return not [removal for removal in removed if not removal.done()]


def _plain(entry: _Step | _Removal) -> dict[str, Any]:
    return {name: os.fspath(value) if isinstance(value, Path) else value
            for name, value in dataclasses.asdict(entry).items()}  # fmt: skip


def _identity(entry: dict[str, int] | None) -> Identity | None:
    return None if entry is None else Identity(**entry)


def _put_back(step: _Step, old: Path | None, error: BaseException) -> bool:
    """Revert a rename; return False and add a note to the error if that is not possible."""
    try:
        if old is not None:
            os.replace(old, step.target)  # noqa: PTH105
            old.unlink(missing_ok=True)  # two names of one file: the rename did nothing
        elif not os.path.lexists(step.new):
            step.target.unlink()
    except OSError as again:
        where = f"; what it was is in {old}" if old else ""
        error.add_note(f"{step.target} could not be put back ({again}){where}")
        return False
    return True


def real_path(path: Path) -> Path:
    """Return the path of a file after following symbolic links; an OSError if they form a cycle."""
    real = Path(os.path.realpath(path)) if path.is_symlink() else path.absolute()
    if real.is_symlink():  # Path.resolve raises a RuntimeError, or nothing, as Python's version has it
        raise OSError(errno.ELOOP, "the symbolic links form a cycle", os.fspath(path))
    return real


@contextlib.contextmanager
def work_folder(target: Path) -> Iterator[WorkFolder]:
    """Provide a work folder beside a target, which is removed at the end."""
    work = WorkFolder.open(target.absolute().parent)
    try:
        yield work
    finally:
        work.close()


@contextlib.contextmanager
def replace_file(target: Path) -> Iterator[Path]:
    """Provide a path to write a file, which then replaces the target. A device or a pipe is written to at the end."""
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


def clear_killed(parent: Path) -> None:
    """Finish or remove the work folders of processes that were killed; see the docstring of this module."""
    try:
        with os.scandir(parent) as entries:
            folders = [Path(entry.path) for entry in entries if _NAME.fullmatch(entry.name) and _is_ours(entry)]
    except OSError:
        return
    for path in folders:
        lock = filesystem.Lock.left(path / "lock")
        if lock is None:
            with contextlib.suppress(OSError):  # killed before there was a lock; else it is not empty
                path.rmdir()
            continue
        work = WorkFolder(path, lock)
        work.finish()
        work.close()


def _is_ours(entry: os.DirEntry[str]) -> bool:
    user = os.geteuid() if hasattr(os, "geteuid") else 0
    return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == user


def _sync(new: Path) -> None:
    for path in new.rglob("*") if new.is_dir() else [new]:
        if path.is_file():
            filesystem.sync_file(path)
