"""The shapes of a model's tensors, inferred without its weights, for files that do not say them."""

from __future__ import annotations

import contextlib

import onnx
import onnx_ir as ir

__all__ = ["Shape", "infer_shapes"]

Shape = tuple[tuple[int | str, ...] | None, int]

_SMALL_BYTES = 1024  # constants up to this size are kept: some of them are shapes


def infer_shapes(model: ir.Model) -> dict[str, Shape]:
    """Name → dimensions and element type of the tensors of the main graph; empty where inference fails.

    Args:
        model: The model; it is not changed, and none of its external data is read.
    """
    with contextlib.suppress(Exception):  # operators that nobody knows, models that are not quite valid
        inferred = onnx.shape_inference.infer_shapes(_without_weights(model), data_prop=True)
        return {info.name: _shape(info.type.tensor_type) for info in inferred.graph.value_info}
    return {}


def _without_weights(model: ir.Model) -> onnx.ModelProto:
    proto = onnx.ModelProto(ir_version=model.ir_version)
    for domain, version in model.opset_imports.items():
        proto.opset_import.add(domain=domain, version=version)
    graph = proto.graph
    graph.name = model.graph.name or "graph"
    graph.input.extend(ir.serde.serialize_value(value) for value in model.graph.inputs)
    graph.output.extend(ir.serde.serialize_value(value) for value in model.graph.outputs)
    graph.node.extend(ir.serde.serialize_node(node) for node in model.graph)
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None:
            continue
        inline = not isinstance(tensor, ir.ExternalTensor) and tensor.dtype != ir.DataType.STRING
        if inline and tensor.nbytes <= _SMALL_BYTES:
            graph.initializer.append(ir.serde.serialize_tensor(tensor))
            graph.initializer[-1].name = name
        else:
            graph.initializer.add(
                name=name,
                dims=list(tensor.shape.numpy()),
                data_type=int(tensor.dtype),
                data_location=onnx.TensorProto.EXTERNAL,
            )
    proto.functions.extend(ir.serde.serialize_function(function) for function in model.functions.values())
    return proto


def _shape(tensor: onnx.TypeProto.Tensor) -> Shape:
    if not tensor.HasField("shape"):
        return None, tensor.elem_type
    sizes = [size.dim_value if size.HasField("dim_value") else size.dim_param or "?" for size in tensor.shape.dim]
    return tuple(sizes), tensor.elem_type
