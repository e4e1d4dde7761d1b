"""Obstacles in the place of a file: folders, links, pipes, devices, sockets and files of others; and their state.

Each obstacle is a function that makes it at a path; what it needs besides lies in a folder of its own.
"""

import contextlib
import os
import signal
import socket
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PRECIOUS = "years of work"


def folder(path: Path, _: Path) -> None:
    path.mkdir()
    (path / "precious.txt").write_text(PRECIOUS)
    (path / "empty").mkdir()


def link_to_folder(path: Path, elsewhere: Path) -> None:
    folder(elsewhere / "folder", elsewhere)
    path.symlink_to(elsewhere / "folder")


def mounted(path: Path, elsewhere: Path) -> None:
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", path], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("this user mounts nothing")
    with (elsewhere / "mounts").open("a") as mounts:
        mounts.write(f"{path}\n")
    (path / "precious.txt").write_text(PRECIOUS)


def pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


def null_device(path: Path, _: Path) -> None:
    _device(path, stat.S_IFCHR, 1, 3)


def block_device(path: Path, _: Path) -> None:
    _device(path, stat.S_IFBLK, 7, 250)  # a loop device that nobody has set up


def _device(path: Path, kind: int, major: int, minor: int) -> None:
    try:
        os.mknod(path, kind | 0o666, os.makedev(major, minor))
    except OSError:
        pytest.skip("this user makes no devices")


def a_socket(path: Path, _: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # its name is short
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(before)


def file(path: Path, _: Path) -> None:
    path.write_text(PRECIOUS)


def link_to_file(path: Path, elsewhere: Path) -> None:
    (elsewhere / "precious.txt").write_text(PRECIOUS)
    path.symlink_to(elsewhere / "precious.txt")


def broken_link(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere / "nothing")


_ALL = (
    folder,
    link_to_folder,
    mounted,
    pipe,
    null_device,
    block_device,
    a_socket,
    file,
    link_to_file,
    broken_link,
)
OBSTACLES: dict[str, Callable[[Path, Path], None]] = {made.__name__: made for made in _ALL}

NO_FILE = ("folder", "link_to_folder", "mounted", "a_socket", "block_device")
"""Those that no file takes the place of, whoever wants it."""

WRITTEN_TO = ("pipe", "null_device")
"""Those that are written to like a file, and stay."""


def state(path: Path) -> Any:
    """Type, identity and contents of an entry of a folder, and of the target of a link; None if there is none."""
    if not os.path.lexists(path):  # also below a file
        return None
    found = os.lstat(path)
    told: list[Any] = [found.st_mode, found.st_ino, found.st_rdev]
    if stat.S_ISLNK(found.st_mode):
        told += [str(path.readlink()), state(path.parent / path.readlink())]
    elif stat.S_ISREG(found.st_mode):
        told.append(path.read_bytes())
    elif stat.S_ISDIR(found.st_mode):
        told.append({inside.name: state(inside) for inside in sorted(path.iterdir())})
    return told


@contextlib.contextmanager
def drained(path: Path) -> Iterator[None]:
    """Read what is written into a pipe, for as long as a ``with`` block lasts."""
    if not path.is_fifo():
        yield
        return
    ended = threading.Event()
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def read() -> None:
        while not ended.wait(0.005):
            with contextlib.suppress(BlockingIOError):
                os.read(reader, 1 << 20)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        os.close(reader)


class Late(BaseException):
    """Something was waited for that does not come; nothing catches it."""


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise `Late` in a ``with`` block that takes longer, also one that waits for a pipe."""

    def late(*_: object) -> None:
        raise Late(f"nothing came within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def unmount(elsewhere: Path) -> None:
    """Unmount what `mounted` has mounted."""
    mounts = elsewhere / "mounts"
    for path in mounts.read_text().splitlines() if mounts.exists() else ():
        subprocess.run(["umount", "-l", path], check=True)
