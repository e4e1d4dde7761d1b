"""Differences between operating systems and file systems: identity, locks, links, modes, and flushing to disk.

Everything that differs between Linux, macOS and Windows is in this file;
``docs/compatibility.md`` lists what was tested where.
"""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
import stat
import tempfile
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from htp_export.errors import FolderTargetError, TargetError
from htp_export.process.forking import in_forked_child

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

CHUNK_BYTES = 1 << 20  # read from a file at a time: larger chunks are not faster

_FOREIGN_LOCK_SECONDS = 24 * 3600
"""A lock file of this age is from a killed process, on a file system without locks: no export takes a day."""


@dataclass(frozen=True)
class Identity:
    """The identity of a file and its contents: file system, inode, size in bytes, and modification time in ns.

    Two equal identities are the same file, which was not written to in between.
    """

    device: int
    number: int
    size: int
    written_ns: int

    @classmethod
    def of(cls, state: os.stat_result) -> Identity:
        """Return the identity that a status describes; without size and time for a folder."""
        if stat.S_ISDIR(state.st_mode):
            return cls(state.st_dev, state.st_ino, 0, 0)
        return cls(state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)

    @classmethod
    def at(cls, path: Path) -> Identity | None:
        """Return the identity of the file or folder at a path; None without one. Links are not followed."""
        try:
            return cls.of(os.lstat(path))
        except OSError:
            return None


def removes_open_files() -> bool:
    """Return whether an open file can be removed; false on Windows."""
    return fcntl is not None


class Lock:
    """An exclusive lock of a file or folder; the operating system releases it when the process ends.

    A forked child process inherits the descriptor, and with it the lock: the child closes its own
    descriptor, and `release` unlocks the file itself, in case a child could not.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        _held.add(self)

    @classmethod
    def new(cls, path: Path) -> Lock | None:
        """Create and lock a lock file; None if another process removed it or its folder at the same time."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        except FileNotFoundError:
            return None
        return cls._held(descriptor, path, unlocked_is_ours=True)

    @classmethod
    def left(cls, path: Path) -> Lock | None:
        """Acquire the lock of a process that has ended; None if there is no lock, or its process still runs."""
        try:
            if fcntl is None:  # on Windows, a file cannot be removed while a process has it open
                path.unlink()
                return cls.new(path)
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            return None
        return cls._held(descriptor, path, unlocked_is_ours=False)

    @classmethod
    def _held(cls, descriptor: int, path: Path, *, unlocked_is_ours: bool) -> Lock | None:
        lock = cls(descriptor)
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.release()
            return None
        except OSError:  # a file system without locks
            if (
                not unlocked_is_ours
                and time.time() - os.fstat(descriptor).st_mtime < _FOREIGN_LOCK_SECONDS
            ):
                lock.release()
                return None
        if fcntl is not None and Identity.at(path) != Identity.of(os.fstat(descriptor)):
            lock.release()
            return None
        return lock

    @classmethod
    def waited_for(cls, folder: Path) -> Lock | None:
        """Acquire the lock of a folder, and wait for other processes and threads; None on Windows or an error."""
        if fcntl is None:
            return None
        try:
            lock = cls(os.open(folder, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return None
        with contextlib.suppress(OSError):
            fcntl.flock(lock._descriptor, fcntl.LOCK_EX)  # type: ignore[arg-type]
        return lock

    def release(self) -> None:
        """Release the lock."""
        if self._descriptor is not None and fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self.forget()

    def forget(self) -> None:
        """Close the descriptor of this process only: the lock belongs to the process that forked it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


@in_forked_child
def _forget_locks() -> None:
    for lock in list(_held):
        lock.forget()


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Serialize ``with`` blocks for a folder across processes and threads.

    The folder itself is locked, so that no lock file remains. On Windows and on file systems
    without locks, blocks are not serialized.
    """
    lock = Lock.waited_for(folder)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def check_kind_of_target(path: Path) -> None:
    """Refuse a path that cannot be written like a file.

    A `FolderTargetError` for a folder, a `TargetError` for a socket and for a block device, whose
    contents would be overwritten. Links are followed. Other devices and pipes are written to
    (`is_special`).
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        # it does not exist or is not a valid path: the error of writing it is clearer
        return
    if stat.S_ISDIR(mode):
        raise FolderTargetError(path, "is a folder; name a file in it")
    if stat.S_ISSOCK(mode):
        raise TargetError(path, "is a socket, which cannot be written as a file; name a file")
    if stat.S_ISBLK(mode):
        raise TargetError(
            path, "is a block device, whose contents would be overwritten; name a file"
        )


def opened_plain(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file from an untrusted path for reading; an `OSError` for a pipe or a device, without blocking."""
    descriptor = os.open(
        path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    )
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, "it is not a regular file", os.fspath(path))
    return os.fdopen(descriptor, "rb")


def is_plain_file(path: Path) -> bool:
    """Return whether a path is a regular file: no link, folder, pipe or device."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


def is_special(path: Path) -> bool:
    """Return whether a path is a device, a pipe or a socket, which is written to in place of being replaced."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def is_read_only(path: Path) -> bool:
    """Return whether a file exists that is write-protected by its mode, or by its attribute on Windows."""
    try:
        return not path.stat().st_mode & 0o222 and not os.access(path, os.W_OK)
    except (OSError, ValueError):
        return False


def make_work_folder(path: Path) -> None:
    """Create a folder that only this user can enter; not on Windows, where renamed files keep its permissions."""
    path.mkdir(0o700 if fcntl is not None else 0o777)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Provide a folder that is removed at the end; on Windows, files that are open or mapped remain."""
    with tempfile.TemporaryDirectory(prefix="htp_export_", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def place_new(new: Path, target: Path) -> None:
    """Rename a file to a name that does not exist; a `FileExistsError` if it does."""
    try:
        os.link(new, target)  # a rename would replace an existing file, except on Windows
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "File exists", os.fspath(target)) from None
        os.replace(new, target)  # noqa: PTH105 - as below
    else:
        new.unlink()


def keep_owner_and_mode(new: Path, old: os.stat_result) -> None:
    """Copy the owner, group and mode of a replaced file to the new file, as far as the process may."""
    mode = stat.S_IMODE(old.st_mode)
    if hasattr(os, "chown"):
        now = new.stat()
        if (now.st_uid, now.st_gid) != (old.st_uid, old.st_gid):
            try:
                os.chown(new, old.st_uid, old.st_gid)
            except OSError:
                try:
                    os.chown(new, -1, old.st_gid)
                except OSError:  # the group changes: it gets the permissions of all users only
                    mode = mode & ~0o070 | (mode & 0o007) << 3
    with contextlib.suppress(OSError):  # file systems without modes
        new.chmod(mode)


def sync_file(path: Path) -> None:
    """Flush a file to disk; an `OSError` if it cannot be written, for example because the disk is full."""
    # a link to a file of others may be write-protected; Windows flushes only files that can be written
    mode = "rb+" if os.access(path, os.W_OK) else "rb"
    with path.open(mode) as file:
        os.fsync(file.fileno())


_FLUSHED_BYTES = 1 << 24
"""Fewer new bytes are not flushed: a request has a cost."""


def begin_flush(file: IO[bytes], start: int) -> int:
    """Make the system write the bytes behind an offset to the disk, without waiting; return the next offset.

    A later `sync_file` then waits for the last bytes only.
    """
    end = file.tell()
    if end - start < _FLUSHED_BYTES:
        return start
    if hasattr(os, "posix_fadvise"):
        # Linux starts to write the pages that it is asked to drop, and keeps them until they are written
        with contextlib.suppress(OSError):
            os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)
    return end


def sync_folder(path: Path) -> None:
    """Flush the entries of a folder to disk; does nothing on Windows."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_READ_BYTES = 1 << 16
"""Up to this size, bytes are read: a mapping takes longer, as its pages are added and removed one by one."""

_POPULATED_BYTES = 1 << 26
"""Up to this size, a range is mapped with its pages, in one request; of a larger one, maybe only a part is used."""


def read_or_mapped(file: IO[bytes], offset: int, count: int) -> memoryview:
    """Return bytes of a file: a few are read, and many are mapped from the file, which may then be closed."""
    if count <= _READ_BYTES:
        file.seek(offset)
        found = file.read(count)
        if len(found) == count:
            return memoryview(found)
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    length = offset + count - start
    if hasattr(mmap, "MAP_POPULATE") and count <= _POPULATED_BYTES:  # Linux
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        mapped = mmap.mmap(file.fileno(), length, flags, mmap.PROT_READ, offset=start)
    else:
        mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=start)
    return memoryview(mapped)[offset - start :]


def copy_range(source: IO[bytes], offset: int, count: int, target: IO[bytes]) -> int:
    """Copy bytes of a file to the current position of another file or stream; return how many there were.

    Linux copies from file to file within the kernel: nothing on file systems that share blocks, and
    no holes of sparse files.
    """
    copied = 0
    while copied < count:
        start = offset + copied
        part = _next_part(source, start, count - copied, target)
        if part < 0:
            copied -= part
            continue
        done = _copied_by_kernel(source, start, part, target)
        if done < part:
            done += _copied_in_chunks(source, start + done, part - done, target)
        copied += done
        if done < part:
            break
    return copied


def _next_part(source: IO[bytes], offset: int, count: int, target: IO[bytes]) -> int:
    """Return the number of bytes of data at an offset; for a hole, skip it, and return its size, negated.

    In the target, a hole is skipped only behind its end.
    """
    try:
        data = os.lseek(source.fileno(), offset, os.SEEK_DATA)
    except OSError as error:
        # ENXIO: no data follows, up to the end of the file
        at_end = error.errno == errno.ENXIO
        data = os.fstat(source.fileno()).st_size if at_end else offset
    except (AttributeError, io.UnsupportedOperation):  # Windows; a stream that is no file
        return count
    if data <= offset:
        end = os.lseek(source.fileno(), offset, os.SEEK_HOLE) if data == offset else offset
        return min(count, end - offset) if end > offset else count
    hole = min(count, data - offset)
    try:
        target.flush()
        position = target.tell()
        if os.fstat(target.fileno()).st_size > position:
            return count
        os.ftruncate(target.fileno(), position + hole)
        target.seek(position + hole)
    except (OSError, AttributeError):
        return count
    return -hole


def _copied_in_chunks(source: IO[bytes], offset: int, count: int, target: IO[bytes]) -> int:
    copied = 0
    source.seek(offset)
    while copied < count:
        chunk = source.read(min(count - copied, CHUNK_BYTES))
        if not chunk:
            break
        target.write(chunk)
        copied += len(chunk)
    return copied


def _copied_by_kernel(source: IO[bytes], offset: int, count: int, target: IO[bytes]) -> int:
    """Copy bytes within the kernel as far as it can, and return how many it copied."""
    if not hasattr(os, "copy_file_range") or not hasattr(target, "fileno"):
        return 0
    copied = 0
    try:
        target.flush()
        position = target.tell()
        while copied < count:
            part = os.copy_file_range(
                source.fileno(), target.fileno(), count - copied, offset + copied, position + copied
            )
            if not part:
                break
            copied += part
    except OSError as error:  # other streams, and file systems between which the kernel cannot copy
        if error.errno == errno.ENOSPC:
            raise
    if copied:
        target.seek(position + copied)
    return copied


def remove(path: Path) -> bool:
    """Remove a file, and return whether this succeeded: on Windows, not while it is open or mapped."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def why_not_writable(folder: Path) -> OSError | None:
    """Return the error that creating a file in a folder would raise; None if it can be created."""
    try:
        if not folder.is_dir():
            return FileNotFoundError(errno.ENOENT, "its folder does not exist", os.fspath(folder))
        if os.access(folder, os.W_OK | os.X_OK):
            return None
        if hasattr(os, "statvfs") and os.statvfs(folder).f_flag & os.ST_RDONLY:
            return OSError(errno.EROFS, "Read-only file system", os.fspath(folder))
    except OSError as error:
        return error
    return PermissionError(errno.EACCES, "no permission to write in the folder", os.fspath(folder))
