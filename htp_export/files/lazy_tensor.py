"""The places of tensors in a model, and weights that stay in their ONNX file until their values are used.

What else a tensor says, in whatever node, subgraph or function, protobuf reads and writes
(`protobuf_bytes`).
"""

from __future__ import annotations

import copy
import functools
import mmap
import os
import stat
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
import onnx_ir as ir

from htp_export.errors import FileError
from htp_export.files.filesystem import CHUNK_BYTES
from htp_export.files.protobuf_bytes import (
    LARGE_BYTES,
    Marks,
    total_size,
    with_values,
    without_values,
)


@dataclass(frozen=True)
class Slot:
    """A place of a tensor in a model, and a function that replaces the tensor."""

    tensor: ir.TensorProtocol
    put: Callable[[ir.TensorProtocol], None]
    initializer: bool

    @property
    def external(self) -> bool:
        """Whether the tensor is in a data file."""
        return isinstance(self.tensor, ir.ExternalTensor)

    @property
    def path(self) -> str:
        """The path of the data file; ``""`` for a tensor in memory or in the ONNX file."""
        return self.tensor.path if isinstance(self.tensor, ir.ExternalTensor) else ""


def about(tensor: ir.TensorProtocol) -> dict[str, Any]:
    """What a tensor says besides its type and values, as arguments for another one."""
    return {
        "name": tensor.name or "",
        "doc_string": tensor.doc_string,
        "metadata_props": {**tensor.metadata_props},
    }


def slots(model: ir.Model) -> Iterator[Slot]:
    """Iterate over the tensors of a model: initializers of all graphs, and tensors in node attributes."""
    graphs = [
        *model.graphs(),
        *(graph for function in model.functions.values() for graph in function.subgraphs()),
    ]
    for graph in graphs:
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield Slot(
                    value.const_value, functools.partial(setattr, value, "const_value"), True
                )
    for nodes in (
        model.graph.all_nodes(),
        *(function.all_nodes() for function in model.functions.values()),
    ):
        for node in nodes:
            for attribute in list(node.attributes.values()):
                if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                    yield Slot(
                        attribute.as_tensor(), _attribute_setter(node, attribute.name), False
                    )


def _attribute_setter(node: ir.Node, name: str) -> Callable[[ir.TensorProtocol], None]:
    first = node.attributes[name]

    def put(tensor: ir.TensorProtocol) -> None:
        same = tensor is first.value
        node.attributes[name] = (
            first if same else ir.AttrTensor(name, tensor, doc_string=first.doc_string)
        )

    return put


_MESSAGE_BYTES = (1 << 31) - 1
"""Protobuf reads no more."""

_STANDARD = frozenset(("dims", "data_type", "name", "doc_string", "metadata_props", "raw_data"))


class _OpenFile:
    """A file that is kept open, so that it can be read after it was replaced or deleted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.number)
        state = os.fstat(self.number)
        self.size = state.st_size if stat.S_ISREG(state.st_mode) else 0
        self._written = state.st_mtime_ns

    def read(self, offset: int, into: memoryview) -> None:
        """Read bytes from an offset into a buffer; a FileError if the file was written to since it was opened."""
        state = os.fstat(self.number)
        if (state.st_size, state.st_mtime_ns) != (self.size, self._written):
            raise FileError(
                self.path,
                "was written over after it was read, and its weights are gone; load it again",
            )
        done = 0
        try:
            while done < len(into):
                count = os.preadv(self.number, [into[done : done + (1 << 30)]], offset + done)
                if count == 0:
                    raise OSError("it ends too soon")
                done += count
        except OSError as error:
            raise FileError.unreadable(self.path, error) from error


class FileTensor(ir.TensorProtoTensor):
    """A tensor whose values are in an ONNX file, and are read each time they are used.

    While an array of the values is in use, further requests return the same memory. The header is
    the tensor without its values; these begin at ``offset`` of the file and end before ``end``.
    """

    __slots__ = ("_array", "_file", "_length", "_offset")

    def __init__(self, header: onnx.TensorProto, file: _OpenFile, offset: int, end: int) -> None:
        super().__init__(header)
        self._file, self._offset, self._length = file, offset, end - offset
        self._array: weakref.ref[np.ndarray[Any, Any]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ir.TensorProtoTensor, (self.raw,)  # another process has not this file open

    def __repr__(self) -> str:
        return f"{self._repr_base()}(name={self.name!r}, file={os.fspath(self._file.path)!r}, offset={self._offset})"

    @property
    def header(self) -> onnx.TensorProto:
        """Everything but the values."""
        return self._proto

    @property
    def raw(self) -> onnx.TensorProto:
        """The tensor with its values as a protobuf message; a copy."""
        whole = onnx.TensorProto(raw_data=self.tobytes())
        whole.MergeFrom(self._proto)
        return whole

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the values; read-only, like those of every tensor from a file."""
        if self.dtype.bitwidth < 8:  # several in a byte
            return ir.TensorProtoTensor(self.raw).numpy()
        plain = self.dtype.numpy().newbyteorder("<")
        return self._bytes().view(plain).reshape(tuple(self.shape.numpy()))

    def tobytes(self) -> bytes:
        """The values as they are in the file."""
        return self._bytes().tobytes()

    def tofile(self, file: IO[bytes]) -> None:
        """Copy the values to another file, a part at a time."""
        buffer = memoryview(bytearray(min(CHUNK_BYTES, self._length)))
        for start in range(0, self._length, CHUNK_BYTES):
            part = buffer[: min(CHUNK_BYTES, self._length - start)]
            self._file.read(self._offset + start, part)
            file.write(part)

    def _bytes(self) -> np.ndarray[Any, Any]:
        held = self._array() if self._array is not None else None
        if held is None:
            held = np.empty(self._length, np.uint8)
            self._file.read(self._offset, held.data)
            held.flags.writeable = False
            self._array = weakref.ref(held)
        return held


def replace_with(tensor: ir.TensorProtocol, marks: Marks) -> ir.TensorProtocol | None:
    """Return a copy of a tensor with a mark instead of its values; None for a tensor that protobuf can write."""
    if (
        isinstance(tensor, ir.ExternalTensor)
        or tensor.dtype == ir.DataType.STRING
        or tensor.nbytes < LARGE_BYTES
    ):
        return None
    if isinstance(tensor, ir.TensorProtoTensor):
        return _hollow(tensor, marks)
    mark = ir.tensor(np.frombuffer(marks.new(), np.uint8))
    return ir.LazyTensor(
        lambda: mark, tensor.dtype, ir.Shape(tensor.shape.numpy()), **about(tensor)
    )


def _hollow(tensor: ir.TensorProtoTensor, marks: Marks) -> ir.TensorProtoTensor | None:
    if isinstance(tensor, FileTensor):
        header = onnx.TensorProto()
        header.CopyFrom(tensor.header)
    else:
        fields = {field.name: value for field, value in tensor.raw.ListFields()}
        if not fields.keys() <= _STANDARD or len(fields.pop("raw_data", b"")) != tensor.nbytes:
            return None
        # no copy that is cleared: protobuf would keep the memory
        header = onnx.TensorProto(**fields)
    header.raw_data = marks.new()
    return _tensor_of(header, tensor.metadata_props)


def _tensor_of(message: onnx.TensorProto, metadata: Mapping[str, str]) -> ir.TensorProtoTensor:
    """A tensor with some metadata, which is not in its message: onnx_ir writes both."""
    del message.metadata_props[:]
    tensor = ir.TensorProtoTensor(message)
    tensor.metadata_props.update(metadata)
    return tensor


def viewed(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """The same weights in another object; only small ones are copied, as they are written."""
    if not isinstance(tensor, ir.serde.TensorProtoTensor):
        return copy.copy(tensor)
    if type(tensor) is ir.TensorProtoTensor and tensor.nbytes < LARGE_BYTES:
        message = onnx.TensorProto()
        message.CopyFrom(tensor.raw)
        return _tensor_of(message, tensor.metadata_props)
    if tensor.dtype == ir.DataType.STRING:
        return ir.StringTensor(
            list(tensor.numpy().flat), shape=ir.Shape(tensor.shape), **about(tensor)
        )
    return ir.LazyTensor(lambda: tensor, tensor.dtype, ir.Shape(tensor.shape), **about(tensor))


class HollowModel:
    """The model of a file without its large weights, and the start and end of the values of each mark in the file."""

    def __init__(
        self,
        proto: onnx.ModelProto,
        marks: Marks,
        file: _OpenFile,
        places: Sequence[tuple[int, int]],
    ) -> None:
        self.proto = proto
        self._marks, self._file, self._places = marks, file, places
        self._left = set(range(len(places)))

    @property
    def is_whole(self) -> bool:
        """Return whether `tensor` was called for every weight."""
        return not self._left

    def tensor(self, hollow: ir.TensorProtocol) -> ir.TensorProtocol | None:
        """Return the tensor of a mark; None for a tensor without a mark."""
        if not isinstance(hollow, ir.TensorProtoTensor) or not hollow.raw.HasField("raw_data"):
            return None
        number = self._marks.number(hollow.raw.raw_data)
        if number is None:
            return None
        self._left.discard(number)
        header = onnx.TensorProto()
        header.CopyFrom(hollow.raw)
        header.ClearField("raw_data")
        tensor = FileTensor(header, self._file, *self._places[number])
        tensor.metadata_props.update(hollow.metadata_props)
        start, end = self._places[number]
        if {
            field.name for field, _ in header.ListFields()
        } <= _STANDARD and tensor.nbytes == end - start:
            return tensor
        # what it says of itself is not so; whoever uses it will see
        return ir.TensorProtoTensor(tensor.raw)


def read_hollow(path: Path) -> HollowModel | None:
    """Read an ONNX file without its large weights; None for a small file, or one that is no plain file."""
    # Windows, where no file that is open can be replaced, either
    if not hasattr(os, "preadv") or not path.is_file():
        return None
    file = _OpenFile(path)
    if file.size < LARGE_BYTES:
        return None
    marks = Marks()
    proto, places = without_values(
        memoryview(mmap.mmap(file.number, file.size, access=mmap.ACCESS_READ)), marks
    )
    return HollowModel(proto, marks, file, places)


class _Values:
    """Placeholder for the bytes of a tensor in a message that is being written."""

    def __init__(self, tensor: ir.TensorProtocol) -> None:
        self._tensor = tensor

    def __len__(self) -> int:
        return self._tensor.nbytes

    def write(self, stream: IO[bytes]) -> None:
        start = stream.tell()
        write_values(self._tensor, stream)
        if stream.tell() - start != len(self):
            raise ValueError(
                f"tensor {self._tensor.name!r} has {stream.tell() - start} bytes, not {len(self)}"
            )


def write_values(tensor: ir.TensorProtocol, stream: IO[bytes]) -> None:
    """Write the values of a tensor in the layout of ``raw_data`` and external data."""
    if isinstance(tensor, ir.LazyTensor) and tensor.dtype.bitwidth >= 8:
        # It may be a view, and numpy writes what is not contiguous one element at a time.
        tensor = ir.Tensor(np.ascontiguousarray(tensor.numpy()), dtype=tensor.dtype)
    # not in the protocol, but every tensor of onnx_ir and torch has it
    if hasattr(tensor, "tofile"):
        tensor.tofile(stream)
    else:
        stream.write(tensor.tobytes())


def write_filled(
    proto: onnx.ModelProto, marks: Marks, tensors: Sequence[ir.TensorProtocol], stream: IO[bytes]
) -> None:
    """Write a model, and in place of each mark the values of its tensor; a ValueError if it is too large."""
    pieces = with_values(proto, marks, [*map(_Values, tensors)])
    if (size := total_size(pieces)) > _MESSAGE_BYTES:
        raise ValueError(
            f"an ONNX file of {size} bytes is more than protobuf reads; give it external data"
        )
    for piece in pieces:
        if isinstance(piece, _Values):
            piece.write(stream)
        else:
            stream.write(piece)
