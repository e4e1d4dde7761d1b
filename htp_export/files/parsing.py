"""Models from messages and files of ONNX: checked, dense, in order, and not too large without their functions."""

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
"""Larger sparse initializers are refused: a few bytes can stand for any size."""


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
        if not hollow.is_whole:  # some are where there are no slots, or twice under a name
            model = _of_own(onnx.load(file, load_external_data=False))
    return _checked(model)


def parsed_or_none(file: Path) -> ir.Model | None:
    """Return the model in a file, without its external data; None for what is no ONNX file, or a broken one."""
    try:
        return parsed(file)
    except Exception:
        # parsers of four formats raise whatever they like on bytes that are not theirs
        return None


def message_of(file: Path) -> tuple[onnx.ModelProto, HollowModel | None] | None:
    """Read a model without its data files and, if it can be read in parts, its large weights; None for no model."""
    hollow = read_hollow(file) if is_protobuf(file) else None
    proto = onnx.load(file, load_external_data=False) if hollow is None else hollow.proto
    return (proto, hollow) if proto.ir_version and proto.HasField("graph") else None


def is_protobuf(file: Path) -> bool:
    """Return whether an extension stands for protobuf, or is unknown."""
    return onnx.serialization.registry.get_format_from_file_extension(file.suffix) in (
        "protobuf",
        None,
    )


def model_from_proto(proto: onnx.ModelProto) -> ir.Model:
    """Return a model with its nodes in topological order, as the ONNX specification requires.

    Some tools, such as ``onnxruntime.transformers.float16``, append nodes instead of inserting
    them. ONNX Runtime accepts this, but onnx_ir cannot copy such a model. A model that is not valid
    (`structure`), such as one with a cycle, is refused.
    """
    model = deserialized(proto)
    # without a change of the message, which is the caller's
    for value, tensor in _with_metadata(model).items():
        value.const_value = viewed(tensor)
    return _checked(model)


def _of_own(proto: onnx.ModelProto) -> ir.Model:
    """The model in a message that nobody else holds."""
    model = deserialized(proto)
    for stored in _with_metadata(model).values():
        del stored.raw.metadata_props[:]
    return model


def _with_metadata(model: ir.Model) -> dict[ir.Value, ir.TensorProtoTensor]:
    """The initializers whose metadata is in the message of the tensor, too: onnx_ir would write it twice."""
    values = (value for graph in model.graphs() for value in graph.initializers.values())
    tensors = ((value, value.const_value) for value in values)
    return {
        value: tensor
        for value, tensor in tensors
        if isinstance(tensor, ir.TensorProtoTensor)
        and tensor.dtype != ir.DataType.STRING
        and tensor.metadata_props
    }


def deserialized(proto: onnx.ModelProto) -> ir.Model:
    """Return the model in a message as it is; an InputError if onnx_ir cannot read it, with what is at fault."""
    try:
        model = ir.from_proto(_with_dense_initializers(proto))
    except Exception as error:  # whatever it comes across
        if (name := _first_map(proto)) is not None:
            raise InputError(
                f"{name!r} is a map, a type of ONNX that htp_export cannot read (onnx_ir has none); write the file "
                "without ZipMap, as skl2onnx does with options={'zipmap': False}"
            ) from error
        where = at_fault(proto)
        raise InputError(
            f"{_INVALID}: {where}{': ' if where else ''}{first_line(error)}"
        ) from error
    return model


def _first_map(proto: onnx.ModelProto) -> str | None:
    """The name of a value that is a map, or holds maps; None if there is none."""
    for graph in graph_protos(proto.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            held = value.type
            while (kind := held.WhichOneof("value")) in ("sequence_type", "optional_type"):
                held = getattr(held, kind).elem_type
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
    """Sort the nodes of graphs in which one reads what a later one makes."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        if not _is_in_order(graph):
            graph.sort()


def _is_in_order(graph: ir.Graph) -> bool:
    seen = set[ir.Node]()
    for node in graph.all_nodes():
        for value in node.inputs:
            maker = None if value is None else value.producer()
            if maker is not None and maker not in seen:
                return False
        seen.add(node)
    return True


def _with_dense_initializers(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with dense instead of sparse initializers in its main graph, as onnx_ir does not read them.

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
    values, indices = (
        onnx.numpy_helper.to_array(sparse.values),
        onnx.numpy_helper.to_array(sparse.indices),
    )
    if any(dim < 0 for dim in dims) or math.prod(dims) * values.itemsize > _MOST_SPARSE_BYTES:
        raise ValueError(f"the sparse initializer {name!r} is of size {list(dims)}")
    array = np.zeros(dims, values.dtype)
    try:
        array[tuple(indices.T) if indices.ndim > 1 else np.unravel_index(indices, dims)] = values
    except (IndexError, ValueError) as error:
        raise ValueError(f"the sparse initializer {name!r}: {error}") from error
    return onnx.numpy_helper.from_array(array, name)


MOST_FLAT_NODES = 1_000_000
"""Ten times as many as commands are measured with (``docs/benchmarks.md``), which takes most of them half a minute."""

# 60 functions that call one another twice make more; no number of any length is computed
_MOST_SAID = 10**15


def check_flat_size(model: ir.Model) -> None:
    """Refuse a model whose flat graph has more than `MOST_FLAT_NODES` nodes because functions call one another.

    Dissolving functions, ONNX's shape inference and ONNX Runtime take time and memory for each node
    of that graph: of 40 functions that call one another twice, 3 kB in a file, for 549,755,813,888.
    A model that is written with as many nodes is not refused.
    """
    if not model.functions:
        return
    try:
        size = flat_size(model)
    except graphlib.CycleError:  # whatever needs the flat graph says so
        return
    written = len(list(model.graph.all_nodes())) + sum(
        len(list(each.all_nodes())) for each in model.functions.values()
    )
    if size > max(written, MOST_FLAT_NODES):
        count = f"{size:,}" if size < _MOST_SAID else f"more than {_MOST_SAID:,}"
        raise InputError(
            f"model {model.graph.name!r} has {count} nodes once its functions are inlined, as ONNX Runtime does; "
            f"at most {MOST_FLAT_NODES:,} are supported"
        )


def flat_size(model: ir.Model) -> int:
    """Count the nodes of the model without functions, up to 10^15; a call in a cycle of calls counts as one.

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
        inside = sum(count * sizes[callee] for callee, count in calls.items())
        return min(plain + inside, _MOST_SAID)

    for key in graphlib.TopologicalSorter(
        {key: calls for key, (_, calls) in contents.items()}
    ).static_order():
        sizes[key] = total(*contents[key])
    return total(*_content(model.graph.all_nodes(), model))


def _content(
    nodes: Iterable[ir.Node], model: ir.Model
) -> tuple[int, Counter[ir.OperatorIdentifier]]:
    """How many nodes call no function of the model, and which functions the others call."""
    calls: Counter[ir.OperatorIdentifier] = Counter()
    plain = 0
    for node in nodes:
        if node.op_identifier() in model.functions:
            calls[node.op_identifier()] += 1
        else:
            plain += 1
    return plain, calls
