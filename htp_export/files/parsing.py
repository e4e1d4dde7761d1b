"""Models from protobuf messages and from the bytes of ONNX files: checked, dense, and with their nodes in order."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from htp_export.errors import InputError, first_line
from htp_export.files.function_calls import check_flat_size
from htp_export.files.slots import slots
from htp_export.files.stored import HollowModel, read_hollow, viewed
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


def message_of(file: Path) -> tuple[onnx.ModelProto, HollowModel | None] | None:
    """Read a model without its data files and, if it can be read in parts, its large weights; None for no model."""
    hollow = read_hollow(file) if is_protobuf(file) else None
    proto = onnx.load(file, load_external_data=False) if hollow is None else hollow.proto
    return (proto, hollow) if proto.ir_version and proto.HasField("graph") else None


def is_protobuf(file: Path) -> bool:
    """Return whether an extension stands for protobuf, or is unknown."""
    return onnx.serialization.registry.get_format_from_file_extension(file.suffix) in ("protobuf", None)


def model_from_proto(proto: onnx.ModelProto) -> ir.Model:
    """Return a model with its nodes in topological order, as the ONNX specification requires.

    Some tools, such as ``onnxruntime.transformers.float16``, append nodes instead of inserting them. ONNX Runtime
    accepts this, but onnx_ir cannot copy such a model. A model that is not valid (`structure`), such as one with a
    cycle, is refused.
    """
    model = _deserialized(proto)
    for value, tensor in _with_metadata(model).items():  # without a change of the message, which is the caller's
        value.const_value = viewed(tensor)
    return _checked(model)


def _of_own(proto: onnx.ModelProto) -> ir.Model:
    """The model in a message that nobody else holds."""
    model = _deserialized(proto)
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
        if isinstance(tensor, ir.TensorProtoTensor) and tensor.dtype != ir.DataType.STRING and tensor.metadata_props
    }


def _deserialized(proto: onnx.ModelProto) -> ir.Model:
    try:
        model = ir.from_proto(_with_dense_initializers(proto))
    except Exception as error:  # whatever it comes across
        where = at_fault(proto)
        raise InputError(f"{_INVALID}: {where}{': ' if where else ''}{first_line(error)}") from error
    return model


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
    values, indices = onnx.numpy_helper.to_array(sparse.values), onnx.numpy_helper.to_array(sparse.indices)
    if any(dim < 0 for dim in dims) or math.prod(dims) * values.itemsize > _MOST_SPARSE_BYTES:
        raise ValueError(f"the sparse initializer {name!r} is of size {list(dims)}")
    array = np.zeros(dims, values.dtype)
    try:
        array[tuple(indices.T) if indices.ndim > 1 else np.unravel_index(indices, dims)] = values
    except (IndexError, ValueError) as error:
        raise ValueError(f"the sparse initializer {name!r}: {error}") from error
    return onnx.numpy_helper.from_array(array, name)
