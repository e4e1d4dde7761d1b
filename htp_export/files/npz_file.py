"""Files of arrays that users give."""

from __future__ import annotations

import contextlib
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from htp_export.errors import FileError
from htp_export.files.filesystem import opened_plain

if TYPE_CHECKING:
    import numpy as np


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
        with _opened(self._file) as archive:
            self.headers = {
                name.removesuffix(".npy"): _header(archive, name) for name in archive.namelist()
            }
        if not self.headers:
            raise FileError(self._file, "holds no arrays")

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        import numpy as np

        if name not in self.headers:
            raise KeyError(name)
        if name not in self._arrays:
            with _opened(self._file) as archive:
                member = name if name in archive.namelist() else f"{name}.npy"
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
    except (
        ValueError,
        zipfile.BadZipFile,
        zipfile.LargeZipFile,
        EOFError,
        NotImplementedError,
        zlib.error,
    ) as error:
        raise FileError(
            file, "is no .npz file of plain arrays; write one with numpy.savez"
        ) from error


def _header(archive: zipfile.ZipFile, name: str) -> ArrayHeader:
    """Read the header of an array; a `ValueError` if it is none, or holds objects of Python."""
    from numpy.lib import format as npy

    with archive.open(name) as stream:
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError("objects are pickles")
    return ArrayHeader(tuple(shape), dtype)
