"""Memory that is mapped from files, and the release of its pages.

A page of a mapped file becomes resident when it is read, and remains so until the system needs
memory. Code that reads a large file once can release the pages that it has read, so that only the
current part is resident.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# MADV_PAGEOUT of Linux 5.4, <asm-generic/mman-common.h>; Python 3.11 does not define it
_PAGEOUT = 21


@dataclass(frozen=True)
class MappedFiles:
    """The address ranges of this process that are mapped from files, in order: start, end, and path of the file.

    The path of a deleted file ends with ``(deleted)``.
    """

    ranges: tuple[tuple[int, int, str], ...]

    @classmethod
    def now(cls) -> MappedFiles:
        """Return the currently mapped ranges; none on a system without ``/proc``."""
        try:
            text = os.fsdecode(Path("/proc/self/maps").read_bytes())
        except OSError:
            return cls(())
        ranges = []
        for line in text.splitlines():
            addresses, _, _, _, inode, *path = line.split(maxsplit=5)
            if inode != "0" and path:
                start, _, end = addresses.partition("-")
                ranges.append((int(start, 16), int(end, 16), path[0]))
        return cls(tuple(sorted(ranges)))

    def path_of(self, address: int, length: int) -> str | None:
        """Return the file from which a range of memory is mapped; None if it is not mapped from one file."""
        index = bisect_right(self.ranges, address, key=lambda mapped: mapped[0]) - 1
        if index < 0:
            return None
        _, end, path = self.ranges[index]
        return path if address + length <= end else None

    def release(self, path: str) -> None:
        """Release the pages of all ranges of a file."""
        for start, end, name in self.ranges:
            if name == path:
                release_pages(start, end - start)


def release_pages(address: int, length: int) -> None:
    """Release the pages of a range of memory that is mapped from a file; changes in them are kept.

    This requires Linux 5.4 or later, and a file that is writable or owned by the user. Otherwise,
    the pages remain until the system needs memory.
    """
    advise = _madvise()
    if advise is not None and length > 0:
        start = address - address % mmap.PAGESIZE
        advise(start, address + length - start, _PAGEOUT)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function
