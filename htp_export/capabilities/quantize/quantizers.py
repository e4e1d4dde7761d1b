"""ONNX Runtime's quantizers: imported when they are needed, kept from printing and from configuring logging.

Those of weights know ``MatMul`` alone, so each ``Gemm`` is written as a product and a sum for them.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.process.quiet import quiet
from htp_export.weights.products import is_matrix_product

__all__ = ["quantizers", "quietly", "write_products"]

_QUANTIZATION = "onnxruntime.quantization"


def quantizers(module: str = "") -> Any:
    """Import ``onnxruntime.quantization``, or a module of it.

    Some of its modules call ``logging.basicConfig`` on import, which would configure the logging of the program.
    """
    with quietly():
        return importlib.import_module(f"{_QUANTIZATION}.{module}" if module else _QUANTIZATION)


def quietly() -> contextlib.AbstractContextManager[None]:
    """Suppress what ONNX Runtime's quantizers say.

    It is advice that the caller cannot follow, such as to preprocess the model. They log to the root logger itself.
    """
    return quiet("")


def write_products(graph: ir.Graph) -> None:
    """Write each ``Gemm`` with a constant weight as a ``MatMul``, which has its name, and an ``Add``."""
    for node in list(graph):
        if node.op_type == "Gemm" and is_matrix_product(node):
            _as_product(graph, node)


def _as_product(graph: ir.Graph, node: ir.Node) -> None:
    """Write a ``Gemm`` as a ``MatMul``, which has its name, and an ``Add``."""
    left, right = node.inputs[0], node.inputs[1]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if right is None or right.const_value is None:
        return
    if node.attributes.get_int("transB", 0):
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
    ir.convenience.replace_nodes_and_values(graph, node, [node], new, [node.outputs[0]], [result])
    if not right.uses():
        graph.initializers.pop(str(right.name), None)
