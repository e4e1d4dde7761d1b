"""Write files beside their targets, and rename them to their places together.

What is written lies in a *work folder*, ``.htp-<random>``, with a lock that is free once the
process has ended and, from before the first rename on, a journal of renames and removals. Whoever
opens a work folder clears away those of killed processes: with a journal, what is left to do is
done, unless somebody changed a target meanwhile.

Only plain files are replaced and removed. A folder is replaced by a folder if it holds nothing but
files of an earlier one: this is known when it has been moved into the work folder, where nobody
adds files to it any more.
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
"""What is raised by contents that no process has written as its journal."""

_ATTEMPTS = 100  # random names that are all taken mean another problem


def _random_path(parent: Path) -> Path:
    return parent / f".htp-{secrets.token_hex(6)}"


@dataclass(frozen=True)
class Move:
    """A new file or folder, and its target, of which a symbolic link is followed.

    ``free``: the target must not exist. ``like``: a file whose owner and mode it gets if the target
    does not exist. ``may_replace`` returns whether a file that exists may be replaced; None if any
    may. ``earlier`` returns the files, by their paths in it, that a folder may hold which is
    replaced.
    """

    new: Path
    target: Path
    free: bool = False
    like: Path | None = None
    may_replace: Callable[[Path], bool] | None = None
    earlier: Callable[[Path], Collection[str]] | None = None


class WorkFolder:
    """A folder beside a target, for files that are being written; without a lock, one that is to be cleared."""

    def __init__(self, path: Path, lock: filesystem.Lock | None = None) -> None:
        self._lock = lock
        self._keeps_old = False  # what could not be put back
        self._process = os.getpid()
        self._set_path(path)

    def _set_path(self, path: Path) -> None:
        self.path = path
        self.new, self._old, self._journal = path / "new", path / "old", path / "journal"

    @classmethod
    def beside(cls, target: Path) -> WorkFolder:
        """A work folder beside a target, which does not exist yet."""
        return cls(_random_path(target.absolute().parent))

    def make(self) -> None:
        """Create the folder, and remove those of killed processes."""
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
            if self._lock is not None:  # else another process has just cleared it away
                self.new.mkdir()
                return
        raise OSError(f"no folder can be locked in {parent}")

    def close(self) -> None:
        """Remove the folder and its contents; a folder with a journal is left for a later run."""
        if os.getpid() != self._process:  # the folder belongs to the process that forked this one
            return
        # a signal came when all was renamed, or a file cannot be removed now
        if os.path.lexists(self._journal):
            self.finish()
        if os.path.lexists(self._journal):
            self._release()
            return
        for folder in (self.new, *(() if self._keeps_old else (self._old,))):
            # of a pipe in its place, the end would be waited for
            if folder.is_dir() and not folder.is_symlink():
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

        Processes that write into one folder do this one at a time. ``obsolete`` returns files that
        are removed afterwards; called when no other process replaces the target. A FileExistsError
        if a target exists that must not, or that is no plain file. After an OSError all targets are
        unchanged; a note names a target that cannot be restored, and the file that has its
        contents.
        """
        with filesystem.one_at_a_time(self.path.parent), contextlib.ExitStack() as others:
            steps = [self._prepared(move, number, others) for number, move in enumerate(moves)]
            removed = [_Removal(path.absolute(), Identity.at(path)) for path in obsolete()]
            replaces = bool(removed) or any(step.old is not None for step in steps)
            # without that, a crash of the machine could lose the old files and the new ones
            if replaces:
                for step in steps:
                    _sync(step.new)
            self._old.mkdir(exist_ok=True)
            try:
                journal = {"steps": [*map(_plain, steps)], "obsolete": [*map(_plain, removed)]}
                self._journal.write_text(json.dumps(journal), encoding="utf-8", newline="\n")
            except BaseException:
                self._journal.unlink(missing_ok=True)
                raise
            is_renamed = False
            try:
                self._rename(steps)
                is_renamed = True
                if replaces:
                    for folder in {step.target.parent for step in steps}:
                        filesystem.sync_folder(folder)
            finally:  # also after a signal that came when all was renamed
                if is_renamed or all(step.is_done for step in steps):
                    _note_placed(steps)
                    if _all_done(removed):
                        self._journal.unlink()

    def _prepared(self, move: Move, number: int, others: contextlib.ExitStack) -> _Step:
        """Do everything that can fail before the first rename."""
        target = real_path(move.target)
        new, folder = move.new, target.parent
        # behind a link: files are not renamed across file systems
        if folder.stat().st_dev != self.path.stat().st_dev:
            work = others.enter_context(work_folder(target))
            copied = work.new / new.name
            shutil.copytree(new, copied) if new.is_dir() else shutil.copy(new, copied)
            new = copied
        made = Identity.at(new)
        if made is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", os.fspath(new))
        _check_kind(move, target, is_folder=new.is_dir())
        model = target if os.path.lexists(target) else move.like
        if model is not None and model.exists() and model.is_dir() == new.is_dir():
            filesystem.keep_owner_and_mode(new, model.stat())
        holds = None
        if target.is_dir():
            foreign = foreign_entry(target, () if move.earlier is None else move.earlier(target))
            if foreign is not None:
                raise FileExistsError(
                    errno.EEXIST, f"it holds {foreign!r}, which stays", os.fspath(target)
                )
            holds = _holdings(target)
        return _Step(
            new, target, move.free, Identity.at(target), made, self._old / str(number), holds
        )

    def _rename(self, steps: Sequence[_Step]) -> None:
        begun: list[_Step] = []
        try:
            for number, step in enumerate(steps):
                # a last file needs no copy: it is replaced, or is not
                if number < len(steps) - 1 or step.new.is_dir():
                    begun.append(step)
                    step.keep()
                step.do()
        except BaseException as error:
            if all(step.is_done for step in steps):  # a signal, after the last rename
                raise
            self._keeps_old = True  # also if a further signal ends this
            self._journal.unlink(missing_ok=True)
            put_back = [_put_back(step, error) for step in reversed(begun)]
            self._keeps_old = not all(put_back)
            raise

    def finish(self) -> None:
        """Do what the journal of a killed process still lists; nothing if a target was changed meanwhile."""
        if os.path.lexists(self._journal) and not filesystem.is_plain_file(self._journal):
            return  # it is none of ours, and the folder is left
        try:
            with filesystem.opened_plain(self._journal) as journal:
                plan = json.load(journal)
            steps = [_step_of(entry) for entry in plan["steps"]]
            removed = [
                _Removal(Path(entry["target"]), _identity(entry["old"]))
                for entry in plan["obsolete"]
            ]
            is_over = self._finish(steps, removed)
        except FileNotFoundError:
            return
        except _NO_JOURNAL:  # the machine crashed before it was on the disk
            is_over = True
        if is_over:
            filesystem.remove(self._journal)

    def _finish(self, steps: Sequence[_Step], removed: Sequence[_Removal]) -> bool:
        """Do the steps that are left, and return whether nothing is left afterwards."""
        waiting = [step for step in steps if os.path.lexists(step.new)]
        try:
            is_wanted = all(step.can_be_finished for step in waiting)
            for step in waiting if is_wanted else ():
                is_wanted = is_wanted and step.finish()
            if not is_wanted:
                put_back = [step.folder_is_back() for step in waiting]
                self._keeps_old = not all(put_back)
        except OSError:
            return False  # another time
        return not is_wanted or _all_done(removed)


@dataclass(frozen=True)
class _Step:
    """One rename of a journal, and the identities of the file that it replaces and of the new one.

    ``away``: the name in the work folder for what is replaced. ``holds``: of a folder that is
    replaced, what is in it.
    """

    new: Path
    target: Path
    free: bool
    old: Identity | None
    made: Identity
    away: Path
    holds: Mapping[str, Identity] | None

    def keep(self) -> None:
        """Give the existing target a second name, or move it away; refuse a folder that holds more than before."""
        if self.old is None:
            return
        if self.holds is None:
            with contextlib.suppress(OSError):  # no file system has to have links
                os.link(self.target, self.away)  # so that the target is there all the time
                return
        os.replace(self.target, self.away)  # noqa: PTH105 - one function for all renames: tests make it fail
        if self.holds is not None and _holdings(self.away) != self.holds:
            raise FileExistsError(
                errno.EEXIST, "files were put into the folder meanwhile", os.fspath(self.target)
            )

    def do(self) -> None:
        if (
            self.holds is None
            and os.path.lexists(self.target)
            and not filesystem.is_plain_file(self.target)
        ):
            raise FileExistsError(
                errno.EEXIST, "something else has taken its place", os.fspath(self.target)
            )
        if self.free:
            filesystem.place_new(self.new, self.target)
        else:
            os.replace(self.new, self.target)  # noqa: PTH105

    @property
    def is_done(self) -> bool:
        """Whether the new file is in its place."""
        return not os.path.lexists(self.new) and Identity.at(self.target) == self.made

    @property
    def can_be_finished(self) -> bool:
        """Whether the new file is the one that was written, and nobody else has taken the place of the target.

        A journal that came from elsewhere, in an archive, cannot know the identity: nothing is
        renamed for it.
        """
        is_ours = (
            _NAME.fullmatch(self.new.parent.parent.name) is not None
            and Identity.at(self.new) == self.made
        )
        return is_ours and Identity.at(self.target) in (self.old, self.made, None)

    def finish(self) -> bool:
        """Do the rename; False if a folder that is in the way holds something else than when the process was killed."""
        if self.holds is not None:
            if self.target.is_dir():
                os.replace(self.target, self.away)  # noqa: PTH105
            if os.path.lexists(self.away) and _holdings(self.away) != self.holds:
                return False
        os.replace(self.new, self.target)  # noqa: PTH105
        return True

    def folder_is_back(self) -> bool:
        """Put a folder that was moved away back to its place; False if something else is there."""
        if self.holds is not None and os.path.lexists(self.away):
            if os.path.lexists(self.target):
                return False
            os.replace(self.away, self.target)  # noqa: PTH105
        return True


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


def _step_of(entry: Mapping[str, Any]) -> _Step:
    holds = entry["holds"]
    return _Step(
        Path(entry["new"]),
        Path(entry["target"]),
        entry["free"],
        _identity(entry["old"]),
        Identity(**entry["made"]),
        Path(entry["away"]),
        None if holds is None else {name: Identity(**found) for name, found in holds.items()},
    )


def _identity(entry: dict[str, int] | None) -> Identity | None:
    return None if entry is None else Identity(**entry)


def _check_kind(move: Move, target: Path, *, is_folder: bool) -> None:
    """Refuse to replace what is no plain file, or by a folder no folder, and a file that may not be replaced."""
    if not os.path.lexists(target):
        return
    if move.free:
        raise FileExistsError(errno.EEXIST, "it exists", os.fspath(target))
    if target.is_dir() and not is_folder:
        raise IsADirectoryError(errno.EISDIR, "it is a folder", os.fspath(target))
    if is_folder and not target.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is no folder", os.fspath(target))
    if not is_folder and not filesystem.is_plain_file(target):
        raise FileExistsError(errno.EEXIST, "it is no plain file", os.fspath(target))
    if move.may_replace is not None and not move.may_replace(target):
        raise FileExistsError(errno.EEXIST, "it is another file, and stays", os.fspath(target))


def _entries(folder: Path) -> Iterator[tuple[str, Identity]]:
    """The files, links and folders in a folder, by their paths in it; a folder, whose path ends with ``/``, first."""
    waiting = [folder]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            state = entry.stat(follow_symlinks=False)
            name = Path(entry.path).relative_to(folder).as_posix()
            is_folder = stat.S_ISDIR(state.st_mode)
            yield f"{name}/" if is_folder else name, Identity.of(state)
            if is_folder:
                waiting.append(Path(entry.path))


def _holdings(folder: Path) -> dict[str, Identity]:
    """The identities of all that is in a folder."""
    return dict(_entries(folder))


def foreign_entry(folder: Path, earlier: Collection[str]) -> str | None:
    """The first entry of a folder that is none of an earlier one's plain files, nor a folder of these.

    What lies on another file system, below a mount point, never is.
    """
    folders = {f"{parent}/" for name in earlier for parent in Path(name).parents}
    device = folder.stat().st_dev
    for name, identity in _entries(folder):
        is_known = name in folders or (name in earlier and filesystem.is_plain_file(folder / name))
        if not is_known or identity.device != device:
            return name
    return None


def _put_back(step: _Step, error: BaseException) -> bool:
    """Revert a rename; return False and add a note to the error if that is not possible."""
    is_kept = os.path.lexists(step.away)
    try:
        now = Identity.at(step.target)
        if now not in (None, step.old, step.made):
            raise OSError(errno.EEXIST, "another file has taken its place")
        if now == step.made and step.target.is_dir():
            os.replace(step.target, step.new)  # noqa: PTH105
        elif now == step.made and not is_kept:
            step.target.unlink()
        if is_kept:
            os.replace(step.away, step.target)  # noqa: PTH105
            if step.holds is None:
                step.away.unlink(missing_ok=True)  # two names of one file: the rename did nothing
    except OSError as again:
        where = f"; what it was is in {step.away}" if is_kept else ""
        error.add_note(f"{step.target} could not be put back ({again}){where}")
        return False
    return True


_placed: ContextVar[list[tuple[Path, Identity]] | None] = ContextVar("_placed", default=None)


def _note_placed(steps: Iterable[_Step]) -> None:
    placed = _placed.get()
    if placed is not None:
        placed += [(step.target, step.made) for step in steps]


@contextlib.contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    """Remove files that are put into a folder in a ``with`` block, if it fails and they are still the same."""
    placed: list[tuple[Path, Identity]] = []
    token = _placed.set(placed)
    try:
        yield
    except BaseException:
        inside = [(path, made) for path, made in placed if path.is_relative_to(folder.absolute())]
        for path, made in inside:
            if Identity.at(path) == made:
                filesystem.remove(path)
        raise
    finally:
        _placed.reset(token)


def real_path(path: Path) -> Path:
    """Return the path of a file after following symbolic links; an OSError if they form a cycle."""
    real = Path(os.path.realpath(path)) if path.is_symlink() else path.absolute()
    # Path.resolve raises a RuntimeError, or nothing, as Python's version has it
    if real.is_symlink():
        raise OSError(errno.ELOOP, "the symbolic links form a cycle", os.fspath(path))
    return real


@contextlib.contextmanager
def work_folder(target: Path) -> Iterator[WorkFolder]:
    """Provide a work folder beside a target, which is removed at the end, also if a signal ends the removal."""
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
    """Provide a path to write a file, which then replaces the target. A device or a pipe is written to at the end.

    A `TargetError` if the target is a folder, or something else that is neither replaced nor
    written to.
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
    """Whether a folder has a name that is given to work folders."""
    return _NAME.fullmatch(name) is not None


def clear_killed(parent: Path) -> None:
    """Finish or remove the work folders of processes that were killed; see the docstring of this module."""
    try:
        with os.scandir(parent) as entries:
            folders = [
                Path(entry.path)
                for entry in entries
                if _NAME.fullmatch(entry.name) and _is_ours(entry)
            ]
    except OSError:
        return
    for path in folders:
        lock = filesystem.Lock.left(path / "lock")
        if lock is None:
            # killed before there was a lock; else it is not empty
            with contextlib.suppress(OSError):
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
