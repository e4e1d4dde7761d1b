"""Optimisers of ONNX Runtime that end the process or change results, and the valid models that need to go without them.

Both are in ONNX Runtime 1.31 and 1.32.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from htp_export.model.module_facts import stored_tensor
from htp_export.shapes.operator_kinds import is_standard

CRASHING = "MatmulTransposeFusion"
"""An optimiser, of the highest level, that can leave a graph on which the next one reads a null pointer."""

INACCURATE = "ReluQuantRewrite"
"""An optimiser, of the second level, that can remove a Relu which is needed."""

DISABLED = "optimization.disable_specified_optimizers"
"""The session configuration entry that names optimisers to leave out, separated by semicolons."""

_CLIPPING = (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16)
"""Types of zero points that `INACCURATE` compares with the smallest number of their type."""


def faulty_optimizers(model: ir.Model) -> list[str]:
    """The optimisers that ONNX Runtime has to leave out for a model; none for most models."""
    found = [CRASHING] if can_crash(model) else []
    return [*found, INACCURATE] if can_lose_relu(model) else found


def safe_entries(model: ir.Model) -> dict[str, str]:
    """The session configuration entries with which ONNX Runtime runs a model; none for most models."""
    names = faulty_optimizers(model)
    return {DISABLED: ";".join(names)} if names else {}


def can_crash(model: ir.Model) -> bool:
    """Return whether ONNX Runtime can crash when it optimises a model.

    `CRASHING` changes Transpose → Cast → MatMul to Cast → Transpose → MatMul in order to fuse the
    last two. If the other operand of the MatMul has another rank and the Transpose moves the first
    axis, it then does not fuse, and reports no change: the new nodes stay without operator
    definitions, which later optimisers read. On the CPU, ONNX Runtime inserts such a Cast itself if
    the MatMul is in float16. Other optimisers move the nodes next to each other, so it is not asked
    here whether they are neighbours.

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
    products = any(node.op_type == "MatMul" for node in nodes)
    return products and any(_is_at_risk(node) for node in nodes if node.op_type == "Transpose")


def can_lose_relu(model: ir.Model) -> bool:
    """Return whether ONNX Runtime can remove a Relu whose result is quantized to numbers below zero.

    `INACCURATE` removes a Relu in front of a QuantizeLinear, whose integers cannot stand for
    numbers below zero if the zero point is the smallest of them. It asks that of integers of 8 and
    16 bits only, and takes it for granted of floats of 8 bits and of integers of fewer bits. It
    leaves a QuantizeLinear without a zero point as it is. Other optimisers move the nodes next to
    each other, so it is not asked here whether they are neighbours.

    Examples:
        >>> x, scale = ir.Value(name="x"), ir.Value(name="scale")
        >>> zero = ir.Value(name="zero", type=ir.TensorType(ir.DataType.FLOAT8E4M3FN))
        >>> positive = ir.node("Relu", [x])
        >>> narrow = ir.node("QuantizeLinear", [positive.outputs[0], scale, zero])
        >>> can_lose_relu(ir.Model(ir.Graph([], [], nodes=[positive, narrow], opset_imports={"": 20}), ir_version=10))
        True
    """
    nodes = list(_nodes(model))
    return any(is_standard(node, "Relu") for node in nodes) and any(
        _has_other_zero_point(node) for node in nodes
    )


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def _has_other_zero_point(node: ir.Node) -> bool:
    """Whether a node quantizes with a zero point whose type is not known to be one of `_CLIPPING`."""
    if not is_standard(node, "QuantizeLinear") or len(node.inputs) < 3 or node.inputs[2] is None:
        return False
    tensor = stored_tensor(node.inputs[2])
    return (node.inputs[2].dtype if tensor is None else tensor.dtype) not in _CLIPPING


def _is_at_risk(transpose: ir.Node) -> bool:
    """Whether it moves the second axis to the front, and a Cast to a wider type follows, written or inserted."""
    axes = transpose.attributes.get_ints("perm", None)
    if axes is None or len(axes) < 3 or axes[0] != 1:
        return False
    narrow = ir.DataType.FLOAT16
    if any(
        value is not None and value.dtype == narrow
        for value in (*transpose.inputs, *transpose.outputs)
    ):
        return True
    readers = [use.node for output in transpose.outputs for use in output.uses()]
    return any(
        node.op_type == "Cast" and node.attributes["to"].as_int() != narrow for node in readers
    )
