"""The weights of products, and ``Gemm`` as a product and a sum: quantizers of weights know ``MatMul`` alone."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

__all__ = ["channel_axis", "is_product", "is_transposed", "weight_place", "write_products"]

_CHANNEL_AXES = {"Conv": 0, "ConvTranspose": 1, "MatMul": -1}


def is_product(node: ir.Node) -> bool:
    """Whether a node is a ``MatMul``, or a ``Gemm`` that is one with a bias."""
    if node.op_type == "Gemm" and not node.domain:
        scaled = any(node.attributes.get_float(name, 1.0) != 1.0 for name in ("alpha", "beta"))
        return not scaled and not node.attributes.get_int("transA", 0)
    return node.op_type == "MatMul" and not node.domain


def is_transposed(node: ir.Node) -> bool:
    """Whether a ``Gemm`` reads its weight with rows and columns exchanged, as PyTorch keeps those of ``Linear``."""
    return bool(node.attributes.get_int("transB", 0))


def weight_place(node: ir.Node) -> int:
    """The place of the weight among the inputs of a product, a convolution, or a ``Gather`` of rows of a table."""
    return 0 if node.op_type == "Gather" else 1


def channel_axis(node: ir.Node) -> int | None:
    """The axis of a weight by which results of a product or convolution have channels; None for other operators."""
    if node.op_type == "Gemm":
        return 0 if is_transposed(node) else 1
    return _CHANNEL_AXES.get(node.op_type)


def write_products(graph: ir.Graph) -> None:
    """Write each ``Gemm`` with a constant weight as a ``MatMul``, which has its name, and an ``Add``."""
    for node in list(graph):
        if node.op_type == "Gemm" and is_product(node):
            _as_product(graph, node)


def _as_product(graph: ir.Graph, node: ir.Node) -> None:
    """Write a ``Gemm`` as a ``MatMul``, which has its name, and an ``Add``."""
    left, right = node.inputs[0], node.inputs[1]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if right is None or right.const_value is None:
        return
    if is_transposed(node):
        tensor = right.const_value
        turned = ir.Value(name=f"{right.name}_transposed", type=ir.TensorType(tensor.dtype))
        if turned.name in graph.initializers:
            turned = graph.initializers[str(turned.name)]
        else:
            array = np.ascontiguousarray(tensor.numpy().T)
            turned.const_value, turned.shape = ir.Tensor(array, name=turned.name), ir.Shape(array.shape)
            graph.register_initializer(turned)
    else:
        turned = right
    product = ir.Node("", "MatMul", [left, turned], name=node.name)
    result, new = product.outputs[0], [product]
    result.name, result.type = f"{node.outputs[0].name}_product", node.outputs[0].type
    if bias is not None:
        new.append(ir.Node("", "Add", [result, bias], name=f"{node.name}_bias"))
        result = new[-1].outputs[0]
    old = node.outputs[0]
    graph.insert_before(node, new)
    result.type, result.shape = old.type, old.shape
    old.replace_all_uses_with(result, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    result.name = old.name
    if not right.uses():
        graph.initializers.pop(str(right.name), None)
