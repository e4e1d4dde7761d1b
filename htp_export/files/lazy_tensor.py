"""Weights that stay in their ONNX file until their values are used, and iteration over the tensors of a model.

Only the values stay in the file; protobuf reads and writes everything else (`protobuf_bytes`).
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
    """A tensor of a model, and a function that replaces it there by another tensor.

    ``initializer``: whether it is an initializer, and not a node attribute.
    """

    tensor: ir.TensorProtocol
    put: Callable[[ir.TensorProtocol], None]
    initializer: bool

    @property
    def external(self) -> bool:
        """Whether the values of the tensor are in a data file."""
        return isinstance(self.tensor, ir.ExternalTensor)

    @property
    def path(self) -> str:
        """The path of the data file; ``""`` for a tensor in memory or in the ONNX file."""
        return self.tensor.path if isinstance(self.tensor, ir.ExternalTensor) else ""


def descriptive_fields(tensor: ir.TensorProtocol) -> dict[str, Any]:
    """Return the name, documentation and metadata of a tensor, as keyword arguments for a copy of it."""
    return {
        "name": tensor.name or "",
        "doc_string": tensor.doc_string,
        "metadata_props": {**tensor.metadata_props},
    }


def slots(model: ir.Model) -> Iterator[Slot]:
    """Iterate over the tensors of a model: initializers of all graphs, and tensors in node attributes."""
    graphs: dict[ir.Graph, None] = {}
    in_attributes: list[Slot] = []
    _add_slots(model.graph, graphs, in_attributes)
    for function in model.functions.values():
        _add_slots(function, graphs, in_attributes)
    for graph in graphs:
        for value in graph.initializers.values():
            if value.const_value is not None:
                put = functools.partial(setattr, value, "const_value")
                yield Slot(value.const_value, put, True)
    yield from in_attributes


def _add_slots(
    owner: ir.Graph | ir.Function, graphs: dict[ir.Graph, None], in_attributes: list[Slot]
) -> None:
    """Add a graph and its subgraphs, and the tensors in attributes of their nodes, in one walk.

    Files are read and written with several of these walks: the iterators of onnx_ir take ten times as long.
    """
    if isinstance(owner, ir.Graph):
        graphs[owner] = None
    for node in owner:
        bodies: list[ir.Graph] = []
        for name, attribute in node.attributes.data.items():
            kind = attribute.type
            if attribute.is_ref():
                continue
            if kind == ir.AttributeType.TENSOR:
                # not `as_tensor`, which looks for each attribute of the protocol
                in_attributes.append(Slot(attribute.value, _attribute_setter(node, name), False))
            elif kind == ir.AttributeType.GRAPH:
                bodies.append(attribute.as_graph())
            elif kind == ir.AttributeType.GRAPHS:
                bodies.extend(attribute.as_graphs())
        for body in bodies:
            _add_slots(body, graphs, in_attributes)


def _attribute_setter(node: ir.Node, name: str) -> Callable[[ir.TensorProtocol], None]:
    original = node.attributes[name]

    def put(tensor: ir.TensorProtocol) -> None:
        attribute = original
        if tensor is not original.value:
            attribute = ir.AttrTensor(name, tensor, doc_string=original.doc_string)
        node.attributes[name] = attribute

    return put


_MESSAGE_BYTES = (1 << 31) - 1
"""Protobuf does not read larger messages."""

_STANDARD = frozenset(("dims", "data_type", "name", "doc_string", "metadata_props", "raw_data"))


class _OpenFile:
    """A file that stays open, so that it can be read after it was replaced or deleted."""

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
                "was overwritten after it was read, and its weights are lost; load it again",
            )
        done = 0
        try:
            while done < len(into):
                count = os.preadv(self.number, [into[done : done + (1 << 30)]], offset + done)
                if count == 0:
                    raise OSError("unexpected end of file")
                done += count
        except OSError as error:
            raise FileError.unreadable(self.path, error) from error


class FileTensor(ir.TensorProtoTensor):
    """A tensor whose values stay in an ONNX file, and are read each time they are used.

    While an array of the values is in use, further reads return the same memory. ``header`` is the
    tensor without its values, which are the bytes from ``offset`` to ``end`` of the file.
    """

    __slots__ = ("_array", "_file", "_length", "_offset")

    def __init__(self, header: onnx.TensorProto, file: _OpenFile, offset: int, end: int) -> None:
        super().__init__(header)
        self._file, self._offset, self._length = file, offset, end - offset
        self._array: weakref.ref[np.ndarray[Any, Any]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ir.TensorProtoTensor, (self.raw,)  # the file is not open in another process

    def __repr__(self) -> str:
        return f"{self._repr_base()}(name={self.name!r}, file={os.fspath(self._file.path)!r}, offset={self._offset})"

    @property
    def header(self) -> onnx.TensorProto:
        """The protobuf message of the tensor without its values."""
        return self._proto

    @property
    def raw(self) -> onnx.TensorProto:
        """A protobuf message of the tensor with its values; a copy."""
        whole = onnx.TensorProto(raw_data=self.tobytes())
        whole.MergeFrom(self._proto)
        return whole

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the values as a read-only array."""
        if self.dtype.bitwidth < 8:  # a byte contains several values
            return ir.TensorProtoTensor(self.raw).numpy()
        plain = self.dtype.numpy().newbyteorder("<")
        return self._bytes().view(plain).reshape(tuple(self.shape.numpy()))

    def tobytes(self) -> bytes:
        """Return the bytes of the values in the file."""
        return self._bytes().tobytes()

    def tofile(self, file: IO[bytes]) -> None:
        """Copy the values to another file in chunks."""
        buffer = memoryview(bytearray(min(CHUNK_BYTES, self._length)))
        for start in range(0, self._length, CHUNK_BYTES):
            chunk = buffer[: min(CHUNK_BYTES, self._length - start)]
            self._file.read(self._offset + start, chunk)
            file.write(chunk)

    def _bytes(self) -> np.ndarray[Any, Any]:
        array = self._array() if self._array is not None else None
        if array is None:
            array = np.empty(self._length, np.uint8)
            self._file.read(self._offset, array.data)
            array.flags.writeable = False
            self._array = weakref.ref(array)
        return array


def with_mark(tensor: ir.TensorProtocol, marks: Marks) -> ir.TensorProtocol | None:
    """Return a copy of a tensor with a mark instead of its values; None for a small, external or string tensor."""
    if (
        isinstance(tensor, ir.ExternalTensor)
        or tensor.dtype == ir.DataType.STRING
        or tensor.nbytes < LARGE_BYTES
    ):
        return None
    if isinstance(tensor, ir.TensorProtoTensor):
        return _hollow(tensor, marks)
    mark = ir.tensor(np.frombuffer(marks.new(), np.uint8))
    shape = ir.Shape(tensor.shape.numpy())
    return ir.LazyTensor(lambda: mark, tensor.dtype, shape, **descriptive_fields(tensor))


def _hollow(tensor: ir.TensorProtoTensor, marks: Marks) -> ir.TensorProtoTensor | None:
    """Return a copy of a tensor with a mark as its ``raw_data``; None if its values are in another field."""
    if isinstance(tensor, FileTensor):
        header = onnx.TensorProto()
        header.CopyFrom(tensor.header)
    else:
        fields = {field.name: value for field, value in tensor.raw.ListFields()}
        if not fields.keys() <= _STANDARD or len(fields.pop("raw_data", b"")) != tensor.nbytes:
            return None
        # built from fields: after a copy and ClearField, protobuf would keep the memory
        header = onnx.TensorProto(**fields)
    header.raw_data = marks.new()
    return _tensor_of(header, tensor.metadata_props)


def _tensor_of(message: onnx.TensorProto, metadata: Mapping[str, str]) -> ir.TensorProtoTensor:
    """Return a tensor with metadata that is not in its message, because onnx_ir would write both."""
    del message.metadata_props[:]
    tensor = ir.TensorProtoTensor(message)
    tensor.metadata_props.update(metadata)
    return tensor


def viewed(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """Return another tensor object with the same values; only the values of small tensors are copied."""
    if not isinstance(tensor, ir.serde.TensorProtoTensor):
        return copy.copy(tensor)
    if type(tensor) is ir.TensorProtoTensor and tensor.nbytes < LARGE_BYTES:
        message = onnx.TensorProto()
        message.CopyFrom(tensor.raw)
        return _tensor_of(message, tensor.metadata_props)
    fields = descriptive_fields(tensor)
    shape = ir.Shape(tensor.shape)
    if tensor.dtype == ir.DataType.STRING:
        return ir.StringTensor(list(tensor.numpy().flat), shape=shape, **fields)
    return ir.LazyTensor(lambda: tensor, tensor.dtype, shape, **fields)


class HollowModel:
    """The message of an ONNX file with marks instead of its large weights.

    ``places``: the start and end in the file of the values of each mark, by its number.
    """

    def __init__(
        self,
        proto: onnx.ModelProto,
        marks: Marks,
        file: _OpenFile,
        places: Sequence[tuple[int, int]],
    ) -> None:
        self.proto = proto
        self._marks, self._file, self._places = marks, file, places
        self._unused = set(range(len(places)))

    @property
    def is_whole(self) -> bool:
        """Whether `tensor` has returned every large weight of the file."""
        return not self._unused

    def tensor(self, hollow: ir.TensorProtocol) -> ir.TensorProtocol | None:
        """Return the tensor of a mark; None for a tensor without a mark."""
        if not isinstance(hollow, ir.TensorProtoTensor) or not hollow.raw.HasField("raw_data"):
            return None
        number = self._marks.number(hollow.raw.raw_data)
        if number is None:
            return None
        self._unused.discard(number)
        header = onnx.TensorProto()
        header.CopyFrom(hollow.raw)
        header.ClearField("raw_data")
        start, end = self._places[number]
        tensor = FileTensor(header, self._file, start, end)
        tensor.metadata_props.update(hollow.metadata_props)
        fields = {field.name for field, _ in header.ListFields()}
        if fields <= _STANDARD and tensor.nbytes == end - start:
            return tensor
        # the message is inconsistent: keep it as it is, so that its consumers report the error
        return ir.TensorProtoTensor(tensor.raw)


def read_hollow(path: Path) -> HollowModel | None:
    """Read an ONNX file without its large weights; None for a small file, for a pipe, and on Windows."""
    # on Windows there is no preadv, and an open file could not be replaced
    if not hasattr(os, "preadv") or not path.is_file():
        return None
    file = _OpenFile(path)
    if file.size < LARGE_BYTES:
        return None
    marks = Marks()
    mapped = mmap.mmap(file.number, file.size, access=mmap.ACCESS_READ)
    proto, places = without_values(memoryview(mapped), marks)
    return HollowModel(proto, marks, file, places)


class _Values:
    """A placeholder for the bytes of a tensor in a message that is being written."""

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
        # numpy writes an array that is not contiguous, such as a view, one element at a time
        for strip in _strips(tensor.numpy()):
            ir.Tensor(strip, dtype=tensor.dtype).tofile(stream)
        return
    # the protocol does not require this method, but all tensors of onnx_ir and torch have it
    if hasattr(tensor, "tofile"):
        tensor.tofile(stream)
    else:
        stream.write(tensor.tobytes())


_ROWS, _COLUMNS = 256, 128
"""The block of a transposed matrix that is copied at a time: it fits into the cache."""

_LINE_BYTES = 64
"""A line of the cache."""


def _strips(array: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Yield an array in C order; a transposed matrix in strips of rows, one after the other in the same memory.

    Copied block by block, a transposed matrix takes a quarter of the time that numpy takes for the whole.
    """
    is_turned = array.ndim == 2 and 0 < array.strides[0] < array.strides[1]
    if not is_turned:
        yield np.ascontiguousarray(array)
        return
    rows, columns = array.shape
    strip = np.empty((min(rows, _ROWS), columns), array.dtype)
    # The columns in memory are often a power of 2 apart: they would displace each other in the cache.
    # In the block they are one line further apart.
    padding = _LINE_BYTES // array.itemsize
    block = np.empty((min(columns, _COLUMNS), _ROWS + padding), array.dtype)
    for start in range(0, rows, _ROWS):
        source = array[start : start + _ROWS]
        count = len(source)
        for first in range(0, columns, _COLUMNS):
            part = source[:, first : first + _COLUMNS]
            turned = block[: part.shape[1], :count]
            turned[:] = part.T
            strip[:count, first : first + _COLUMNS] = turned.T
        yield strip[:count]


def write_filled(
    proto: onnx.ModelProto, marks: Marks, tensors: Sequence[ir.TensorProtocol], stream: IO[bytes]
) -> None:
    """Write a model with the values of its tensors in place of marks; a ValueError if it is too large."""
    pieces = with_values(proto, marks, [*map(_Values, tensors)])
    size = total_size(pieces)
    if size > _MESSAGE_BYTES:
        raise ValueError(
            f"an ONNX file of {size} bytes is too large for protobuf; write it with external data"
        )
    for piece in pieces:
        if isinstance(piece, _Values):
            piece.write(stream)
        else:
            stream.write(piece)
