"""Data files: the files beside a model with its external tensors.

The file of a name is resolved once, when the model is read: in the folder of the model or, if the
model is a symbolic link, in the folder of its target. No other file is opened.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
import onnx_ir as ir

from htp_export.errors import FileError
from htp_export.files.filesystem import CHUNK_BYTES, Identity
from htp_export.files.lazy_tensor import Slot, about, write_values
from htp_export.process.progress import counted


class DataFile:
    """A data file, and its identity when the model was read; None if it does not exist yet.

    ``shown`` is its name in errors, if that is not its path.
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
        """Record the identity of the existing file."""
        self._state = None
        with contextlib.suppress(OSError):
            if self.path.is_file():
                with self.path.open("rb") as file:
                    self._state = Identity.of(os.fstat(file.fileno()))

    def is_same(self, other: DataFile) -> bool:
        """Whether both are one file, with the same contents."""
        return self is other or (self._state is not None and self._state == other._state)

    def check(self) -> None:
        """Refuse a file that is missing, is too short, or was replaced after the model was read."""
        with self.opened():
            pass

    @contextlib.contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """Open the file, and check it before and after it is read."""
        try:
            file = self.path.open("rb", buffering=0)
        except FileNotFoundError:
            replaced = (
                " (it was there when the model was read; load the model again)"
                if self._state
                else ""
            )
            raise FileError(
                self._shown, f"is missing: weights of {self.model} lie in this file{replaced}"
            ) from None
        except OSError as error:
            problem = (
                f"cannot be read, and weights of {self.model} lie in it: {error.strerror or error}"
            )
            raise FileError(self._shown, problem) from error
        with file:
            self._check(file)
            yield file
            self._check(file)

    def _check(self, file: IO[bytes]) -> None:
        status = os.fstat(file.fileno())
        if status.st_size < self.needed:
            problem = f"is too short: it has {status.st_size:,} bytes, and the weights of {self.model} take "
            raise FileError(self._shown, f"{problem}{self.needed:,}")
        if self._state is None:  # it was not there when the model was read
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
            about(self),
        )
        return DataTensor, (*fields, self.file, self.base_dir)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the values, mapped from the file; read-only."""
        self.file.check()
        numbers = self._numbers  # another thread may release them
        if numbers is None:
            shape = tuple(self.shape.numpy())
            if self.dtype.bitwidth < 8:  # several in a byte
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
        if not self.nbytes:  # nothing can be mapped
            return np.empty(0, np.uint8)
        with self.file.opened() as file:
            return np.memmap(file, np.uint8, "r", self.offset or 0, (self.nbytes,)).view(np.ndarray)

    def tofile(self, file: IO[bytes]) -> None:
        """Copy the values to another file, in parts."""
        left = self.length or self.nbytes
        with self.file.opened() as source:
            source.seek(self.offset or 0)
            while left:
                part = source.read(min(left, CHUNK_BYTES))
                if not part:
                    raise FileError(
                        self.file.path, f"cannot be read: it ends within tensor {self.name!r}"
                    )
                file.write(part)
                left -= len(part)

    def is_stored_as(self, other: DataTensor) -> bool:
        """Whether both are the same numbers in one file, under whatever name, that did not change between them."""
        is_there = self.dtype == other.dtype and (self.offset or 0) == (other.offset or 0)
        return is_there and self.nbytes == other.nbytes and self.file.is_same(other.file)

    def release(self) -> None:
        """Forget the values; the file is closed when no array of them is in use."""
        self._numbers = None


def find_data(model: Path, location: str, what: str = "external data") -> tuple[Path, str]:
    """Return the folder of a data file, and its path relative to it; ``what`` it is, for messages.

    The model may be a symbolic link, as in the cache of the Hugging Face hub. A FileError if the
    location leads out of the folder of the model, and out of the folder of the target of the
    model's link, through ``..``, an absolute path, or a link.
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
            if not any(target.is_relative_to(allowed.resolve()) for allowed in homes):
                raise outside
            # a pipe would be waited for
            if target.exists() and not target.is_file() and not target.is_dir():
                raise FileError(
                    model, f"its {what} {location!r} is no plain file; it will not be read"
                )
            if target.exists():
                return (
                    (home, location)
                    if target.is_relative_to(home.resolve())
                    else (target.parent, target.name)
                )
    except (OSError, RuntimeError, ValueError) as error:
        # links in a circle, names that no file can have
        raise FileError(model, f"its {what} {location!r} cannot be found: {error}") from error
    return homes[0], location


def check_data(tensors: Iterable[ir.TensorProtocol | None]) -> None:
    """Refuse data files that are missing or too short, before another library reads them; the error names the file."""
    for file in {tensor.file for tensor in tensors if isinstance(tensor, DataTensor)}:
        file.check()


def place_data(
    slots: Sequence[Slot], stream: IO[bytes], data: Path, model: Path
) -> list[DataTensor]:
    """Write tensors into a new data file, those with the same storage once, and return the same tensors in that file.

    ``data`` is the final path of ``stream``.
    """
    places: dict[object, tuple[int, int]] = {}
    for slot in counted(slots, "weights"):
        key = _place(slot.tensor)
        if key not in places:
            start = stream.tell()
            write_values(slot.tensor, stream)
            places[key] = (start, stream.tell() - start)
    stream.flush()
    file = DataFile(data.absolute(), model, data, Identity.of(os.fstat(stream.fileno())))
    tensors = ((slot.tensor, *places[_place(slot.tensor)]) for slot in slots)
    return [
        DataTensor(
            data.name,
            at,
            length,
            tensor.dtype,
            tensor.shape.numpy(),
            about(tensor),
            file,
            file.path.parent,
        )
        for tensor, at, length in tensors
    ]


def _place(tensor: ir.TensorProtocol) -> object:
    """Return a key that is equal for tensors with the same storage."""
    if isinstance(tensor, ir.ExternalTensor):
        return (tensor.path, tensor.offset or 0, tensor.length or tensor.nbytes)
    return id(tensor)
