"""Valid models on which ONNX Runtime ends the process, and the optimiser that it has to leave out for them."""

from __future__ import annotations

import onnx_ir as ir

AT_FAULT = "MatmulTransposeFusion"
"""The optimiser of ONNX Runtime (1.31, 1.32) that can leave a graph on which the next one reads a null pointer."""

DISABLED = "optimization.disable_specified_optimizers"
"""The session configuration entry that names optimisers to leave out, separated by semicolons."""


def safe_entries(model: ir.Model) -> dict[str, str]:
    """The session configuration entries with which ONNX Runtime loads a model; none for most models."""
    return {DISABLED: AT_FAULT} if can_crash(model) else {}


def can_crash(model: ir.Model) -> bool:
    """Return whether ONNX Runtime can crash when it optimises a model.

    `AT_FAULT` changes Transpose → Cast → MatMul to Cast → Transpose → MatMul in order to fuse the
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
    nodes = list(model.graph.all_nodes())
    nodes += (node for function in model.functions.values() for node in function.all_nodes())
    products = any(node.op_type == "MatMul" for node in nodes)
    return products and any(_is_at_risk(node) for node in nodes if node.op_type == "Transpose")


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
