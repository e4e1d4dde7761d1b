"""Facts from the onnx package about one node: inferred shapes, types by schema, computed values.

Values come from ONNX's reference implementation, for small tensors such as shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir

from htp_export.format.bounds import LARGEST
from htp_export.shapes.known import MOST_ELEMENTS, Array, Dims, Fact, Operation, unknown_dims
from htp_export.shapes.operator_kinds import GROWING, RANDOM, RESHAPING, SIZES_ONLY
from htp_export.shapes.operators.elementwise import ELEMENTWISE, LIKE_FIRST
from htp_export.shapes.sizes import Dim, Size

Result: TypeAlias = tuple[ir.TypeProtocol | None, Dims | None]
"""Type and shape of an output."""

EVALUATED = (
    {*LIKE_FIRST, *ELEMENTWISE, *RESHAPING, *SIZES_ONLY}
    | {
        "ArgMax",
        "ArgMin",
        "BitCast",
        "Compress",
        "Concat",
        "ConstantOfShape",
        "CumProd",
        "Expand",
        "EyeLike",
        "Gather",
        "GatherElements",
        "GatherND",
        "Gemm",
        "MatMul",
        "NonZero",
        "OneHot",
        "Pad",
        "Range",
        "ReduceL1",
        "ReduceL2",
        "ReduceLogSum",
        "ReduceLogSumExp",
        "ReduceMax",
        "ReduceMean",
        "ReduceMin",
        "ReduceProd",
        "ReduceSum",
        "ReduceSumSquare",
        "Slice",
        "Split",
        "Tile",
        "TopK",
        "Transpose",
        "Unique",
    }
) - (RANDOM | {"Dropout"})
"""Operators that compute sizes, positions and masks.

Their time and memory are proportional to their inputs and outputs. Other operators can take any
time for a small output: windows with padding, sampling, regular expressions, images.
"""


def inferred(node: Operation, version: int, inputs: Sequence[Fact | None]) -> list[Result]:
    """Types and shapes of the outputs, as far as ONNX's inference of the node returns them."""
    nothing: list[Result] = [(None, None)] * len(node.outputs)
    schema = _schema(node.op_type, version, node.domain)
    if schema is None:
        return nothing
    names: dict[str, Dim] = {}
    types = dict[str, onnx.TypeProto]()
    data = dict[str, onnx.TensorProto]()
    for place, known in enumerate(inputs):
        if known is None:
            continue
        if known.type is None:
            return nothing
        types[f"i{place}"] = _type_proto(known.type, known.shape, names)
        if known.array is not None:
            data[f"i{place}"] = ir.to_proto(ir.Tensor(known.array, dtype=known.type.dtype))
    opsets = [onnx.OperatorSetIdProto(domain=node.domain, version=version)]
    proto = _node_proto(node, inputs)
    try:
        protos = onnx.shape_inference.infer_node_outputs(
            schema, proto, types, data, opset_imports=opsets
        )
    except (
        onnx.shape_inference.InferenceError,
        onnx.checker.ValidationError,
        RuntimeError,
        ValueError,
        KeyError,
    ):
        return nothing  # the node does not conform to its schema
    return [_read(protos.get(name), names) for name in proto.output]


def evaluated(node: Operation, version: int, inputs: Sequence[Fact | None]) -> list[Array] | None:
    """The arrays of the outputs, if all inputs are known and all arrays are small; else None."""
    if node.op_type not in EVALUATED or node.domain:
        return None
    if _schema(node.op_type, version, node.domain) is None:
        return None
    if not all(value.name for value in node.outputs):
        return None
    arrays = _input_arrays(inputs)
    if arrays is None:
        return None
    # No output is larger than the product of the inputs, unless an input states its size.
    most_elements = math.prod(max(1, array.size) for array in arrays.values())
    if node.op_type in GROWING or most_elements > MOST_ELEMENTS:
        shapes = [shape for _, shape in inferred(node, version, inputs)]
        if not all(map(_is_small, shapes)):
            return None
    try:
        results = _run_reference(_node_proto(node, inputs), version, arrays)
    except Exception:
        # Any error of numpy for values that the operator does not accept, or an operator that the
        # reference implementation does not have.
        return None
    small = all(array.size <= MOST_ELEMENTS and array.dtype.kind not in "OSU" for array in results)
    return results if small else None


def _input_arrays(inputs: Sequence[Fact | None]) -> dict[str, Array] | None:
    """Name → array of the inputs of a `_node_proto`; None if one is unknown."""
    arrays: dict[str, Array] = {}
    for index, known in enumerate(inputs):
        if known is None:
            continue
        if known.array is None:
            return None
        arrays[f"i{index}"] = known.array
    return arrays


def _run_reference(proto: onnx.NodeProto, version: int, arrays: Mapping[str, Array]) -> list[Array]:
    """Run one node in ONNX's reference implementation."""
    # few graphs need it, and its import is a tenth of a small command
    from onnx.reference import ReferenceEvaluator

    function = onnx.helper.make_function(
        domain="",
        fname="f",
        inputs=list(filter(None, proto.input)),
        outputs=list(proto.output),
        nodes=[proto],
        opset_imports=[onnx.helper.make_opsetid("", version)],
    )
    with np.errstate(all="ignore"):
        outputs = ReferenceEvaluator(function).run(None, dict(arrays), attributes={})
    return [np.asarray(array) for array in outputs]


def _is_small(shape: Dims | None) -> bool:
    """Whether a shape is known, with few enough elements to compute them."""
    if shape is None:
        return False
    elements = 1
    for dim in shape:
        if not isinstance(dim, int):
            return False
        elements *= dim
    return elements <= MOST_ELEMENTS


@lru_cache(maxsize=4096)
def type_source(op_type: str, version: int, domain: str, place: int) -> ir.DataType | int | None:
    """The element type of an output by its schema, or the index of an input of the same type."""
    schema = _schema(op_type, version, domain)
    if schema is None or not schema.outputs:
        return None
    variadic = schema.outputs[-1].option == onnx.defs.OpSchema.FormalParameterOption.Variadic
    if place >= len(schema.outputs) and not variadic:
        return None
    output = schema.outputs[min(place, len(schema.outputs) - 1)]
    kinds = {kind for kind in output.types if kind.startswith("tensor(")}
    if not kinds:
        return None
    if len(output.types) == 1:
        return ir.DataType[kinds.pop().removeprefix("tensor(").removesuffix(")").upper()]
    for index, formal in enumerate(schema.inputs):
        if formal.type_str == output.type_str:
            return index
    return None


def settings(node: ir.Node, versions: Mapping[str, int]) -> list[ir.Attr]:
    """The attributes of a node by name, without the operator's defaults.

    Tools add and remove such defaults: nodes that differ in them alone compute the same.

    Examples:
        >>> node = ir.node("Gemm", [], attributes={"alpha": 1.0, "transB": 1})
        >>> [attribute.name for attribute in settings(node, {"": 20})]
        ['transB']
    """
    written = node.attributes.data
    if not written:
        return []
    defaults = _defaults(node.op_type, versions.get(node.domain, 0), node.domain)
    changed = []
    for name in sorted(written):
        attribute = written[name]
        if (attribute.type, attribute.value) != defaults.get(name):
            changed.append(attribute)
    return changed


def is_written_as(node: ir.Node, version: int, later: int) -> bool:
    """Whether a node of one opset has the same meaning in a later opset.

    It compares the node's attributes, and the defaults of the others. True for operators without
    a schema in one of the two opsets, and if ``later`` is not the later one.

    Examples:
        >>> pad = ir.node("Pad", [ir.val("x")], attributes={"pads": [0, 1]})
        >>> is_written_as(pad, 10, 18), is_written_as(ir.node("Relu", [ir.val("x")]), 10, 18)
        (False, True)
    """
    if node.domain not in ("", "ai.onnx") or version >= later:
        return True
    now = _schema(node.op_type, version, "")
    then = _schema(node.op_type, later, "")
    if now is None or then is None or now.since_version == then.since_version:
        return True
    written = node.attributes.keys()
    if not written <= then.attributes.keys():
        return False
    before = _defaults(node.op_type, version, "")
    after = _defaults(node.op_type, later, "")
    shared = (now.attributes.keys() & then.attributes.keys()) - written
    return all(before.get(name) == after.get(name) for name in shared)


def misfit(node: ir.Node, version: int) -> str:
    """The feature of a standard ONNX node that an opset does not support; empty if it has all.

    Examples:
        >>> clip = ir.node("Clip", [ir.val("x"), ir.val("low")])
        >>> misfit(clip, 10), misfit(clip, 11)
        ('Clip of 2 inputs', '')
    """
    if node.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op_type):
        return ""
    schema = _schema(node.op_type, version, "")
    if schema is None or schema.deprecated:
        return node.op_type
    unknown = next((name for name in node.attributes if name not in schema.attributes), None)
    if unknown is not None:
        return f"{node.op_type} with {unknown}"
    for name, attribute in schema.attributes.items():
        if attribute.required and name not in node.attributes:
            return f"{node.op_type} without {name}"
    if not schema.min_input <= len(node.inputs) <= schema.max_input:
        return f"{node.op_type} of {len(node.inputs)} inputs"
    return _input_misfit(node, schema)


def _input_misfit(node: ir.Node, schema: Any) -> str:
    """The first input that is absent or of a type that the schema does not support; or empty."""
    # Further inputs are variadic: they have the type of the last formal one.
    for formal, value in zip(schema.inputs, node.inputs, strict=False):
        if value is None:
            if formal.option == onnx.defs.OpSchema.FormalParameterOption.Single:
                return f"{node.op_type} without {formal.name}"
        elif isinstance(value.type, ir.TensorType):
            dtype = value.type.dtype.name
            if f"tensor({dtype.lower()})" not in formal.types:
                return f"{node.op_type} of {dtype}"
    return ""


@lru_cache(maxsize=4096)
def _defaults(
    op_type: str, version: int, domain: str
) -> Mapping[str, tuple[ir.AttributeType, Any]]:
    """Attribute → type and value of its default."""
    schema = _schema(op_type, version, domain)
    if schema is None:
        return {}
    defaults = {}
    for name, attribute in schema.attributes.items():
        if attribute.default_value.name:
            default = ir.from_proto(attribute.default_value)
            defaults[name] = (default.type, default.value)
    return defaults


def _node_proto(node: Operation, inputs: Sequence[Fact | None]) -> onnx.NodeProto:
    """The node alone, with inputs and outputs named by index, without its subgraphs."""
    proto = onnx.NodeProto(op_type=node.op_type, domain=node.domain)
    proto.input.extend("" if known is None else f"i{place}" for place, known in enumerate(inputs))
    proto.output.extend(
        f"o{place}" if value.name else "" for place, value in enumerate(node.outputs)
    )
    for attribute in node.attributes.values():
        if attribute.type not in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            ir.serde.serialize_attribute_into(proto.attribute.add(), attribute)
    return proto


@lru_cache(maxsize=4096)
def _schema(op_type: str, version: int, domain: str) -> Any:
    try:
        return onnx.defs.get_schema(op_type, version, domain)
    # The version in the file may not be a 32-bit number.
    except (onnx.defs.SchemaError, TypeError):
        return None


def _type_proto(kind: ir.TypeProtocol, shape: Dims | None, names: dict[str, Dim]) -> onnx.TypeProto:
    """A type with a shape; the names of its open sizes are added to ``names``."""
    if not isinstance(kind, ir.TensorType):
        return ir.serde.serialize_type(kind)
    sizes: list[int | str] | None = None
    if shape is not None:
        sizes = []
        for dim in shape:
            if isinstance(dim, Size):
                names[str(dim)] = dim
            sizes.append(dim if isinstance(dim, int) else str(dim))
    return onnx.helper.make_tensor_type_proto(int(kind.dtype), sizes)


def _read(proto: onnx.TypeProto | None, names: Mapping[str, Dim]) -> Result:
    """Type and shape of an inferred type, with sizes for the ``names`` in it."""
    if proto is None or not proto.WhichOneof("value"):
        return None, None
    if not proto.HasField("tensor_type"):
        return ir.serde.deserialize_type_proto_for_type(proto), None
    tensor = proto.tensor_type
    kind = ir.TensorType(ir.DataType(tensor.elem_type)) if tensor.elem_type else None
    if not tensor.HasField("shape"):
        return kind, None
    dims: list[Dim | None] | None = unknown_dims(len(tensor.shape.dim))
    if dims is None:
        return kind, None
    for axis, dim in enumerate(tensor.shape.dim):
        if dim.HasField("dim_value"):
            dims[axis] = dim.dim_value if 0 <= dim.dim_value <= LARGEST else None
        elif dim.dim_param:
            dims[axis] = names.get(dim.dim_param)
    return kind, dims
