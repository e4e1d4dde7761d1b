"""Shapes and small values of what one node makes, from those of what it reads.

Shapes come from ONNX's own inference, by the node's schema; values from ONNX's reference implementation, for tensors
as small as those that say shapes. Operators of ONNX Runtime, which have no schema here, are in ``contrib_shapes``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from htp_export.costs.execution import Tensor
from htp_export.model.operators import RANDOM

__all__ = ["MOST_ELEMENTS", "evaluate", "infer", "node_proto"]

MOST_ELEMENTS = 8192
"""Values of larger tensors are not kept: they are data, not shapes."""

Array: TypeAlias = npt.NDArray[Any]
TypeAndShape: TypeAlias = tuple[ir.DataType | None, tuple[int, ...] | None]

# What these make may be far larger than what they read.
_GROWING = frozenset(("ConstantOfShape", "Expand", "Tile", "Range", "Pad", "OneHot", "Resize", "Upsample", "EyeLike"))
_NOT_EVALUATED = RANDOM | {"Dropout"}


def node_proto(
    node: ir.Node, attributes: Mapping[str, ir.Attr], inputs: Sequence[Tensor | None], outputs: int
) -> onnx.NodeProto:
    """The node alone, with inputs and outputs named by their positions; a subgraph is left out."""
    proto = onnx.NodeProto(op_type=node.op_type, domain=node.domain)
    proto.input.extend("" if tensor is None else f"i{position}" for position, tensor in enumerate(inputs))
    proto.output.extend(f"o{position}" for position in range(outputs))
    for attribute in attributes.values():
        if attribute.type not in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            ir.serde.serialize_attribute_into(proto.attribute.add(), attribute)
    return proto


def infer(proto: onnx.NodeProto, version: int, inputs: Sequence[Tensor | None]) -> list[TypeAndShape]:
    """Types and shapes of the outputs, as far as the operator's schema tells them."""
    schema = _schema(proto.op_type, version, proto.domain)
    nothing: list[TypeAndShape] = [(None, None)] * len(proto.output)
    if schema is None:
        return nothing
    given = {f"i{position}": tensor for position, tensor in enumerate(inputs) if tensor is not None}
    if any(tensor.dtype is None for tensor in given.values()):
        return nothing
    types = {name: onnx.helper.make_tensor_type_proto(int(t.dtype or 0), t.shape) for name, t in given.items()}
    data = {name: onnx.numpy_helper.from_array(t.value) for name, t in given.items() if t.value is not None}
    opsets = [onnx.OperatorSetIdProto(domain=proto.domain, version=version)]
    try:
        found = onnx.shape_inference.infer_node_outputs(schema, proto, types, data, opset_imports=opsets)
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError, ValueError, KeyError):
        return nothing  # a node that is not as its schema wants it
    return [_read(found.get(name)) for name in proto.output]


def evaluate(proto: onnx.NodeProto, version: int, inputs: Sequence[Tensor | None]) -> list[Array] | None:
    """The values of the outputs, where those of all inputs are known and all are small; else None."""
    if proto.op_type in _NOT_EVALUATED or _schema(proto.op_type, version, proto.domain) is None:
        return None
    if any(tensor is not None and tensor.value is None for tensor in inputs):
        return None
    broadcast = math.prod(max(1, tensor.elements) for tensor in inputs if tensor is not None)
    if proto.op_type in _GROWING or broadcast > MOST_ELEMENTS:
        for _, shape in infer(proto, version, inputs):
            if shape is None or int(np.prod(shape, dtype=object)) > MOST_ELEMENTS:
                return None
    function = onnx.helper.make_function(
        "", "f", list(filter(None, proto.input)), list(proto.output), [proto], [onnx.helper.make_opsetid("", version)]
    )
    values = {f"i{position}": tensor.value for position, tensor in enumerate(inputs) if tensor is not None}
    try:
        with np.errstate(all="ignore"):
            made = ReferenceEvaluator(function).run(None, values, attributes={})
    except Exception:  # whatever numpy says of values that the operator does not take, or an operator that it has not
        return None
    arrays = [np.asarray(array) for array in made]
    small = all(array.size <= MOST_ELEMENTS and array.dtype != object for array in arrays)
    return arrays if small else None


@lru_cache(maxsize=4096)
def _schema(op_type: str, version: int, domain: str) -> Any:
    try:
        return onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return None


def _read(found: onnx.TypeProto | None) -> TypeAndShape:
    if found is None or not found.HasField("tensor_type"):
        return None, None
    tensor = found.tensor_type
    dtype = ir.DataType(tensor.elem_type) if tensor.elem_type else None
    if not tensor.HasField("shape") or not all(dim.HasField("dim_value") for dim in tensor.shape.dim):
        return dtype, None
    return dtype, tuple(dim.dim_value for dim in tensor.shape.dim)
