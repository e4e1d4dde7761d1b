"""Hashes of all that a model says, with its names and tags, and of all that a graph computes, without them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from htp_export.files.data_files import DataTensor

_PORTION = 1 << 18
"""Elements that are compared at a time: comparing copies them."""


def array_hash(array: npt.NDArray[Any]) -> bytes:
    """A hash of the numbers of an array, in their order; shape and type do not count.

    Examples:
        >>> array_hash(np.ones((2, 3))) == array_hash(np.ones(6)), array_hash(np.ones(6)) == array_hash(np.ones(5))
        (True, False)
    """
    return hashlib.blake2b(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, digest_size=16).digest()


def same_numbers(first: ir.TensorProtocol, second: ir.TensorProtocol) -> bool:
    """Whether a tensor is another one bit by bit, with its shape; cast, if the types differ.

    Nothing is read if both are the same bytes of a file. Otherwise they are read in portions, and not kept in memory.

    Examples:
        >>> one = ir.tensor(np.ones(3, np.float32))
        >>> same_numbers(one, ir.tensor(np.ones(3, np.float16))), same_numbers(one, ir.tensor(np.zeros(3, np.float32)))
        (True, False)
    """
    if first.shape != second.shape:
        return False
    if isinstance(first, DataTensor) and isinstance(second, DataTensor) and first.is_stored_as(second):
        return True
    try:
        kind = second.dtype.numpy()
        with np.errstate(all="ignore"):
            pairs = zip(_portions(first), _portions(second), strict=True)
            return all(part.astype(kind, copy=False).tobytes() == other.tobytes() for part, other in pairs)
    finally:
        for tensor in (first, second):
            if isinstance(tensor, DataTensor):
                tensor.release()


def is_filled(tensor: ir.TensorProtocol) -> bool:
    """Whether all elements of a tensor are equal numbers."""
    portions = _portions(tensor)
    first = next(portions, None)
    return first is None or all(bool((part == first[0]).all()) for part in (first, *portions))


def _portions(tensor: ir.TensorProtocol) -> Iterator[npt.NDArray[Any]]:
    flat = np.asarray(tensor.numpy()).reshape(-1)
    return (flat[start : start + _PORTION] for start in range(0, flat.size, _PORTION))


def content_hash(model: ir.Model) -> str:
    """Hash a model: graphs, functions, opsets, weights, and the tags of nodes.

    Names of files, descriptions, the metadata of the model, and where weights are stored make no difference. The result
    is ``sha256:`` and 64 hexadecimal digits.

    Examples:
        >>> relu = ir.node("Relu", [ir.val("x")])
        >>> model = ir.Model(ir.Graph(relu.inputs, relu.outputs, nodes=[relu], name="a"), ir_version=10)
        >>> renamed = ir.Model(ir.Graph([], [], nodes=[], name="b"), ir_version=10)
        >>> content_hash(model) == content_hash(model.clone()), content_hash(model) == content_hash(renamed)
        (True, False)
    """
    content = _Content()
    content.add("opsets", sorted(model.opset_imports.items()))
    content.graph(model.graph)
    for identifier in sorted(model.functions):
        function = model.functions[identifier]
        content.add("function", identifier, sorted(function.opset_imports.items()))
        for name in sorted(function.attributes):
            content.attribute(function.attributes[name])
        content.add("inputs", _names(function.inputs))  # which have no types in a file
        content.body(function.graph)
    return f"sha256:{content.digest}"


def body_hash(graph: ir.Graph, *, constants: bool = True) -> str:
    """Hash what the body of a function computes: all of it but names, metadata, types and shapes.

    Bodies whose nodes do the same in another order are told apart. External tensors are told by their place: reading
    them could take gigabytes. Values of ``Constant`` nodes outside of subgraphs count only with ``constants``.

    Examples:
        >>> def body(name, op):
        ...     x = ir.val(name)
        ...     node = ir.node(op, [x])
        ...     return ir.Graph([x], node.outputs, nodes=[node])
        >>> body_hash(body("a", "Relu")) == body_hash(body("b", "Relu"))
        True
        >>> body_hash(body("a", "Relu")) == body_hash(body("a", "Neg"))
        False
    """
    content = _Numbered()
    content.body(graph, constants=constants)
    return content.digest


def constant_hash(node: ir.Node) -> str:
    """Hash the value of a ``Constant`` node."""
    content = _Numbered()
    content.attributes(node)
    return content.digest


class _Content:
    """What is hashed, piece by piece."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def add(self, *pieces: Any) -> None:
        """Add pieces with an unambiguous text; bytes as they are."""
        for piece in pieces:
            data = piece if isinstance(piece, bytes) else repr(piece).encode(errors="surrogatepass")
            self._hash.update(f"{len(data)}:".encode())
            self._hash.update(data)

    def graph(self, graph: ir.Graph) -> None:
        self.add("graph", [_described(value) for value in graph.inputs])
        self.body(graph)

    def body(self, graph: ir.Graph) -> None:
        self.add("outputs", [value.name for value in graph.outputs])
        for name in sorted(graph.initializers):
            tensor = graph.initializers[name].const_value
            self.add("weight", name)
            if tensor is not None:
                self.tensor(tensor)
        for node in graph:
            self.node(node)

    def node(self, node: ir.Node) -> None:
        self.add("node", node.domain, node.op_type, node.overload, node.name or "", _names(node.inputs))
        self.add(_names(node.outputs), sorted(node.metadata_props.items()))
        self.attributes(node)

    def attributes(self, node: ir.Node) -> None:
        for name in sorted(node.attributes):
            self.attribute(node.attributes[name])

    def attribute(self, attribute: ir.Attr) -> None:
        self.add("attribute", attribute.name, attribute.type.name, attribute.ref_attr_name or "")
        value: Any = attribute.value
        if attribute.type == ir.AttributeType.GRAPH:
            self.graph(value)
        elif attribute.type == ir.AttributeType.GRAPHS:
            for graph in value:
                self.graph(graph)
        elif attribute.type == ir.AttributeType.TENSOR and value is not None:
            self.tensor(value)
        elif attribute.type == ir.AttributeType.TENSORS:
            for tensor in value:
                self.tensor(tensor)
        elif value is not None:
            proto = ir.to_proto(attribute)
            proto.ClearField("doc_string")
            self.add(proto.SerializeToString(deterministic=True))

    def tensor(self, tensor: ir.TensorProtocol) -> None:
        self.add(tensor.dtype.name, tuple(tensor.shape.numpy()))
        self.add([bytes(each) for each in _strings(tensor)] if tensor.dtype == ir.DataType.STRING else tensor.tobytes())


class _Numbered(_Content):
    """What is hashed where names do not count: values have numbers, in the order in which they appear."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[ir.Value, int] = {}

    def graph(self, graph: ir.Graph) -> None:
        self.body(graph)

    def body(self, graph: ir.Graph, *, constants: bool = True) -> None:
        self._number((*graph.inputs, *graph.initializers.values()))
        self.add("graph", len(graph.inputs))
        for value in graph.initializers.values():
            self.add("weight")
            if value.const_value is not None:
                self.tensor(value.const_value)
        for node in graph:
            if constants or node.op_identifier()[:2] != ("", "Constant"):
                self.node(node)
            else:
                self.add("constant", list(node.attributes))
            self._number(node.outputs)
        self.add("outputs", [self._numbers[value] for value in graph.outputs])

    def node(self, node: ir.Node) -> None:
        read = [None if value is None else self._numbers[value] for value in node.inputs]
        self.add("node", *node.op_identifier(), read, [bool(value.name) for value in node.outputs])
        self.attributes(node)

    def tensor(self, tensor: ir.TensorProtocol) -> None:
        if isinstance(tensor, ir.ExternalTensor):
            place = (os.fspath(tensor.path), tensor.offset, tensor.length)
            self.add("external", tensor.dtype.name, tuple(tensor.shape.numpy()), place)
        else:
            super().tensor(tensor)

    def _number(self, values: Iterable[ir.Value]) -> None:
        for value in values:
            self._numbers.setdefault(value, len(self._numbers))


def _strings(tensor: ir.TensorProtocol) -> Iterable[bytes]:
    return (each if isinstance(each, bytes) else str(each).encode() for each in tensor.numpy().flatten().tolist())


def _described(value: ir.Value) -> tuple[str | None, str, str]:
    return value.name, str(value.type), str(value.shape)


def _names(values: Iterable[ir.Value | None]) -> list[str | None]:
    """Names of inputs or outputs; missing ones at the end, and those without a name, are None or nothing."""
    names = [None if value is None else value.name or None for value in values]
    while names and names[-1] is None:
        names.pop()
    return names
