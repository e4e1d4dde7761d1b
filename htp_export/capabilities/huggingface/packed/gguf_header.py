"""Check the numbers in the header of a GGUF file before ``gguf`` reads it.

``GGUFReader`` loops over as many elements as an array claims to have, also past the end of the
file. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from htp_export.errors import FileError
from htp_export.files.filesystem import opened_plain

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Type of a value → bytes."""

_STRING, _ARRAY = 8, 9  # further types of values
_MOST_DIMENSIONS = 4  # GGML_MAX_DIMS, the limit of ggml


def check_gguf_header(file: Path) -> None:
    """Refuse (`FileError`) a file whose header is incomplete, or claims more elements than the file has bytes for."""
    try:
        with (
            opened_plain(file) as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            _Header(content).check()
    except OSError as error:
        raise FileError.unreadable(file, error) from error
    except (struct.error, ValueError) as error:  # mmap raises a ValueError for an empty file
        raise FileError(file, f"cannot be read as GGUF: {error}") from error


class _Header:
    """A cursor in the header."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = 0
        self._order = "<"

    def check(self) -> None:
        """Read the header to its end; raise a `ValueError` or `struct.error` if it is invalid."""
        if self._content[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._number("I")
        if version & 0xFFFF == 0:  # written on a machine of the other byte order
            self._order = ">"
            version = int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not supported")
        tensors, entries = self._number("Q"), self._number("Q")
        # Each entry has bytes: with a false count, the loop ends at the end of the file.
        for _ in range(entries):
            self._skip_text()
            self._skip_value(self._number("I"))
        for _ in range(tensors):
            self._skip_text()
            dimensions = self._number("I")
            if dimensions > _MOST_DIMENSIONS:
                raise ValueError(f"a tensor has {dimensions} dimensions")
            self._skip(8 * dimensions + 4 + 8)  # sizes, type, and offset of its data

    def _number(self, kind: str) -> int:
        (number,) = struct.unpack_from(self._order + kind, self._content, self._at)
        self._at += struct.calcsize(self._order + kind)
        return int(number)

    def _skip(self, size: int) -> None:
        if size > len(self._content) - self._at:
            raise ValueError("its header is incomplete, or counts more than the file holds")
        self._at += size

    def _skip_text(self) -> None:
        self._skip(self._number("Q"))

    def _skip_value(self, kind: int) -> None:
        if kind != _ARRAY:
            self._skip_values(kind, 1)
            return
        kind = self._number("I")
        if kind == _ARRAY:
            raise ValueError("an array of arrays, which no model has")
        self._skip_values(kind, self._number("Q"))

    def _skip_values(self, kind: int, count: int) -> None:
        if kind == _STRING:
            for _ in range(count):
                self._skip_text()
        elif kind in _SIZES:
            self._skip(_SIZES[kind] * count)
        else:
            raise ValueError(f"a value is of the unknown type {kind}")
