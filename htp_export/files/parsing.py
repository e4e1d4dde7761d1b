"""Models from ONNX messages and files: with dense initializers, in topological order, and checked."""

from __future__ import annotations

import graphlib
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from htp_export.errors import InputError, first_line
from htp_export.files.lazy_tensor import HollowModel, read_hollow, slots, viewed
from htp_export.files.protobuf_bytes import graph_protos
from htp_export.files.structure import at_fault, check_structure

_INVALID = "not a valid ONNX model"
_MOST_SPARSE_BYTES = 1 << 30
"""Larger sparse initializers are refused: a few bytes of a file can describe a tensor of any size."""


def parsed(file: Path) -> ir.Model | None:
    """Return the model in a file, without its external data; None for a message that is not a model."""
    message = message_of(file)
    if message is None:
        return None
    proto, hollow = message
    model = _of_own(proto)
    if hollow is not None:
        for slot in list(slots(model)):
            tensor = hollow.tensor(slot.tensor)
            if tensor is not None:
                slot.put(tensor)
        # a large tensor may be where `slots` finds none, or be one of two with the same name
        if not hollow.is_whole:
            model = _of_own(onnx.load(file, load_external_data=False))
    return _checked(model)


def message_of(file: Path) -> tuple[onnx.ModelProto, HollowModel | None] | None:
    """Read a model without its data files and, from protobuf, without its large weights; None if it is no model."""
    hollow = read_hollow(file) if is_protobuf(file) else None
    proto = onnx.load(file, load_external_data=False) if hollow is None else hollow.proto
    return (proto, hollow) if proto.ir_version and proto.HasField("graph") else None


def is_protobuf(file: Path) -> bool:
    """Return whether the extension of a file means protobuf, or is unknown."""
    registry = onnx.serialization.registry
    return registry.get_format_from_file_extension(file.suffix) in ("protobuf", None)


def model_from_proto(proto: onnx.ModelProto) -> ir.Model:
    """Return a model with its nodes in topological order, as the ONNX specification requires.

    Some tools, such as ``onnxruntime.transformers.float16``, append nodes instead of inserting
    them. ONNX Runtime accepts this, but onnx_ir cannot copy such a model. An invalid model
    (`structure`), such as one with a cycle, is refused.
    """
    model = deserialized(proto)
    # the message belongs to the caller, and is not changed
    for value, tensor in _with_metadata(model).items():
        value.const_value = viewed(tensor)
    return _checked(model)


def _of_own(proto: onnx.ModelProto) -> ir.Model:
    """Return the model in a message that has no other user, and may be changed."""
    model = deserialized(proto)
    for tensor in _with_metadata(model).values():
        del tensor.raw.metadata_props[:]
    return model


def _with_metadata(model: ir.Model) -> dict[ir.Value, ir.TensorProtoTensor]:
    """Return the initializers with metadata in the message of their tensor: onnx_ir would write it twice."""
    tensors: dict[ir.Value, ir.TensorProtoTensor] = {}
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if not isinstance(tensor, ir.TensorProtoTensor):
                continue
            if tensor.dtype != ir.DataType.STRING and tensor.metadata_props:
                tensors[value] = tensor
    return tensors


def deserialized(proto: onnx.ModelProto) -> ir.Model:
    """Return the model in a message, unchecked; an InputError, with the part at fault, if onnx_ir cannot read it."""
    try:
        model = ir.from_proto(_with_dense_initializers(proto))
    except Exception as error:  # onnx_ir raises various errors for invalid messages
        if (name := _first_map(proto)) is not None:
            raise InputError(
                f"{name!r} is a map, an ONNX type that htp_export cannot read, because onnx_ir does not support it; "
                "write the file without ZipMap, as skl2onnx does with options={'zipmap': False}"
            ) from error
        part = at_fault(proto)
        problem = f"{part}: {first_line(error)}" if part else first_line(error)
        raise InputError(f"{_INVALID}: {problem}") from error
    return model


def _first_map(proto: onnx.ModelProto) -> str | None:
    """Return the name of a value whose type is or contains a map; None if there is none."""
    for graph in graph_protos(proto.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            value_type = value.type
            while (kind := value_type.WhichOneof("value")) in ("sequence_type", "optional_type"):
                value_type = getattr(value_type, kind).elem_type
            if kind == "map_type":
                return str(value.name)
    return None


def _checked(model: ir.Model) -> ir.Model:
    try:
        put_in_order(model)
        check_structure(model)
    except (ValueError, UnicodeDecodeError) as error:
        raise InputError(f"{_INVALID}: {error}") from error
    check_flat_size(model)
    return model


def put_in_order(model: ir.Model) -> None:
    """Sort the nodes of each graph that is not in topological order."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        if not _is_in_order(graph):
            graph.sort()


def _is_in_order(graph: ir.Graph) -> bool:
    seen = set[ir.Node]()
    for node in graph.all_nodes():
        for value in node.inputs:
            producer = None if value is None else value.producer()
            if producer is not None and producer not in seen:
                return False
        seen.add(node)
    return True


def _with_dense_initializers(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with dense instead of sparse initializers in its main graph: onnx_ir ignores sparse ones.

    Examples:
        >>> values, indices = (onnx.numpy_helper.from_array(np.array(data), "w") for data in ([7.0], [2]))
        >>> sparse = onnx.SparseTensorProto(values=values, indices=indices, dims=[4])
        >>> model = _with_dense_initializers(onnx.ModelProto(graph=onnx.GraphProto(sparse_initializer=[sparse])))
        >>> onnx.numpy_helper.to_array(model.graph.initializer[0]).tolist()
        [0.0, 0.0, 7.0, 0.0]
    """
    if not proto.graph.sparse_initializer:
        return proto
    dense = onnx.ModelProto()
    dense.CopyFrom(proto)
    del dense.graph.sparse_initializer[:]
    dense.graph.initializer.extend(map(_dense, proto.graph.sparse_initializer))
    return dense


def _dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    name, dims = sparse.values.name, tuple(sparse.dims)
    values = onnx.numpy_helper.to_array(sparse.values)
    indices = onnx.numpy_helper.to_array(sparse.indices)
    if any(dim < 0 for dim in dims) or math.prod(dims) * values.itemsize > _MOST_SPARSE_BYTES:
        raise ValueError(f"the sparse initializer {name!r} has the unsupported shape {list(dims)}")
    array = np.zeros(dims, values.dtype)
    try:
        # one row of coordinates for each value, or one flat index for each
        positions = tuple(indices.T) if indices.ndim > 1 else np.unravel_index(indices, dims)
        array[positions] = values
    except (IndexError, ValueError) as error:
        raise ValueError(f"the sparse initializer {name!r}: {error}") from error
    return onnx.numpy_helper.from_array(array, name)


MOST_FLAT_NODES = 1_000_000
"""Ten times the largest benchmark (``docs/benchmarks.md``), for which most commands take half a minute."""

# counting stops here: of nested functions, the number of nodes could have any number of digits
_MOST_COUNTED = 10**15


def check_flat_size(model: ir.Model) -> None:
    """Refuse a model with more than `MOST_FLAT_NODES` nodes after its functions are inlined.

    Inlining, ONNX's shape inference and ONNX Runtime take time and memory for each of these nodes:
    a file of 3 kB, with 40 functions of which each calls the next one twice, has 549,755,813,888. A
    model whose file already contains that many nodes is not refused.
    """
    if not model.functions:
        return
    try:
        size = flat_size(model)
    except graphlib.CycleError:  # reported by `check_structure`, and where functions are inlined
        return
    nodes_in_file = len(list(model.graph.all_nodes()))
    for function in model.functions.values():
        nodes_in_file += len(list(function.all_nodes()))
    if size > max(nodes_in_file, MOST_FLAT_NODES):
        count = f"{size:,}" if size < _MOST_COUNTED else f"more than {_MOST_COUNTED:,}"
        raise InputError(
            f"model {model.graph.name!r} has {count} nodes after inlining its functions, as ONNX Runtime does; "
            f"at most {MOST_FLAT_NODES:,} are supported"
        )


def flat_size(model: ir.Model) -> int:
    """Count the nodes of a model after inlining its functions, up to 10^15.

    Examples:
        >>> import onnx
        >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 20, "f" : 1]>
        ... g (float x) => (float y) { y = f.twice (x) }
        ... <domain: "f", opset_import: ["" : 20]> twice (a) => (c) { b = Relu (a) c = Relu (b) }''')
        >>> flat_size(ir.from_proto(model))
        2
    """
    contents = {
        key: _content(function.all_nodes(), model) for key, function in model.functions.items()
    }
    sizes: dict[ir.OperatorIdentifier, int] = {}

    def total(plain: int, calls: Counter[ir.OperatorIdentifier]) -> int:
        inlined = sum(count * sizes[callee] for callee, count in calls.items())
        return min(plain + inlined, _MOST_COUNTED)

    callees = {key: calls for key, (_, calls) in contents.items()}
    for key in graphlib.TopologicalSorter(callees).static_order():
        sizes[key] = total(*contents[key])
    return total(*_content(model.graph.all_nodes(), model))


def _content(
    nodes: Iterable[ir.Node], model: ir.Model
) -> tuple[int, Counter[ir.OperatorIdentifier]]:
    """Return the number of nodes that call no function of the model, and the number of calls of each function."""
    calls: Counter[ir.OperatorIdentifier] = Counter()
    plain = 0
    for node in nodes:
        if node.op_identifier() in model.functions:
            calls[node.op_identifier()] += 1
        else:
            plain += 1
    return plain, calls
