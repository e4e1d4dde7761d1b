"""The check of a model that was read: edges, names, operators, attributes, tensors.

onnx_ir reads models that no runtime loads, and later steps would fail without the name of a node or
tensor. Only requirements of the ONNX specification that ONNX Runtime enforces are checked, in one
pass over the nodes; no weights are read.
"""

from __future__ import annotations

import graphlib
import math
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import onnx
import onnx_ir as ir

_STANDARD = ("", "ai.onnx")
_FIELDS = {
    ir.DataType.FLOAT: "float_data",
    ir.DataType.COMPLEX64: "float_data",
    ir.DataType.DOUBLE: "double_data",
    ir.DataType.COMPLEX128: "double_data",
    ir.DataType.INT64: "int64_data",
    ir.DataType.UINT64: "uint64_data",
    ir.DataType.UINT32: "uint64_data",
}
"""The field for values that are not in ``raw_data``; ``int32_data`` for all other types."""
_ALL_FIELDS = (
    "float_data",
    "int32_data",
    "int64_data",
    "double_data",
    "uint64_data",
    "string_data",
)
_BITS = {
    int(dtype): dtype.bitwidth
    for dtype in ir.DataType
    if dtype not in (ir.DataType.UNDEFINED, ir.DataType.STRING)
}
_PARTS = {ir.DataType.COMPLEX64: 2, ir.DataType.COMPLEX128: 2}  # a real and an imaginary number


def check_structure(model: ir.Model) -> None:
    """Refuse a model that violates the ONNX specification; the nodes must be in topological order.

    Invalid element types (``UNDEFINED``) and negative dimensions of values become unknown.

    Examples:
        >>> relu = ir.node("Relu", [ir.val("nowhere")], name="act")
        >>> graph = ir.Graph([], relu.outputs, nodes=[relu], opset_imports={"": 20})
        >>> check_structure(ir.Model(graph, ir_version=10))
        Traceback (most recent call last):
        ...
        ValueError: node 'act' (Relu) reads 'nowhere', which nothing produces
    """
    _decode(model.metadata_props)
    _decode_texts(model, "producer_name", "producer_version", "domain", "doc_string")
    called = {(domain, name) for domain, name, _ in model.functions}
    _check_names(lambda: "the model imports", model.opset_imports)
    _check_graphs(model.graph, model.opset_imports, called, may_refer=False)
    for function in model.functions.values():
        _check_function(function)
        _check_graphs(function.graph, function.opset_imports, called, may_refer=True)
    _check_recursion(model.functions.values())


def _check_function(function: ir.Function) -> None:
    """Check the names, imports and outputs of a function.

    ONNX Runtime does not load a function that returns an input, or one value twice.
    """
    _check_names(lambda: "a function has", (function.domain, function.name, function.overload))
    _check_names(lambda: f"function {_short(function.name)} imports", function.opset_imports)
    _decode_texts(function, "doc_string")
    _decode(function.metadata_props)
    for value in function.outputs:
        if value.is_graph_input():
            problem = f"returns its input {_short(value.name or '')}; insert an Identity node"
            raise ValueError(f"function {_short(function.name)} {problem}")
    if len(set(function.outputs)) < len(function.outputs):
        raise ValueError(
            f"function {_short(function.name)} returns a value twice; insert an Identity node"
        )


def _check_recursion(functions: Iterable[ir.Function]) -> None:
    calls: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for function in functions:
        operators = {(node.domain, node.op_type) for node in function.graph.all_nodes()}
        calls[function.domain, function.name] = operators
    try:
        graphlib.TopologicalSorter(calls).prepare()
    except graphlib.CycleError as error:
        raise ValueError(f"function {_short(error.args[1][0][1])} calls itself") from error


def _check_graphs(
    graph: ir.Graph,
    imports: Mapping[str, int],
    called: Collection[tuple[str, str]],
    *,
    may_refer: bool,
) -> None:
    """Check a graph and its subgraphs.

    Args:
        graph: The main graph, or the graph of a function.
        imports: The opset version of each domain.
        called: Domain and name of each function of the model.
        may_refer: Whether attributes may refer to attributes of the calling node: in a function.
    """
    version = imports.get("", imports.get("ai.onnx", 0))
    pending = [graph]
    while pending:
        graph = pending.pop()
        _decode_texts(graph, "name", "doc_string")
        _decode(graph.metadata_props)
        _check_ends(graph)
        for name, value in graph.initializers.items():
            if isinstance(name, bytes):
                raise ValueError(f"a tensor has a name that is not UTF-8: {name!r}")  # noqa: TRY004 - it is a bad value
            _check_value(value)
            if value.const_value is not None:
                _check_tensor(value.const_value)
        for node in graph:
            _check_node(node)
            if node.domain in _STANDARD and (node.domain, node.op_type) not in called:
                _check_operator(node, version)
            for attribute in node.attributes.data.values():
                pending += _check_attribute(node, attribute, may_refer=may_refer)


def _check_attribute(node: ir.Node, attribute: ir.Attr, *, may_refer: bool) -> Sequence[ir.Graph]:
    """Check an attribute, and return its graphs, which are still to be checked."""
    if isinstance(attribute.ref_attr_name, bytes):
        problem = f"refers to a name that is not UTF-8: {attribute.ref_attr_name!r}"
        subject = f"attribute {attribute.name!r} of {_node_text(node)}"
        raise ValueError(f"{subject} {problem}")  # noqa: TRY004 - it is a bad value
    _decode_texts(attribute, "doc_string")
    if attribute.is_ref() and not may_refer:
        name = _short(attribute.ref_attr_name or "")
        problem = f"refers to attribute {name} of a function, but is in no function"
        raise ValueError(f"attribute {attribute.name!r} of {_node_text(node)} {problem}")
    if attribute.value is None:
        return ()
    match attribute.type:
        case ir.AttributeType.TENSOR:
            _check_tensor(attribute.value)
        case ir.AttributeType.GRAPH:
            return (attribute.value,)
        case ir.AttributeType.GRAPHS:
            return tuple(attribute.value)
    return ()


def _node_text(node: ir.Node) -> str:
    return f"node {_short(node.name or '')} ({node.op_type})"


def fault_of_names(model: ir.Model) -> str:
    """Describe two tensors of a model in memory with the same name, or one without a name; empty if valid.

    Such a model can be written, but the file cannot be read.

    Examples:
        >>> x = ir.val("h", ir.DataType.FLOAT, [2])
        >>> relu = ir.node("Relu", [x], outputs=[ir.val("h")], name="act")
        >>> graph = ir.Graph([x], relu.outputs, nodes=[relu], opset_imports={"": 20})
        >>> fault_of_names(ir.Model(graph, ir_version=10))
        "an input and a result of node 'act' (Relu) are both called 'h'"
    """
    for graph in (*model.graphs(), *(function.graph for function in model.functions.values())):
        descriptions: dict[str | None, str] = {}
        for value, description in _described_tensors(graph):
            if not value.name and value.is_graph_output():
                return f"{description} that the model returns has no name"
            if not value.name and value.is_graph_input():
                return f"{description} has no name"
            if value.name and value.name in descriptions:
                first = descriptions[value.name]
                return f"{first} and {description} are both called {_short(value.name)}"
            descriptions[value.name] = description
    return ""


def _described_tensors(graph: ir.Graph) -> Iterator[tuple[ir.Value, str]]:
    for value in graph.inputs:
        yield value, "an input"
    for value in graph.initializers.values():
        if not value.is_graph_input():
            yield value, "a weight"
    for node in graph:
        for value in node.outputs:
            yield value, f"a result of {_node_text(node)}"


def at_fault(proto: onnx.ModelProto) -> str:
    """Describe the first node, tensor or value of a model that onnx_ir cannot read; empty if each can be read alone.

    Examples:
        >>> weight = onnx.TensorProto(name="w", data_type=99, data_location=onnx.TensorProto.EXTERNAL)
        >>> at_fault(onnx.ModelProto(graph=onnx.GraphProto(initializer=[weight])))
        "tensor 'w'"
    """
    graph = proto.graph
    nodes = list(graph.node)
    for function in proto.functions:
        nodes += function.node
    kinds: Sequence[tuple[str, Iterable[Any]]] = (
        ("value", (*graph.input, *graph.output, *graph.value_info)),
        ("tensor", graph.initializer),
        ("node", nodes),
        ("function", proto.functions),
    )
    for kind, messages in kinds:
        for message in messages:
            try:
                parsed = ir.from_proto(_without_edges(message) if kind == "node" else message)
                _ = getattr(parsed, "dtype", None)
            except Exception:  # onnx_ir raises various errors for invalid messages
                operator = f" ({message.op_type})" if kind == "node" else ""
                return f"{kind} {_short(message.name)}{operator}"
    return ""


def _without_edges(node: onnx.NodeProto) -> onnx.NodeProto:
    """Return a copy of a node without inputs, because onnx_ir logs a warning for unknown inputs."""
    bare = onnx.NodeProto()
    bare.CopyFrom(node)
    del bare.input[:]
    return bare


def _short(name: str) -> str:
    # a file can contain a name of any length
    return repr(name if len(name) <= 200 else f"{name[:200]}…")


def _check_ends(graph: ir.Graph) -> None:
    """Check the inputs and outputs of a graph."""
    names = set[str]()
    for value in graph.inputs:
        _check_value(value)
        if not value.name or isinstance(value.name, bytes):
            raise ValueError(
                f"an input of graph {_short(graph.name or '')} has an invalid name: {value.name!r}"
            )
        if value.name in names:
            raise ValueError(
                f"two inputs of graph {_short(graph.name or '')} are called {_short(value.name)}"
            )
        names.add(value.name)
    for value in graph.outputs:
        if _is_dangling(value):
            within = f" in graph {_short(graph.name)}" if graph.name else ""
            raise ValueError(f"nothing produces the output {_short(value.name or '')}{within}")


def _is_dangling(value: ir.Value) -> bool:
    return value.producer() is None and not value.is_graph_input() and not value.is_initializer()


def _check_value(value: ir.Value) -> None:
    """Replace an invalid type or dimension by an unknown one, and decode texts."""
    _decode_texts(value, "doc_string")
    _decode(value.metadata_props)
    if value.type is not None:
        _decode_texts(value.type, "denotation")
        if value.dtype == ir.DataType.UNDEFINED:
            value.type = None
    shape = value.shape
    if shape is None:
        return
    for axis in range(len(shape)):
        denotation = shape.get_denotation(axis)
        if isinstance(denotation, bytes):
            shape.set_denotation(axis, _text(denotation))
    if any(_is_negative(dim) for dim in shape):
        value.shape = ir.Shape([None if _is_negative(dim) else dim for dim in shape])


def _is_negative(dim: Any) -> bool:
    return isinstance(dim, int) and dim < 0


def _decode(metadata: MutableMapping[str, str]) -> None:
    """Decode metadata that is not UTF-8, such as paths of source files: protobuf returns it as bytes."""
    for key, value in list(metadata.items()):
        if isinstance(key, bytes) or isinstance(value, bytes):
            del metadata[key]
            metadata[_text(key)] = _text(value)


def _decode_texts(owner: Any, *names: str) -> None:
    """Decode attributes of an object that are not UTF-8: protobuf returns them as bytes."""
    for name in names:
        text = getattr(owner, name)
        if isinstance(text, bytes):
            setattr(owner, name, _text(text))


def _check_names(subject: Callable[[], str], names: Iterable[str | bytes | None]) -> None:
    """Refuse names that are not UTF-8: decoding could make two of them equal."""
    for name in names:
        if isinstance(name, bytes):
            raise ValueError(f"{subject()} a name that is not UTF-8: {name!r}")  # noqa: TRY004 - it is a bad value


def _text(text: str | bytes) -> str:
    return text.decode(errors="replace") if isinstance(text, bytes) else text


def _check_node(node: ir.Node) -> None:
    if not node.op_type:
        raise ValueError(f"{_node_text(node)} has no operator type")
    names = (
        node.op_type,
        node.domain,
        node.overload,
        node.name,
        *(value.name for value in node.outputs),
    )
    _check_names(lambda: f"{_node_text(node)} has", names)
    _decode_texts(node, "doc_string")
    if node.metadata_props:
        _decode(node.metadata_props)
    for value in node.inputs:
        if value is not None and _is_dangling(value):
            raise ValueError(
                f"{_node_text(node)} reads {_short(value.name or '')}, which nothing produces"
            )
    for value in node.outputs:
        _check_value(value)


@dataclass(frozen=True)
class _Rules:
    """The requirements of an operator: its attributes, and the minimum and maximum number of inputs and of outputs."""

    kinds: Mapping[str, ir.AttributeType]
    required: tuple[str, ...]
    inputs: tuple[int, int]
    outputs: tuple[int, int]


@lru_cache(maxsize=4096)
def _rules(op_type: str, version: int) -> _Rules | None:
    """Return the requirements of a standard operator; None if the installed onnx has no schema for it."""
    if not 0 < version <= onnx.defs.onnx_opset_version():
        return None
    try:
        schema = onnx.defs.get_schema(op_type, version, "")
    except onnx.defs.SchemaError:
        return None
    if schema.deprecated:
        return None
    kinds: dict[str, ir.AttributeType] = {}
    required: list[str] = []
    for name, attribute in schema.attributes.items():
        kinds[name] = ir.AttributeType[attribute.type.name]  # type: ignore[attr-defined]
        if attribute.required:
            required.append(name)
    return _Rules(
        kinds,
        tuple(required),
        (schema.min_input, schema.max_input),
        (schema.min_output, schema.max_output),
    )


def _check_operator(node: ir.Node, version: int) -> None:
    rules = _rules(node.op_type, version)
    if rules is None:
        return
    attributes = node.attributes.data
    for name, attribute in attributes.items():
        wanted = rules.kinds.get(name)
        if wanted is not None and attribute.type != wanted:
            problem = f"is of type {attribute.type.name}, not {wanted.name}"
            raise ValueError(f"attribute {name!r} of {_node_text(node)} {problem}")
    for name in rules.required:
        if name not in attributes:
            raise ValueError(f"{_node_text(node)} has no attribute {name!r}")
    if not rules.inputs[0] <= len(node.inputs) <= rules.inputs[1]:
        raise ValueError(_how_many(node, "inputs", len(node.inputs), *rules.inputs))
    if not rules.outputs[0] <= len(node.outputs) <= rules.outputs[1]:
        raise ValueError(_how_many(node, "outputs", len(node.outputs), *rules.outputs))


def _how_many(node: ir.Node, kind: str, count: int, fewest: int, most: int) -> str:
    if fewest == most:
        allowed = str(fewest)
    elif most < 1 << 30:  # onnx states the largest int32 for an unlimited number
        allowed = f"{fewest} to {most}"
    else:
        allowed = f"{fewest} or more"
    return f"{_node_text(node)} has {count} {kind}, but the operator requires {allowed}"


def _check_tensor(tensor: ir.TensorProtocol) -> None:
    metadata = tensor.metadata_props
    texts = (tensor.name, tensor.doc_string, *metadata.keys(), *metadata.values())
    _check_names(lambda: f"{_tensor_text(tensor.name)} has", texts)
    if type(tensor) is ir.TensorProtoTensor:
        _check_proto(tensor.raw)
        return
    dims = tensor.shape.numpy()
    if any(dim < 0 for dim in dims):
        raise ValueError(f"{_tensor_text(tensor.name)} has a negative size: {list(dims)}")
    if tensor.dtype == ir.DataType.UNDEFINED:
        raise ValueError(f"{_tensor_text(tensor.name)} has no element type")
    if isinstance(tensor, ir.StringTensor):
        _compare(tensor.name, len(tensor.string_data()), tensor.size, "values")
    elif (
        isinstance(tensor, ir.ExternalTensor)
        and tensor.length is not None
        and tensor.length < tensor.nbytes
    ):
        problem = f"needs {tensor.nbytes:,} bytes, but its external data has {tensor.length:,}"
        raise ValueError(f"{_tensor_text(tensor.name)} {problem}")


def _tensor_text(name: str | None) -> str:
    return f"tensor {_short(name or '')}"


def _check_proto(proto: onnx.TensorProto) -> None:
    bits, dims = _BITS.get(proto.data_type), proto.dims
    if bits is None:
        problem = "has no element type"
        if proto.data_type:
            problem = f"has the element type {proto.data_type}, which ONNX does not define"
        raise ValueError(f"{_tensor_text(proto.name)} {problem}")
    if dims and min(dims) < 0:
        raise ValueError(f"{_tensor_text(proto.name)} has a negative size: {list(dims)}")
    size = math.prod(dims)
    nbytes = -(-size * bits // 8)
    if proto.HasField("raw_data"):
        _compare(proto.name, len(proto.raw_data), nbytes, "bytes")
        return
    dtype = ir.DataType(proto.data_type)
    field = _FIELDS.get(dtype, "int32_data")
    for other_field in _ALL_FIELDS:
        if other_field != field and len(getattr(proto, other_field)):
            raise ValueError(
                f"{_tensor_text(proto.name)} is of type {dtype.name}, but has values in {other_field}"
            )
    is_packed = bits in (2, 4)  # an element of int32_data is then one byte with several values
    expected = nbytes if is_packed else size * _PARTS.get(dtype, 1)
    _compare(proto.name, len(getattr(proto, field)), expected, "values")


def _compare(name: str | None, actual: int, expected: int, unit: str) -> None:
    if actual != expected:
        raise ValueError(
            f"{_tensor_text(name)} has {actual:,} {unit}, but its shape and type require {expected:,}"
        )
