"""Files of arrays that users give."""

from __future__ import annotations

import contextlib
import io
import math
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from htp_export.errors import FileError
from htp_export.files.filesystem import opened_plain
from htp_export.format.bounds import LARGEST, MOST_DIMENSIONS

if TYPE_CHECKING:
    import numpy as np

_HEADER_BYTES = 16_384  # numpy reads no header of more than 10,000 characters
# bytes that one byte of deflate can stand for: https://zlib.net/zlib_tech.html
_MOST_DEFLATED = 1_032

_INVALID = (
    ValueError,
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    EOFError,
    RuntimeError,  # an encrypted file, and a compression that Python does not have
    zlib.error,
)
"""Errors of zipfile and of numpy for the contents of a file."""


class ArrayHeader(NamedTuple):
    """The shape and element type of an array, which stand before its values in an ``.npz`` file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class NpzArrays(Mapping[str, "np.ndarray[Any, Any]"]):
    """The arrays of an ``.npz`` file by name; each is unpacked when it is used: a small file may hold large ones.

    ``headers`` has the shape and element type of each; nothing is unpacked for them. A file that
    cannot be read or has other contents is a `FileError`: pickles are not loaded, because they may
    run code.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = Path(path)
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}
        self._members: dict[str, str] = {}
        self.headers: dict[str, ArrayHeader] = {}
        with _opened(self._file) as archive:
            for member in archive.infolist():
                name = member.filename.removesuffix(".npy")
                if name in self.headers:
                    raise ValueError("two arrays of one name")
                with archive.open(member) as stream:
                    self.headers[name] = _header(stream, _unpacked_bytes(member, self._file))
                self._members[name] = member.filename
        if not self.headers:
            raise FileError(self._file, "holds no arrays")

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        import numpy as np

        if name not in self.headers:
            raise KeyError(name)
        if name not in self._arrays:
            with _opened(self._file) as archive:
                member = archive.getinfo(self._members[name])
                with archive.open(member) as stream:
                    now = _header(stream, _unpacked_bytes(member, self._file))
                if now != self.headers[name]:  # it was compared with the input of a model
                    raise FileError(self._file, "was changed while it was read; try again")
                with archive.open(member) as stream:
                    self._arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
        return self._arrays[name]

    def __contains__(self, name: object) -> bool:  # that of Mapping gets the value
        return name in self.headers

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[zipfile.ZipFile]:
    """The archive; whatever is wrong with it becomes a `FileError`."""
    try:
        with opened_plain(file) as stream, zipfile.ZipFile(stream) as archive:
            yield archive
    except OSError as error:
        raise FileError.unreadable(file, error) from error
    except _INVALID as error:
        raise FileError(
            file, "is no .npz file of plain arrays; write one with numpy.savez"
        ) from error


def _unpacked_bytes(member: zipfile.ZipInfo, file: Path) -> int:
    """The size of a member of an archive; a `ValueError` if its compressed bytes cannot stand for so many."""
    most = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: _MOST_DEFLATED}.get(member.compress_type)
    if most is None:
        raise ValueError("numpy writes no other compression")
    if member.file_size > most * min(member.compress_size, file.stat().st_size):
        raise ValueError("a size that the file cannot have")
    return member.file_size


def _header(stream: IO[bytes], size: int) -> ArrayHeader:
    """Read the header of an array of so many bytes; a `ValueError` if it is none, or states another size.

    numpy allocates memory by the shape before it reads the first value.
    """
    from numpy.lib import format as npy

    head = io.BytesIO(stream.read(_HEADER_BYTES))
    try:
        version = npy.read_magic(head)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(head)
    except Exception as error:
        # of Python's parser and of numpy, which raise what the text leads to
        raise ValueError("no header of an array") from error
    if dtype.hasobject or dtype.fields is not None or dtype.subdtype is not None:
        raise ValueError("objects are pickles, and no tensor has fields")
    if len(shape) > MOST_DIMENSIONS or not all(
        type(dim) is int and 0 <= dim <= LARGEST for dim in shape
    ):
        raise ValueError("a shape that no array has")
    if math.prod(max(dim, 1) for dim in shape) > LARGEST:
        raise ValueError("a shape that numpy does not have, also for no values")
    if math.prod(shape) * max(dtype.itemsize, 1) != size - head.tell():
        raise ValueError("a shape for other values than those in the file")
    return ArrayHeader(tuple(shape), dtype)
