"""Data files: the files beside a model that contain its external tensors.

The location of a tensor is resolved once, when the model is read: in the folder of the model or, if
the model is a symbolic link, in the folder of its target. No other file is opened.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
import onnx_ir as ir

from htp_export.errors import FileError
from htp_export.files.filesystem import Identity, begin_flush, copy_range, read_or_mapped
from htp_export.files.lazy_tensor import Slot, descriptive_fields, write_values
from htp_export.process.progress import counted


class DataFile:
    """A data file with its identity when the model was read, or no identity if it does not exist yet.

    ``shown`` is its name in error messages, by default its path. ``needed`` is the size in bytes
    that the tensors of the model require.
    """

    def __init__(
        self, path: Path, model: Path, shown: Path | None = None, state: Identity | None = None
    ) -> None:
        self.path, self.model, self._shown = path, model, shown or path
        self.needed = 0
        self._state = state
        if state is None:
            self.note()

    def note(self) -> None:
        """Record the current identity of the file."""
        self._state = None
        with contextlib.suppress(OSError):
            if self.path.is_file():
                with self.path.open("rb") as file:
                    self._state = Identity.of(os.fstat(file.fileno()))

    def is_same(self, other: DataFile) -> bool:
        """Return whether both are the same file with the same contents."""
        return self is other or (self._state is not None and self._state == other._state)

    def check(self) -> None:
        """Refuse a file that is missing, is too short, or was replaced after the model was read."""
        with self.opened():
            pass

    @contextlib.contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """Open the file for a ``with`` block, and check it before and after the block."""
        try:
            file = self.path.open("rb", buffering=0)
        except FileNotFoundError:
            problem = f"is missing: it contains weights of {self.model}"
            if self._state is not None:
                problem += " (it existed when the model was read; load the model again)"
            raise FileError(self._shown, problem) from None
        except OSError as error:
            problem = (
                f"contains weights of {self.model}, and cannot be read: {error.strerror or error}"
            )
            raise FileError(self._shown, problem) from error
        with file:
            self._check(file)
            yield file
            self._check(file)

    def _check(self, file: IO[bytes]) -> None:
        status = os.fstat(file.fileno())
        if status.st_size < self.needed:
            problem = f"is too short: it has {status.st_size:,} bytes, and the weights of {self.model} need "
            raise FileError(self._shown, f"{problem}{self.needed:,}")
        if self._state is None:  # the file did not exist when the model was read
            self._state = Identity.of(status)
        if self._state != Identity.of(status):
            raise FileError(
                self._shown, f"was changed after {self.model} was read; load the model again"
            )


class DataTensor(ir.ExternalTensor):
    """An external tensor whose file is checked before it is read.

    onnx_ir refuses files with several hard links. Here, `find_data` has checked the folder of the
    file.
    """

    __slots__ = ("_numbers", "file")

    def __init__(
        self,
        location: str,
        offset: int | None,
        length: int | None,
        dtype: ir.DataType,
        shape: Sequence[int],
        facts: Mapping[str, Any],
        file: DataFile,
        base_dir: str | os.PathLike[str],
    ) -> None:
        base_dir = os.fspath(base_dir)
        super().__init__(
            location, offset, length, dtype, shape=ir.Shape(shape), base_dir=base_dir, **facts
        )
        self.file = file
        self._numbers: np.ndarray[Any, Any] | None = None
        file.needed = max(file.needed, (offset or 0) + (length or self.nbytes))

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (
            self.location,
            self.offset,
            self.length,
            self.dtype,
            tuple(self.shape.numpy()),
            descriptive_fields(self),
        )
        return DataTensor, (*fields, self.file, self.base_dir)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the values as a read-only array that is mapped from the file."""
        numbers = self._numbers  # read once: another thread may release them
        if numbers is not None:
            self.file.check()
            return numbers
        shape = tuple(self.shape.numpy())
        if self.dtype.bitwidth < 8:  # a byte contains several values
            header = onnx.TensorProto(
                data_type=int(self.dtype), dims=shape, raw_data=self.tobytes()
            )
            numbers = ir.TensorProtoTensor(header).numpy()
        else:
            plain = self.dtype.numpy().newbyteorder("<")
            numbers = self._bytes().view(plain).reshape(shape)
        self._numbers = numbers
        return numbers

    def __array__(self, dtype: Any = None) -> np.ndarray[Any, Any]:
        return self.numpy().__array__(dtype)

    def tobytes(self) -> bytes:
        """Return the bytes of the values in the file."""
        return self._bytes().tobytes()

    def _bytes(self) -> np.ndarray[Any, Any]:
        with self.file.opened() as file:
            stored = read_or_mapped(file, self.offset or 0, self.nbytes)
        return np.frombuffer(stored, np.uint8)

    def tofile(self, file: IO[bytes]) -> None:
        """Copy the values to another file, without holding them in memory."""
        count = self.length or self.nbytes
        with self.file.opened() as source:
            copied = copy_range(source, self.offset or 0, count, file)
        if copied < count:
            raise FileError(self.file.path, f"cannot be read: it ends within tensor {self.name!r}")

    def within(self, file: DataFile) -> DataTensor:
        """Return this tensor in a data file with another name and the same contents."""
        shape = self.shape.numpy()
        fields = descriptive_fields(self)
        return DataTensor(
            file.path.name,
            self.offset,
            self.length,
            self.dtype,
            shape,
            fields,
            file,
            file.path.parent,
        )

    def described_as(self, tensor: ir.TensorProtocol) -> DataTensor:
        """Return this tensor with the name and the metadata of another one."""
        shape, fields = self.shape.numpy(), descriptive_fields(tensor)
        place = (os.fspath(self.location), self.offset, self.length)
        return DataTensor(*place, self.dtype, shape, fields, self.file, self.base_dir)

    def is_stored_as(self, other: DataTensor) -> bool:
        """Return whether both tensors are the same bytes of the same unchanged file, with the same type."""
        same_type = self.dtype == other.dtype and self.nbytes == other.nbytes
        same_offset = (self.offset or 0) == (other.offset or 0)
        return same_type and same_offset and self.file.is_same(other.file)

    def release(self) -> None:
        """Drop the mapped values; the file is closed when no array of them is in use."""
        self._numbers = None


def find_data(model: Path, location: str, what: str = "external data") -> tuple[Path, str]:
    """Resolve the location of external data: return a folder, and the path of the file in it.

    The model may be a symbolic link, as in the cache of the Hugging Face hub. The file must be in
    the folder of the model or in the folder of the target of its link; otherwise, through ``..``,
    an absolute path or a link, it is a FileError. ``what`` describes the file in messages.
    """
    outside = FileError(
        model, f"its {what} {location!r} lies outside its folder; it will not be read"
    )
    if Path(location).is_absolute() or Path(os.path.normpath(location)).parts[:1] == ("..",):
        raise outside
    try:
        homes = list(dict.fromkeys((model.parent.absolute(), model.resolve().parent)))
        for home in homes:
            target = (home / location).resolve()
            if target.is_symlink():  # a cycle: Path.resolve raises no error since Python 3.13
                raise OSError(errno.ELOOP, "the symbolic links form a cycle")
            if not any(target.is_relative_to(allowed.resolve()) for allowed in homes):
                raise outside
            if not target.exists():
                continue
            # to open a pipe would block
            if not target.is_file() and not target.is_dir():
                raise FileError(
                    model, f"its {what} {location!r} is not a regular file; it will not be read"
                )
            if target.is_relative_to(home.resolve()):
                return home, location
            return target.parent, target.name
    except (OSError, RuntimeError, ValueError) as error:
        # links that form a cycle, and invalid file names
        raise FileError(model, f"its {what} {location!r} cannot be found: {error}") from error
    return homes[0], location


def check_data(tensors: Iterable[ir.TensorProtocol | None]) -> None:
    """Refuse data files that are missing, too short or changed, before another library reads them."""
    for file in {tensor.file for tensor in tensors if isinstance(tensor, DataTensor)}:
        file.check()


def place_data(
    slots: Sequence[Slot], stream: IO[bytes], data: Path, model: Path, *, is_synced: bool = False
) -> list[DataTensor]:
    """Write tensors into a new data file, and return external tensors that refer to it.

    Tensors with the same storage are written once. ``data`` is the final path of ``stream``.
    ``is_synced``: whether the file will be on the disk before it gets this path.
    """
    positions: dict[object, tuple[int, int]] = {}
    flushed = 0
    for slot in counted(slots, "weights"):
        key = _storage_key(slot.tensor)
        if key not in positions:
            start = stream.tell()
            write_values(slot.tensor, stream)
            positions[key] = (start, stream.tell() - start)
        if is_synced:
            flushed = begin_flush(stream, flushed)
    stream.flush()
    file = DataFile(data.absolute(), model, data, Identity.of(os.fstat(stream.fileno())))
    placed: list[DataTensor] = []
    for slot in slots:
        tensor = slot.tensor
        offset, length = positions[_storage_key(tensor)]
        placed.append(
            DataTensor(
                data.name,
                offset,
                length,
                tensor.dtype,
                tensor.shape.numpy(),
                descriptive_fields(tensor),
                file,
                file.path.parent,
            )
        )
    return placed


def _storage_key(tensor: ir.TensorProtocol) -> object:
    """Return a key that is equal for tensors with the same storage."""
    if isinstance(tensor, ir.ExternalTensor):
        return (tensor.path, tensor.offset or 0, tensor.length or tensor.nbytes)
    return id(tensor)
