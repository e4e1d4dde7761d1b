"""Weights in blocks as operators of ONNX read them: ``DequantizeLinear`` with ``block_size``, in front of a ``MatMul``.

Engines that know no operators of ONNX Runtime, such as TensorRT, read these. ONNX Runtime fuses the pair to the
``MatMulNBits`` that it was (https://github.com/onnx/onnx/blob/main/docs/Operators.md#DequantizeLinear).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.editing.editing import add_initializer
from htp_export.editing.submodels import remove_unused
from htp_export.format.recipes import Recipe, step
from htp_export.model.recipes import recipe_of
from htp_export.weights.rebuilding import unpacked

FIRST_BLOCKS = 21
"""The opset from which on ``DequantizeLinear`` has blocks, and ONNX integers of 4 bits."""


def write_dequantized(graph: ir.Graph) -> None:
    """Write each ``MatMulNBits`` as a ``MatMul``, which has its name, with a ``DequantizeLinear`` of its weight."""
    made: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        if node.op_type == "MatMulNBits":
            packed = node.inputs[1]
            assert packed is not None
            if packed not in made:
                made[packed] = _dequantized(graph, node, packed)
            product = ir.Node("", "MatMul", [node.inputs[0], made[packed]], name=node.name)
            [old], [new] = node.outputs, product.outputs
            new.type, new.shape = old.type, old.shape
            ir.convenience.replace_nodes_and_values(graph, node, [node], [product], [old], [new])
    remove_unused(list(graph.initializers.values()))
    for domain in graph.opset_imports.keys() - {node.domain for node in graph} - {""}:
        del graph.opset_imports[domain]


def _dequantized(graph: ir.Graph, node: ir.Node, packed: ir.Value) -> ir.Value:
    """The weight of a product as a ``DequantizeLinear``, before the product, makes it."""
    rows, columns, bits, block = (node.attributes[name].as_int() for name in ("K", "N", "bits", "block_size"))
    blocks = -(-rows // block)
    scales, points = node.inputs[2], node.inputs[3] if len(node.inputs) > 3 else None
    signed = points is None  # the integers are those of MatMulNBits less the zero point that it has without one
    kind = {(4, True): ir.DataType.INT4, (4, False): ir.DataType.UINT4, (8, True): ir.DataType.INT8}.get(
        (bits, signed), ir.DataType.UINT8
    )
    levels = _integers(graph, packed, (columns, blocks * math.ceil(block * bits / 8)), (rows, bits), kind)
    assert scales is not None
    read = [levels, _turned(graph, scales, (columns, blocks))]
    if points is not None:
        read.append(_integers(graph, points, (columns, -1), (blocks, bits), kind))
    attributes = {"axis": 0, "block_size": block}
    made = ir.node("DequantizeLinear", read, attributes, name=f"{packed.name}_DequantizeLinear")
    [result] = made.outputs
    result.name, result.type, result.shape = f"{packed.name}_dequantized", scales.type, ir.Shape((rows, columns))
    graph.insert_before(node, made)
    return result


def _integers(
    graph: ir.Graph, value: ir.Value, sizes: tuple[int, int], held: tuple[int, int], kind: ir.DataType
) -> ir.Value:
    """The integers of a tensor of ``MatMulNBits``, a column of it for each row; ``held``: how many, and their bits."""
    assert value.const_value is not None
    count, bits = held
    array = unpacked(value.const_value.numpy().reshape(sizes), count, bits, kind).T
    recipe = step("transpose", step("unpack", recipe_of(value), [count, bits, kind.name.lower()]), [1, 0])
    return _register(graph, value, ir.Tensor(np.ascontiguousarray(array), dtype=kind), recipe)


def _turned(graph: ir.Graph, scales: ir.Value, sizes: tuple[int, int]) -> ir.Value:
    """The scales of ``MatMulNBits``, those of a column in a column."""
    assert scales.const_value is not None
    array = np.ascontiguousarray(scales.const_value.numpy().reshape(sizes).T)
    return _register(graph, scales, ir.Tensor(array), step("transpose", recipe_of(scales), [1, 0]))


def _register(graph: ir.Graph, of: ir.Value, tensor: ir.Tensor[Any], recipe: Recipe) -> ir.Value:
    name = f"{of.name}_rows"
    if name in graph.initializers:
        return graph.initializers[name]
    return add_initializer(graph, tensor, name, recipe)
