"""Optimisers of ONNX Runtime that crash or change results, and the valid models for which they must be disabled.

Both faults are in ONNX Runtime 1.31 and 1.32.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from htp_export.model.module_facts import stored_tensor
from htp_export.shapes.operator_kinds import is_standard

CRASHING = "MatmulTransposeFusion"
"""An optimiser, of the highest level, that can leave a graph on which the next one reads a null pointer."""

INACCURATE = "ReluQuantRewrite"
"""An optimiser, of the second level, that can remove a Relu that is not redundant."""

DISABLED = "optimization.disable_specified_optimizers"
"""The session configuration entry with the names of disabled optimisers, separated by semicolons."""

_CLIPPING = (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16)
"""Types of zero points that `INACCURATE` compares with the smallest value of their type."""


def faulty_optimizers(model: ir.Model) -> list[str]:
    """Return the optimisers that must be disabled for a model; empty for most models."""
    names: list[str] = []
    if can_crash(model):
        names.append(CRASHING)
    if can_lose_relu(model):
        names.append(INACCURATE)
    return names


def safe_entries(model: ir.Model) -> dict[str, str]:
    """Return the session configuration entries that disable faulty optimisers; empty for most models."""
    names = faulty_optimizers(model)
    return {DISABLED: ";".join(names)} if names else {}


def can_crash(model: ir.Model) -> bool:
    """Return whether ONNX Runtime can crash when it optimises a model.

    `CRASHING` changes Transpose → Cast → MatMul to Cast → Transpose → MatMul in order to fuse the
    last two. If the other operand of the MatMul has another rank and the Transpose moves the first
    axis, it then does not fuse them and reports no change: the new nodes have no operator
    definitions, which later optimisers need. On the CPU, ONNX Runtime itself inserts such a Cast
    for a MatMul in float16. Other optimisers can move the nodes next to each other, so they need
    not be neighbours in the model.

    Examples:
        >>> def model(*nodes: ir.Node) -> ir.Model:
        ...     return ir.Model(ir.Graph([], [], nodes=nodes, opset_imports={"": 20}), ir_version=10)
        >>> x, weight = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT16)), ir.Value(name="w")
        >>> moved = ir.node("Transpose", [x], {"perm": [1, 0, 2]})
        >>> wide = ir.node("Cast", moved.outputs, {"to": ir.DataType.FLOAT})
        >>> can_crash(model(moved, wide, ir.node("MatMul", [wide.outputs[0], weight])))
        True
    """
    nodes = list(_nodes(model))
    has_products = any(node.op_type == "MatMul" for node in nodes)
    return has_products and any(_is_at_risk(node) for node in nodes if node.op_type == "Transpose")


def can_lose_relu(model: ir.Model) -> bool:
    """Return whether ONNX Runtime can remove a Relu before a QuantizeLinear that represents negative numbers.

    `INACCURATE` removes a Relu before a QuantizeLinear whose zero point is the smallest integer, so
    that no integer represents a negative number. But it checks this only for zero points of 8 and
    16 bits, and assumes it for floats of 8 bits and for narrower integers. It does not change a
    QuantizeLinear without a zero point. Other optimisers can move the nodes next to each other, so
    they need not be neighbours in the model.

    Examples:
        >>> x, scale = ir.Value(name="x"), ir.Value(name="scale")
        >>> zero = ir.Value(name="zero", type=ir.TensorType(ir.DataType.FLOAT8E4M3FN))
        >>> positive = ir.node("Relu", [x])
        >>> narrow = ir.node("QuantizeLinear", [positive.outputs[0], scale, zero])
        >>> can_lose_relu(ir.Model(ir.Graph([], [], nodes=[positive, narrow], opset_imports={"": 20}), ir_version=10))
        True
    """
    nodes = list(_nodes(model))
    if not any(is_standard(node, "Relu") for node in nodes):
        return False
    return any(_has_other_zero_point(node) for node in nodes)


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def _has_other_zero_point(node: ir.Node) -> bool:
    """Return whether a node quantizes with a zero point of a type outside `_CLIPPING`, or of an unknown type."""
    if not is_standard(node, "QuantizeLinear") or len(node.inputs) < 3:
        return False
    zero_point = node.inputs[2]
    if zero_point is None:
        return False
    tensor = stored_tensor(zero_point)
    dtype = zero_point.dtype if tensor is None else tensor.dtype
    return dtype not in _CLIPPING


def _is_at_risk(transpose: ir.Node) -> bool:
    """Return whether a Transpose moves the second axis to the front, and a Cast to a wider type may follow."""
    axes = transpose.attributes.get_ints("perm", None)
    if axes is None or len(axes) < 3 or axes[0] != 1:
        return False
    for value in (*transpose.inputs, *transpose.outputs):
        if value is not None and value.dtype == ir.DataType.FLOAT16:
            return True  # ONNX Runtime inserts a Cast
    for output in transpose.outputs:
        for use in output.uses():
            if use.node.op_type == "Cast" and not _is_cast_to_half(use.node):
                return True
    return False


def _is_cast_to_half(cast: ir.Node) -> bool:
    return cast.attributes["to"].as_int() == ir.DataType.FLOAT16
