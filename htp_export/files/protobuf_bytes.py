"""Rewrite the nodes and metadata of a serialized ONNX model without copying its weights, or only its weights.

The TorchScript exporter hands over a model as bytes. Parsing that, changing the nodes and serializing it again would
copy every weight twice. This reads only the outermost fields of the message (a tag and a length each, see
https://protobuf.dev/programming-guides/encoding/), parses the nodes, and gives the file back as chunks: new nodes and
metadata between untouched slices of the old bytes, and weights that are not among those bytes in their places.

Field numbers are those of ``onnx.proto``, where they can never change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

__all__ = ["SerializedModel", "Weight", "rewrite_raw_data", "total_size"]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

_MODEL_IR_VERSION, _MODEL_GRAPH, _MODEL_METADATA, _MODEL_FUNCTIONS = 1, 7, 14, 25
_GRAPH_NODE, _GRAPH_NAME, _GRAPH_INITIALIZER, _GRAPH_INPUT, _GRAPH_OUTPUT = 1, 2, 5, 11, 12
_TENSOR_NAME, _TENSOR_RAW_DATA = 8, 9

_RAW_DATA = "raw_data"
_INSIDE: Mapping[str, Mapping[int, str]] = {  # the fields of each message that lead to the bytes of tensors
    "model": {_MODEL_GRAPH: "graph", _MODEL_FUNCTIONS: "function"},
    "graph": {_GRAPH_NODE: "node", _GRAPH_INITIALIZER: "tensor"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 11: "graph"},
    "tensor": {_TENSOR_RAW_DATA: _RAW_DATA},
}
_LONGEST_VARINT = 10
_DEEPEST = 100
"""The nesting limit of protobuf."""


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift, last = byte & 0x7F, 7, at + _LONGEST_VARINT
    while True:
        at += 1
        if at >= last:
            raise ValueError(f"a number of more than {_LONGEST_VARINT} bytes before byte {at}")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _head(number: int, length: int) -> bytes:
    """Return the bytes before the payload of a field."""
    return _encode_varint(number << 3 | _BYTES) + _encode_varint(length)


def _field(number: int, payload: bytes) -> bytes:
    return _head(number, len(payload)) + payload


class _Slice(NamedTuple):
    """One field of a message: its number, its offset, and the start and end of its payload."""

    number: int
    start: int
    payload: int
    end: int


def _fields(data: memoryview, at: int, end: int) -> Iterator[_Slice]:
    while at < end:
        start = at
        tag, at = _varint(data, at)
        kind, payload = tag & 7, at
        if kind == _BYTES:
            length, payload = _varint(data, at)
            at = payload + length
        elif kind == _VARINT:
            _, at = _varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {kind} at byte {start}")
        if at > end:
            raise ValueError(f"a field that begins at byte {start} runs past the end")
        yield _Slice(tag >> 3, start, payload, at)


_Bytes = TypeVar("_Bytes", bound=Sized)
"""Bytes, or a placeholder with the same length."""


def rewrite_raw_data(
    data: memoryview, wanted: Callable[[int, int], bool], change: Callable[[int, int], _Bytes]
) -> list[bytes | memoryview | _Bytes]:
    """Replace the ``raw_data`` of tensors in a serialized message.

    Visits tensors that are initializers or attributes of nodes, including those in subgraphs and functions.

    Args:
        data: The bytes of the message.
        wanted: Whether to visit the message between two offsets, or to replace it if it is ``raw_data``.
        change: Returns the replacement of the ``raw_data`` between two offsets.

    Returns:
        The message in pieces, one after the other.

    Raises:
        ValueError: The bytes are no such message.
    """
    try:
        return _rewrite(data, "model", 0, len(data), wanted, change) or [data]
    except IndexError as error:
        raise ValueError("it ends within a field") from error


def _rewrite(
    data: memoryview,
    kind: str,
    start: int,
    end: int,
    wanted: Callable[[int, int], bool],
    change: Callable[[int, int], _Bytes],
    depth: int = 0,
) -> list[bytes | memoryview | _Bytes]:
    """Do the same for the bytes between two offsets; empty if nothing changes."""
    pieces: list[bytes | memoryview | _Bytes] = []
    done = start
    for part in _fields(data, start, end):
        inside = _INSIDE[kind].get(part.number)
        if inside is None or data[part.start] & 7 != _BYTES or not wanted(part.payload, part.end) or depth > _DEEPEST:
            continue
        new: list[bytes | memoryview | _Bytes] = []
        if inside == _RAW_DATA:
            new.append(change(part.payload, part.end))
        else:
            new = _rewrite(data, inside, part.payload, part.end, wanted, change, depth + 1)
        if new:
            pieces += (data[done : part.start], _head(part.number, total_size(new)), *new)
            done = part.end
    return [*pieces, data[done:end]] if pieces else []


def total_size(pieces: Sequence[Sized]) -> int:
    """Return the total length of pieces."""
    return sum(map(len, pieces))


@dataclass(frozen=True, slots=True)
class Weight:
    """The contents of an initializer.

    Attributes:
        size: Size in bytes.
        read: Returns the bytes in the layout of ``raw_data``; called when they are written.
        dims: Its shape; None if the initializer already has it.
    """

    size: int
    read: Callable[[], bytes | memoryview]
    dims: Sequence[int] | None = None

    @classmethod
    def of(cls, data: bytes) -> Weight:
        """Create a weight from its bytes."""
        return cls(len(data), lambda: data)

    def __len__(self) -> int:
        return self.size


_Piece = bytes | memoryview | Weight


@dataclass
class SerializedModel:
    """A serialized model whose nodes can be changed.

    Args:
        data: The bytes of a ``ModelProto``.
        weights: Name of an initializer → its contents, for those whose ``raw_data`` in ``data`` is a placeholder.

    Attributes:
        nodes: The nodes of the main graph, parsed; change them in place.
        functions: The model's functions, parsed; change them in place.
        inputs: Names of the graph's inputs.
        outputs: Names of the graph's outputs.
        initializers: Names of the initializers.
        ir_version: The file's IR version; set it to write another.
        graph_name: The graph's name; set it to write another.
        metadata: Model metadata to add; keys that the file has already must not be among them.

    Raises:
        ValueError: The bytes are no ``ModelProto``.
    """

    data: bytes
    weights: Mapping[str, Weight] = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    functions: list[onnx.FunctionProto] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    initializers: set[str] = field(default_factory=set)
    ir_version: int = 0
    graph_name: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            self._parse()
        except (IndexError, DecodeError, UnicodeDecodeError) as error:
            raise ValueError(str(error)) from error

    def _parse(self) -> None:
        self._view = memoryview(self.data)
        self._model = list(_fields(self._view, 0, len(self.data)))
        self._graph: list[_Slice] = []
        for part in self._model:
            if part.number == _MODEL_GRAPH:
                self._graph = list(_fields(self._view, part.payload, part.end))
            elif part.number == _MODEL_IR_VERSION:
                self.ir_version = _varint(self._view, part.payload)[0]
            elif part.number == _MODEL_FUNCTIONS:
                self.functions.append(onnx.FunctionProto.FromString(self.data[part.payload : part.end]))
        for part in self._graph:
            self._read(part)

    def _read(self, part: _Slice) -> None:
        if part.number == _GRAPH_NODE:
            self.nodes.append(onnx.NodeProto.FromString(self.data[part.payload : part.end]))
        elif part.number == _GRAPH_NAME:
            self.graph_name = self._text(part)
        elif part.number == _GRAPH_INITIALIZER:
            self.initializers.add(self._tensor_name(part))
        elif part.number in (_GRAPH_INPUT, _GRAPH_OUTPUT):
            name = onnx.ValueInfoProto.FromString(self.data[part.payload : part.end]).name
            (self.inputs if part.number == _GRAPH_INPUT else self.outputs).append(name)

    def _text(self, part: _Slice) -> str:
        return self.data[part.payload : part.end].decode()

    def _tensor_name(self, part: _Slice) -> str:
        pieces = _fields(self._view, part.payload, part.end)
        return next((self._text(piece) for piece in pieces if piece.number == _TENSOR_NAME), "")

    def chunks(self) -> Iterator[bytes | memoryview]:
        """Iterate over the bytes of the changed model."""
        graph = _merged(self._graph_pieces())
        functions = iter(self.functions)
        for part in self._model:
            if part.number == _MODEL_GRAPH:
                size = sum(len(piece) for piece in graph)
                yield _head(_MODEL_GRAPH, size)
                yield from map(_read, graph)
            elif part.number == _MODEL_IR_VERSION:
                yield _encode_varint(_MODEL_IR_VERSION << 3 | _VARINT) + _encode_varint(self.ir_version)
            elif part.number == _MODEL_FUNCTIONS:
                yield _field(_MODEL_FUNCTIONS, next(functions).SerializeToString())
            else:
                yield self._view[part.start : part.end]
        for key, value in self.metadata.items():
            yield _field(_MODEL_METADATA, onnx.StringStringEntryProto(key=key, value=value).SerializeToString())

    def _graph_pieces(self) -> Iterator[_Piece]:
        nodes = iter(self.nodes)
        for part in self._graph:
            if part.number == _GRAPH_NODE:
                yield _field(_GRAPH_NODE, next(nodes).SerializeToString())
            elif part.number == _GRAPH_NAME:
                yield _field(_GRAPH_NAME, self.graph_name.encode())
            elif part.number == _GRAPH_INITIALIZER and (name := self._tensor_name(part)) in self.weights:
                yield from self._filled(part, self.weights[name])
            else:
                yield self._view[part.start : part.end]

    def _filled(self, initializer: _Slice, weight: Weight) -> list[_Piece]:
        """Return an initializer with its weight instead of the placeholder."""
        proto = onnx.TensorProto.FromString(self.data[initializer.payload : initializer.end])
        proto.ClearField("raw_data")
        if weight.dims is not None:
            proto.dims[:] = weight.dims
        pieces = [proto.SerializeToString(), _head(_TENSOR_RAW_DATA, len(weight)), weight]
        return [_head(_GRAPH_INITIALIZER, total_size(pieces)), *pieces]


def _merged(pieces: Iterator[_Piece]) -> list[_Piece]:
    """Join small neighbouring pieces; large ones, the weights, are not copied."""
    result: list[_Piece] = []
    small: list[bytes | memoryview] = []
    for piece in pieces:
        if len(piece) < 65536:
            small.append(_read(piece))
            continue
        result.extend((b"".join(small), piece) if small else (piece,))
        small = []
    return [*result, b"".join(small)] if small else result


def _read(piece: _Piece) -> bytes | memoryview:
    return piece.read() if isinstance(piece, Weight) else piece
