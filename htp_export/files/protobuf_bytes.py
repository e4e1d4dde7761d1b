"""Serialized ONNX models whose large weights are replaced by marks before protobuf reads or writes them.

Protobuf copies each message: a model of 400 MB would need twice the memory. So large values are cut
out of the bytes, and a mark of random bytes keeps the position of each. Only the fields that lead
to tensors are decoded here, as in https://protobuf.dev/programming-guides/encoding/; their numbers
are from ``onnx.proto``.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

LARGE_BYTES = 1 << 16
"""Values of at least this size are cut out; to copy smaller ones costs little time and memory."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # protobuf's wire types

_RAW_DATA = "raw_data"
# the fields of each message that lead to the bytes of tensors
_INSIDE: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 11: "graph"},
    "tensor": {9: _RAW_DATA},
}
_LONGEST_VARINT = 10  # bytes for 64 bits, with 7 bits in each
_DEEPEST = 100
"""The nesting limit of protobuf, which refuses deeper messages itself."""


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift, last = byte & 0x7F, 7, at + _LONGEST_VARINT
    while True:
        at += 1
        if at >= last:
            raise ValueError(f"an integer of more than {_LONGEST_VARINT} bytes before byte {at}")
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
    return _encode_varint(number << 3 | _BYTES) + _encode_varint(length)


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
            raise ValueError(f"unknown wire type {kind} at byte {start}")
        if at > end:
            raise ValueError(f"the field at byte {start} extends past the end of its message")
        yield _Slice(tag >> 3, start, payload, at)


_Bytes = TypeVar("_Bytes", bound=Sized)
"""Bytes, or a placeholder with the same length."""


class Marks:
    """Random byte strings that replace the ``raw_data`` of tensors, and contain the number of the tensor."""

    def __init__(self) -> None:
        self._mark = secrets.token_bytes(24)  # random, so that no file can contain it
        self._count = 0

    def new(self) -> bytes:
        """Return a mark for the next tensor."""
        self._count += 1
        return self._mark + (self._count - 1).to_bytes(8, "little")

    def number(self, data: bytes) -> int | None:
        """Return the number of the tensor of a mark; None for other bytes."""
        if len(data) != 32 or not data.startswith(self._mark):
            return None
        return int.from_bytes(data[24:], "little")

    def places(self, data: bytes) -> list[int]:
        """Return the offsets of the marks in a serialized model."""
        offsets = [data.find(self._mark)]
        while offsets[-1] >= 0:
            offsets.append(data.find(self._mark, offsets[-1] + 1))
        return offsets[:-1]


def without_values(data: memoryview, marks: Marks) -> tuple[onnx.ModelProto, list[tuple[int, int]]]:
    """Return a model with marks in place of large values, and the start and end of the values of each mark."""
    places = list[tuple[int, int]]()

    def is_large(start: int, end: int) -> bool:
        return end - start >= LARGE_BYTES

    def cut(start: int, end: int) -> bytes:
        places.append((start, end))
        return marks.new()

    try:
        pieces = _rewrite(data, "model", 0, len(data), is_large, cut) or [data]
        return onnx.ModelProto.FromString(b"".join(pieces)), places
    except IndexError as error:
        raise ValueError("it ends within a field") from error
    except DecodeError as error:
        raise ValueError(str(error)) from error


def with_values(
    proto: onnx.ModelProto, marks: Marks, values: Sequence[_Bytes]
) -> list[bytes | memoryview | _Bytes]:
    """Serialize a model into pieces, with the values of each mark, or a placeholder for them, in its place."""
    skeleton = proto.SerializeToString()
    places = marks.places(skeleton)

    def holds_mark(start: int, end: int) -> bool:
        index = bisect_left(places, start)
        return index < len(places) and places[index] < end

    def value(start: int, end: int) -> _Bytes:
        number = marks.number(skeleton[start:end])
        assert number is not None
        filled.append(number)
        return values[number]

    filled: list[int] = []
    whole = memoryview(skeleton)
    pieces = _rewrite(whole, "model", 0, len(skeleton), holds_mark, value) or [whole]
    assert len(filled) == len(places)
    return pieces


def _rewrite(
    data: memoryview,
    kind: str,
    start: int,
    end: int,
    wanted: Callable[[int, int], bool],
    change: Callable[[int, int], _Bytes],
    depth: int = 0,
) -> list[bytes | memoryview | _Bytes]:
    """Replace the ``raw_data`` of tensors in a message, and return its bytes in pieces; empty if unchanged.

    Visits initializers and attributes of nodes, including those in subgraphs and functions.

    Args:
        data: The serialized model.
        kind: The kind of the message, a key of ``_INSIDE``.
        start: The offset of the message.
        end: The end of the message.
        wanted: Whether to visit the message between two offsets, or to replace these bytes if they
            are ``raw_data``.
        change: Returns the replacement of the ``raw_data`` between two offsets.
        depth: The nesting depth of the message.
    """
    pieces: list[bytes | memoryview | _Bytes] = []
    copied_to = start
    for part in _fields(data, start, end):
        inside = _INSIDE[kind].get(part.number)
        if inside is None or data[part.start] & 7 != _BYTES or depth > _DEEPEST:
            continue
        if not wanted(part.payload, part.end):
            continue
        new: list[bytes | memoryview | _Bytes] = []
        if inside == _RAW_DATA:
            new.append(change(part.payload, part.end))
        else:
            new = _rewrite(data, inside, part.payload, part.end, wanted, change, depth + 1)
        if new:
            pieces += (data[copied_to : part.start], _head(part.number, total_size(new)), *new)
            copied_to = part.end
    if not pieces:
        return []
    return [*pieces, data[copied_to:end]]


def total_size(pieces: Sequence[Sized]) -> int:
    """Return the total length of pieces."""
    return sum(map(len, pieces))


@dataclass(frozen=True, slots=True)
class Weight:
    """The contents of an initializer: its size in bytes, a function that returns its ``raw_data``, and a new shape."""

    size: int
    read: Callable[[], bytes | memoryview]
    dims: Sequence[int] | None = None

    @classmethod
    def of(cls, data: bytes | memoryview) -> Weight:
        """Create a weight from its bytes."""
        return cls(len(data), lambda: data)

    def __len__(self) -> int:
        return self.size


class SerializedModel:
    """A serialized model whose message can be edited, while its large weights stay in the serialized bytes.

    ``proto`` has marks in place of weights, and is edited in place. ``weights``: name of an
    initializer → its contents, for initializers that have a placeholder in ``data``.
    """

    def __init__(self, data: bytes, weights: Mapping[str, Weight] | None = None) -> None:
        self.data, self._marks = data, Marks()
        view = memoryview(data)
        self.proto, places = without_values(view, self._marks)
        self._values = [Weight.of(view[start:end]) for start, end in places]
        graph = self.proto.graph
        for tensor in graph.initializer:
            weight = (weights or {}).get(tensor.name)
            if weight is not None:
                tensor.raw_data = self._marks.new()
                self._values.append(weight)
                if weight.dims is not None:
                    tensor.dims[:] = weight.dims
        self.inputs = [value.name for value in graph.input]
        self.outputs = [value.name for value in graph.output]
        self.initializers = {tensor.name for tensor in graph.initializer}

    def chunks(self) -> Iterator[bytes | memoryview]:
        """Return the bytes of the edited model; each weight is read only when its chunk is requested."""
        pieces = with_values(self.proto, self._marks, self._values)
        return (piece.read() if isinstance(piece, Weight) else piece for piece in pieces)


def subgraph_protos(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs in a node's attributes: branches and loop bodies."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def graph_protos(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and the graphs nested in it."""
    yield graph
    for node in graph.node:
        for inner in subgraph_protos(node):
            yield from graph_protos(inner)
