"""Hashes: of a whole model with names and tags, of a graph's computation, of regions' structure."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from htp_export.files.data_files import DataTensor
from htp_export.model.graph_facts import GraphFacts
from htp_export.model.strips import strips
from htp_export.shapes.schemas import settings

_PORTION = 1 << 18
"""Elements that are compared at a time, 1 MB of float32: a comparison copies them."""


def array_hash(array: npt.NDArray[Any]) -> bytes:
    """A hash of the numbers of an array, in their order; without shape and type.

    Examples:
        >>> array_hash(np.ones((2, 3))) == array_hash(np.ones(6)), array_hash(np.ones(6)) == array_hash(np.ones(5))
        (True, False)
    """
    digest = hashlib.blake2b(digest_size=16)
    for rows in _in_order(array):
        digest.update(rows.reshape(-1).view(np.uint8).data)
    return digest.digest()


def _in_order(array: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """The array in parts along its first axis, each with its numbers in order in memory."""
    if array.flags.c_contiguous or array.ndim < 2:
        yield np.ascontiguousarray(array)
        return
    for rows in strips(array):
        yield np.ascontiguousarray(array[rows])


def same_numbers(first: ir.TensorProtocol, second: ir.TensorProtocol) -> bool:
    """Whether two tensors are equal bit by bit, and in shape; the first is cast if types differ.

    Nothing is read if both are the same bytes of a file. Otherwise they are read in portions, and
    released afterwards.

    Examples:
        >>> one = ir.tensor(np.ones(3, np.float32))
        >>> same_numbers(one, ir.tensor(np.ones(3, np.float16))), same_numbers(one, ir.tensor(np.zeros(3, np.float32)))
        (True, False)
    """
    if first.shape != second.shape:
        return False
    if (
        isinstance(first, DataTensor)
        and isinstance(second, DataTensor)
        and first.is_stored_as(second)
    ):
        return True
    try:
        dtype = second.dtype.numpy()
        with np.errstate(all="ignore"):
            for part, other in zip(_portions(first), _portions(second), strict=True):
                if part.astype(dtype, copy=False).tobytes() != other.tobytes():
                    return False
        return True
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

    It does not depend on file names, descriptions, metadata of the model, and the place of weights.
    The result is ``sha256:`` and 64 hexadecimal digits.

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
        content.add("inputs", _names(function.inputs))  # a file has no types for them
        content.body(function.graph)
    return f"sha256:{content.digest}"


def body_hash(graph: ir.Graph, *, constants: bool = True) -> str:
    """Hash the computation of a function's body, without names, metadata, types and shapes.

    The order of nodes counts. External tensors are identified by their place in a file: reading
    them could take gigabytes. Values of ``Constant`` nodes outside subgraphs count only with
    ``constants``.

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
        self.add(
            "graph", [(value.name, str(value.type), str(value.shape)) for value in graph.inputs]
        )
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
        self.add(
            "node", node.domain, node.op_type, node.overload, node.name or "", _names(node.inputs)
        )
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
        if tensor.dtype == ir.DataType.STRING:
            self.add(_strings(tensor))
        else:
            self.add(tensor.tobytes())


class _Numbered(_Content):
    """Hashes without names: values have numbers, in the order in which they appear."""

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


def _strings(tensor: ir.TensorProtocol) -> list[bytes]:
    return [_encoded(text) for text in tensor.numpy().flatten().tolist()]


def _encoded(text: Any) -> bytes:
    return bytes(text) if isinstance(text, bytes) else str(text).encode()


def _names(values: Iterable[ir.Value | None]) -> list[str | None]:
    """Names of inputs or outputs: None for one without a name; at the end, these are left out."""
    names = [None if value is None else value.name or None for value in values]
    while names and names[-1] is None:
        names.pop()
    return names


_LATER = "later"
"""The text of an input whose producer follows: a loop through a function has no valid order."""

_MOST_NUMBERS = 16
"""Integers of a setting (axes, shapes, pads), at most: settings count with their values."""

_MEASURED: Mapping[str, tuple[int, ...]] = {
    "QuantizeLinear": (1, 2), "DequantizeLinear": (1, 2), "MatMulInteger": (2, 3), "ConvInteger": (2, 3),
    "QLinearMatMul": (1, 2, 4, 5, 6, 7), "QLinearConv": (1, 2, 4, 5, 6, 7),
}  # fmt: skip
"""Operator → inputs that are scales and zero points: measured as weights are, not settings."""


class Hasher:
    """Hashes of parts of a graph.

    Names, metadata, values of weights, and the order of independent nodes do not count.
    """

    def __init__(self, facts: GraphFacts) -> None:
        self._facts = facts
        self._own: dict[ir.Node, str] = {}
        self._leaves: dict[ir.Value | None, str] = {None: "-"}

    def part(self, nodes: Sequence[ir.Node], entering: Mapping[ir.Value, str] | None = None) -> str:
        """The hash of a part of a graph; producers come before consumers.

        ``entering``: the texts of some values from outside. Without one, an input counts neither
        with its type and shape, nor as another one than the other inputs.
        """
        below: dict[ir.Value | None, str] = {}
        below.update((entering or {}).items())
        members = frozenset(nodes)
        for node in nodes:
            read = [below.get(value) or self._entering(value, members) for value in node.inputs]
            digest = _digest((self._node(node), *read))
            for place, value in enumerate(node.outputs):
                below[value] = f"{digest}.{place}"
        return _digest(sorted(below.values()))

    def region(self, path: str) -> str:
        """The hash of a module's region; ``""`` is the whole model."""
        index = self._facts.tagged.index
        return self.part(index.below.get(path, ()) if path else index.nodes)

    def step(self, node: ir.Node) -> str:
        """The hash of a node with its direct inputs: constants, and operators of its producers."""
        return _digest((self._node(node), *map(self._read, node.inputs)))

    def _read(self, value: ir.Value | None) -> str:
        """The text of an input: of a constant that of `_leaf`, and otherwise its producer."""
        if value is None or self._facts.tagged.index.initializer(value) is not None:
            return self._entering(value, ())
        producer = value.producer()
        if producer is None:
            return self._entering(value, ())
        return f"{producer.domain}.{producer.op_type}.{value.index()}"

    def _node(self, node: ir.Node) -> str:
        """The hash of a node's operator and attributes."""
        if node not in self._own:
            written = settings(node, self._facts.tagged.model.opset_imports)
            counted = [attribute for attribute in written if attribute.name != "doc_string"]
            texts = (f"{attribute.name}={self._attribute(attribute)}" for attribute in counted)
            self._own[node] = _digest((node.domain, node.op_type, *texts))
        return self._own[node]

    def _entering(self, value: ir.Value | None, members: Container[ir.Node | None]) -> str:
        """The text of an input that no earlier node of the part computes."""
        if value is not None and value.producer() in members:
            return _LATER
        if value not in self._leaves:
            self._leaves[value] = self._leaf(value)  # type: ignore[arg-type] # None is there
        return self._leaves[value]

    def _leaf(self, value: ir.Value) -> str:
        """The text of a value from outside: a weight by type and shape, a setting by its value."""
        source = self._facts.tagged.index.initializer(value)
        if source is None:
            return "constant" if self._facts.is_constant(value) else "in"
        array = None if _was_measured(value) else self._facts.array(value)
        if array is not None and array.size <= _MOST_NUMBERS:
            is_setting = array.dtype.kind in "iub" or array.ndim == 0
            if is_setting:
                return f"{array.dtype}{array.shape}{array.reshape(-1).tolist()}"
        return f"{self._facts.dtype(source)}{self._facts.shape(source)}"

    def _attribute(self, attribute: ir.Attr) -> str:
        if attribute.is_ref():
            return f"ref {attribute.ref_attr_name}"
        if attribute.type == ir.AttributeType.GRAPH:
            return self.part(list(attribute.as_graph()))
        if attribute.type == ir.AttributeType.GRAPHS:
            return _digest(self.part(list(graph)) for graph in attribute.as_graphs())
        if attribute.type == ir.AttributeType.TENSOR:
            tensor: ir.TensorProtocol = attribute.value  # as_tensor() checks every method of it
            small = tensor.size <= _MOST_NUMBERS and tensor.dtype != ir.DataType.STRING
            numbers = tensor.numpy().reshape(-1).tolist() if small else ""
            return f"{tensor.dtype}{tuple(tensor.shape.numpy())}{numbers}"
        if attribute.type in (ir.AttributeType.TENSORS, ir.AttributeType.SPARSE_TENSOR):
            return str(attribute.type)
        return repr(attribute.value)


def _was_measured(value: ir.Value) -> bool:
    """Whether a constant is a scale or zero point of quantization."""
    for use in value.uses():
        if use.idx in _MEASURED.get(use.node.op_type, ()):
            return True
        if use.node.op_type == "Mul":
            others = [factor for factor in use.node.inputs if factor is not None]
            if any(factor is not value and _is_dynamic_scale(factor) for factor in others):
                return True  # the factor is the scale of a weight
    return False


def _is_dynamic_scale(value: ir.Value) -> bool:
    """Whether a value is the scale of a tensor that is quantized while the model runs."""
    maker = value.producer()
    return maker is not None and maker.op_type == "DynamicQuantizeLinear" and value.index() == 1


def _digest(parts: Iterable[str]) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()
