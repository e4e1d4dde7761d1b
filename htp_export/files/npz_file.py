"""``.npz`` files of arrays, which are not trusted."""

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

_HEADER_BYTES = 16_384  # enough: numpy refuses a header of more than 10,000 characters
# the largest compression factor of deflate: https://zlib.net/zlib_tech.html
_MOST_DEFLATED = 1_032

_INVALID = (
    ValueError,
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    EOFError,
    RuntimeError,  # an encrypted file, or a compression that Python does not support
    zlib.error,
)
"""Errors that zipfile and numpy raise for invalid contents."""


class ArrayHeader(NamedTuple):
    """The shape and element type of an array, which precede its values in an ``.npz`` file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class NpzArrays(Mapping[str, "np.ndarray[Any, Any]"]):
    """The arrays of an ``.npz`` file by name, each decompressed when it is used: they may be larger than the file.

    ``headers`` has the shape and element type of each array, which are read without decompressing
    the values. A file that cannot be read or has other contents is a `FileError`; pickles are not
    loaded, because they may run code.
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
            raise FileError(self._file, "contains no arrays")

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        import numpy as np

        if name not in self.headers:
            raise KeyError(name)
        if name not in self._arrays:
            with _opened(self._file) as archive:
                member = archive.getinfo(self._members[name])
                with archive.open(member) as stream:
                    header = _header(stream, _unpacked_bytes(member, self._file))
                if header != self.headers[name]:  # the first header was checked by the caller
                    raise FileError(self._file, "was changed while it was read; try again")
                with archive.open(member) as stream:
                    self._arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
        return self._arrays[name]

    def __contains__(self, name: object) -> bool:  # the method of Mapping would read the array
        return name in self.headers

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[zipfile.ZipFile]:
    """Open an archive for a ``with`` block; errors of its contents become a `FileError`."""
    try:
        with opened_plain(file) as stream, zipfile.ZipFile(stream) as archive:
            yield archive
    except OSError as error:
        raise FileError.unreadable(file, error) from error
    except _INVALID as error:
        raise FileError(
            file, "is not an .npz file of plain arrays; write one with numpy.savez"
        ) from error


def _unpacked_bytes(member: zipfile.ZipInfo, file: Path) -> int:
    """Return the uncompressed size of a member; a `ValueError` if its compressed data is too short for it."""
    factors = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: _MOST_DEFLATED}
    factor = factors.get(member.compress_type)
    if factor is None:
        raise ValueError("a compression that numpy does not write")
    if member.file_size > factor * min(member.compress_size, file.stat().st_size):
        raise ValueError("an uncompressed size that the file cannot have")
    return member.file_size


def _header(stream: IO[bytes], size: int) -> ArrayHeader:
    """Read the header of an array; a `ValueError` if it is invalid, or if its shape does not match the size.

    ``size`` is the number of bytes of the header and the values. numpy would allocate memory for
    the shape before it reads the first value.
    """
    from numpy.lib import format as npy

    head = io.BytesIO(stream.read(_HEADER_BYTES))
    try:
        version = npy.read_magic(head)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(head)
    except Exception as error:
        # Python's parser and numpy raise various errors for an invalid text
        raise ValueError("not the header of an array") from error
    if dtype.hasobject or dtype.fields is not None or dtype.subdtype is not None:
        raise ValueError("an array of objects, which are pickles, or of fields")
    if len(shape) > MOST_DIMENSIONS:
        raise ValueError("too many dimensions")
    for dim in shape:
        if type(dim) is not int or not 0 <= dim <= LARGEST:
            raise ValueError("a dimension that no array can have")
    # numpy refuses such a shape even if another dimension is 0
    if math.prod(max(dim, 1) for dim in shape) > LARGEST:
        raise ValueError("a shape that numpy does not support")
    if math.prod(shape) * max(dtype.itemsize, 1) != size - head.tell():
        raise ValueError("a shape that does not match the size of the values")
    return ArrayHeader(tuple(shape), dtype)
