"""Rewrite operators with stored weights, before and after ONNX Runtime's quantizers.

They accept a ``MatMul`` and no ``Gemm``. ONNX Runtime has operators for 8-bit weights of
convolutions and tables, and no quantizer for these. Engines without ONNX Runtime's own operators
read weights in blocks through a ``DequantizeLinear``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.editing.editing import add_initializer, replace
from htp_export.editing.submodels import constant_of, remove_unused
from htp_export.format.recipes import Recipe, step
from htp_export.model.recipes import recipe_of, recorded
from htp_export.runtime.arrays import Array
from htp_export.shapes.operator_kinds import is_standard
from htp_export.weights.products import changed_when_written, is_matrix_product, weight_axes
from htp_export.weights.rebuilding import unpacked
from htp_export.weights.rounding import Roundings, rounding

FIRST_BLOCKS = 21
"""The first opset in which ``DequantizeLinear`` has blocks, and ONNX has integers of 4 bits."""

_BIAS = 2
"""The place of the bias among the inputs of a ``Gemm``."""


def separate_copies(graph: ir.Graph, key_of: Callable[[ir.Node, int], Hashable]) -> None:
    """Copy each initializer for every way in which it is quantized, in place.

    Args:
        graph: The graph.
        key_of: Returns the key of the way for an input of a node. Inputs of an initializer with
            equal keys share a copy. None for inputs that stay, which keep the original; without
            such inputs, the first key keeps it.
    """
    keys: defaultdict[ir.Value, dict[tuple[ir.Node, int], Hashable]] = defaultdict(dict)
    for node in graph:
        for place, value in enumerate(node.inputs):
            if value is not None and value.is_initializer():
                keys[value][node, place] = key_of(node, place)
    for value, key_of_use in keys.items():
        others = list(dict.fromkeys(key_of_use.values()))
        others.remove(None if None in others else others[0])
        tensor = value.const_value
        assert tensor is not None
        for number, other in enumerate(others, 2):
            copy = add_initializer(graph, tensor, f"{value.name}_{number}", recipe_of(value))
            for (node, place), key in key_of_use.items():
                if key == other:
                    node.replace_input_with(place, copy)


def fold_factors(graph: ir.Graph) -> None:
    """Multiply the stored matrix of each ``Gemm`` by alpha, and its stored bias by beta, in place.

    ONNX Runtime's static quantizer resets beta, and its other quantizers do not support ``Gemm``.
    """
    for node in graph:
        if not is_standard(node, "Gemm"):
            continue
        alpha = node.attributes.get_float("alpha", 1.0)
        beta = node.attributes.get_float("beta", 1.0)
        stored = [place for place in (1, 0) if constant_of(node.inputs[place]) is not None]
        if alpha != 1 and stored:
            _multiply(graph, node, stored[0], alpha)
            del node.attributes["alpha"]
        bias = _bias_of(node)
        if beta != 1 and bias is None:
            del node.attributes["beta"]
        elif beta != 1 and constant_of(bias) is not None:
            _multiply(graph, node, _BIAS, beta)
            del node.attributes["beta"]


def _bias_of(node: ir.Node) -> ir.Value | None:
    """The bias of a ``Gemm``; None without one."""
    return node.inputs[_BIAS] if len(node.inputs) > _BIAS else None


def _multiply(graph: ir.Graph, node: ir.Node, place: int, factor: float) -> None:
    """Multiply a constant input of a node by a number."""
    value = node.inputs[place]
    assert value is not None
    tensor = constant_of(value)
    assert tensor is not None
    name, recipe = f"{value.name}_times_{factor:.9g}", step("mul", recipe_of(value), factor)

    def multiplied(array: Array) -> Array:
        return np.multiply(array, factor, dtype=array.dtype)

    product = graph.initializers.get(name) or add_initializer(
        graph, changed_when_written(tensor, multiplied, recipe), name, recipe
    )
    node.replace_input_with(place, product)
    remove_unused([value])


def factor_of(node: ir.Node, place: int) -> float:
    """The number by which `fold_factors` multiplies a constant input of a node."""
    if not is_standard(node, "Gemm"):
        return 1.0
    return node.attributes.get_float("beta" if place == _BIAS else "alpha", 1.0)


def way_as_product(node: ir.Node, place: int) -> Hashable:
    """A key of the change by `write_products` to a constant input; None for no change."""
    factor = factor_of(node, place)
    if place == 1:
        return "matrix", factor, node.attributes.get_int("transB", 0)
    return None if factor == 1 else ("bias", factor)


def can_be_product(node: ir.Node) -> bool:
    """Whether a node is a ``MatMul``, or a ``Gemm`` that `write_products` can write as one."""
    if not is_standard(node, "Gemm"):
        return is_standard(node, "MatMul")
    if node.attributes.get_int("transA", 0):
        return False
    bias = _bias_of(node)
    # beta of a computed bias cannot be folded
    is_computed = bias is not None and constant_of(bias) is None
    return not is_computed or node.attributes.get_float("beta", 1.0) == 1


def write_products(graph: ir.Graph) -> None:
    """Replace each ``Gemm`` with a constant weight by a ``MatMul`` and an ``Add``."""
    fold_factors(graph)
    for node in list(graph):
        weight = node.inputs[1] if node.op_type == "Gemm" and is_matrix_product(node) else None
        if weight is not None and weight.const_value is not None:
            _as_product(graph, node, weight, weight.const_value)


def _as_product(
    graph: ir.Graph, node: ir.Node, weight: ir.Value, tensor: ir.TensorProtocol
) -> None:
    matrix = weight
    if node.attributes.get_int("transB", 0):
        matrix = transposed(graph, weight, tensor)
    new = [ir.node("MatMul", [node.inputs[0], matrix], name=node.name)]
    result = new[0].outputs[0]
    result.name, result.type = f"{node.outputs[0].name}_product", node.outputs[0].type
    bias = _bias_of(node)
    if bias is not None:
        new.append(ir.node("Add", [result, bias], name=f"{node.name}_bias"))
    ir.convenience.replace_nodes_and_values(
        graph, node, [node], new, [node.outputs[0]], [new[-1].outputs[0]]
    )
    if not weight.uses():
        graph.initializers.pop(str(weight.name), None)


def transposed(graph: ir.Graph, weight: ir.Value, tensor: ir.TensorProtocol) -> ir.Value:
    """The initializer with the transpose of a stored matrix; added if there is none."""
    name, recipe = f"{weight.name}_transposed", step("transpose", recipe_of(weight), [1, 0])
    return graph.initializers.get(name) or add_initializer(
        graph,
        changed_when_written(tensor, np.transpose, recipe, tensor.shape.numpy()[::-1]),
        name,
        recipe,
    )


def store_by_rows(
    graph: ir.Graph,
    node: ir.Node,
    rounded: Callable[[ir.Value], ir.Value],
) -> None:
    """Replace the stored weight of a product by its rounded form, in place.

    Matrices are stored with a row for each result, as PyTorch stores them. In the other layout,
    ONNX Runtime's CPU fuses ``DequantizeLinear`` and the product to ``MatMulNBits``, which also
    rounds the activations to int8.

    The replaced initializers stay in the graph.

    Args:
        graph: The graph.
        node: The product.
        rounded: Returns the dequantized value of a stored tensor.
    """
    weight = node.inputs[1]
    assert weight is not None
    tensor = weight.const_value
    assert tensor is not None
    if not has_columns(node, tensor):
        node.replace_input_with(1, rounded(weight))
        return
    rows = transposed(graph, weight, tensor)
    dequantized = rounded(rows)
    if node.op_type == "Gemm":
        node.replace_input_with(1, dequantized)
        node.attributes["transB"] = ir.AttrInt64("transB", 1)
        return
    for use in dequantized.uses():
        if is_standard(use.node, "Transpose"):  # of another product with this weight
            node.replace_input_with(1, use.node.outputs[0])
            return
    name = f"{dequantized.name}_Transpose"
    transpose = ir.node("Transpose", [dequantized], {"perm": [1, 0]}, name=name)
    [result] = transpose.outputs
    result.name, result.type, result.shape = f"{name}_output", dequantized.type, weight.shape
    graph.insert_before(node, transpose)
    node.replace_input_with(1, result)


def has_columns(node: ir.Node, tensor: ir.TensorProtocol) -> bool:
    """Whether the weight of a node is a matrix with a column for each result."""
    return (
        is_standard(node, "MatMul", "Gemm")
        and len(tensor.shape) == 2
        and not node.attributes.get_int("transB", 0)
    )


def write_dequantized(graph: ir.Graph) -> None:
    """Replace each ``MatMulNBits`` by a ``MatMul`` with a ``DequantizeLinear`` of its weight.

    ONNX Runtime fuses the pair again
    (https://github.com/onnx/onnx/blob/main/docs/Operators.md#DequantizeLinear).
    """
    weights: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        if node.op_type == "MatMulNBits":
            packed = node.inputs[1]
            assert packed is not None
            if packed not in weights:
                weights[packed] = _dequantized(graph, node, packed)
            replace(node, [ir.node("MatMul", [node.inputs[0], weights[packed]])])
    remove_unused(list(graph.initializers.values()))
    # An engine without ONNX Runtime's operators refuses a file that imports their domain.
    for domain in graph.opset_imports.keys() - {node.domain for node in graph} - {""}:
        del graph.opset_imports[domain]


def _dequantized(graph: ir.Graph, node: ir.Node, packed: ir.Value) -> ir.Value:
    """Insert a ``DequantizeLinear`` of a packed weight before its consumer."""
    rows, columns, bits, block = (
        node.attributes[name].as_int() for name in ("K", "N", "bits", "block_size")
    )
    blocks = math.ceil(rows / block)
    scales = node.inputs[2]
    points = node.inputs[3] if len(node.inputs) > 3 else None
    assert scales is not None
    assert scales.const_value is not None
    # Without zero points, MatMulNBits subtracts the middle of the range: the result is signed.
    kind = ir.DataType[f"INT{bits}" if points is None else f"UINT{bits}"]
    packed_sizes = columns, blocks * math.ceil(block * bits / 8)
    levels = _integers(graph, packed, packed_sizes, (rows, bits), kind)
    by_row = np.ascontiguousarray(scales.const_value.numpy().reshape(columns, blocks).T)
    recipe = step("transpose", recipe_of(scales), [1, 0])
    inputs = [levels, _register(graph, scales, ir.Tensor(by_row), recipe)]
    if points is not None:
        inputs.append(_integers(graph, points, (columns, -1), (blocks, bits), kind))
    attributes = {"axis": 0, "block_size": block}
    name = f"{packed.name}_DequantizeLinear"
    dequantize = ir.node("DequantizeLinear", inputs, attributes, name=name)
    [result] = dequantize.outputs
    result.name, result.type = f"{packed.name}_dequantized", scales.type
    result.shape = ir.Shape((rows, columns))
    graph.insert_before(node, dequantize)
    return result


def _integers(
    graph: ir.Graph,
    value: ir.Value,
    sizes: tuple[int, int],
    packing: tuple[int, int],
    kind: ir.DataType,
) -> ir.Value:
    """Unpack and transpose a tensor of ``MatMulNBits``.

    Args:
        graph: The graph, which gets an initializer.
        value: The packed tensor.
        sizes: Its columns, and the bytes of each.
        packing: The number of integers in a column, and their bits.
        kind: Their type.
    """
    assert value.const_value is not None
    count, bits = packing
    packed = value.const_value

    def read() -> ir.TensorProtocol:
        array = unpacked(packed.numpy().reshape(sizes), count, bits, kind).T
        return ir.Tensor(np.ascontiguousarray(array), dtype=kind)

    unpacking = step("unpack", recipe_of(value), [count, bits, kind.name.lower()])
    recipe = step("transpose", unpacking, [1, 0])
    # a number of 4 bits takes a byte in memory: it is unpacked when it is written
    tensor = ir.LazyTensor(read, kind, ir.Shape((count, sizes[0])), name=packed.name)
    return _register(graph, value, tensor, recipe)


def _register(graph: ir.Graph, of: ir.Value, tensor: ir.TensorProtocol, recipe: Recipe) -> ir.Value:
    name = f"{of.name}_rows"
    return graph.initializers.get(name) or add_initializer(graph, tensor, name, recipe)


CONVOLUTIONS = frozenset(("Conv", "ConvTranspose"))
"""Operators whose weights have channels."""


def store_in_eight_bits(graph: ir.Graph, block_size: int, *, symmetric: bool) -> None:
    """Store the weights of the convolutions and tables of a graph in 8 bits, in place.

    Args:
        graph: The graph; the weights are initializers.
        block_size: Elements of a row of a table that share a scale.
        symmetric: Whether blocks of tables have no zero points.
    """
    by_channel: dict[tuple[ir.Value, int], ir.Value] = {}
    by_block: dict[ir.Value, list[ir.Value]] = {}
    for node in list(graph):
        place = 1 if node.op_type in CONVOLUTIONS else 0
        weight, axes = node.inputs[place], weight_axes(node, place)
        assert weight is not None
        assert axes is not None
        tensor = weight.const_value
        assert tensor is not None
        if place:
            if (weight, axes[1]) not in by_channel:
                by_channel[weight, axes[1]] = _by_channel(graph, weight, tensor, axes[1])
            node.replace_input_with(1, by_channel[weight, axes[1]])
        else:
            if weight not in by_block:
                by_block[weight] = _by_block(graph, weight, tensor, block_size, symmetric)
            _look_up(graph, node, by_block[weight], block_size)
        if not weight.uses():
            graph.initializers.pop(str(weight.name), None)


def _by_channel(
    graph: ir.Graph, weight: ir.Value, tensor: ir.TensorProtocol, channels: int
) -> ir.Value:
    """Insert a ``DequantizeLinear`` of a weight with a scale for each channel."""
    shape = tuple(int(size) for size in tensor.shape.numpy())
    parts = RoundedParts(graph, weight, ["channels", channels])
    stored = [
        parts.add("Q8", "levels", ir.DataType.INT8, shape),
        parts.add("scales", "scales", tensor.dtype, (shape[channels],)),
    ]
    result = ir.Value(
        name=f"{weight.name}_dequantized", type=ir.TensorType(tensor.dtype), shape=ir.Shape(shape)
    )
    attributes, name = {"axis": channels}, f"{weight.name}_dequantize"
    graph.insert_before(
        graph[0], ir.node("DequantizeLinear", stored, attributes, outputs=[result], name=name)
    )
    return result


def _by_block(
    graph: ir.Graph, weight: ir.Value, tensor: ir.TensorProtocol, size: int, symmetric: bool
) -> list[ir.Value]:
    """Add initializers for the levels, scales and zero points of the rows of a table."""
    rows, columns = (int(length) for length in tensor.shape.numpy())
    blocks = (rows, -(-columns // size))
    parts = RoundedParts(graph, weight, ["rows", 8, size, int(symmetric)])
    stored = [
        parts.add("Q8", "levels", ir.DataType.UINT8, (rows, columns)),
        parts.add("scales", "scales", tensor.dtype, blocks),
    ]
    # Without zero points, the operator takes the middle of the range.
    if not symmetric:
        stored.append(parts.add("zero_points", "zero_points", ir.DataType.UINT8, blocks))
    return stored


def _look_up(graph: ir.Graph, node: ir.Node, stored: list[ir.Value], block_size: int) -> None:
    """Replace a ``Gather`` by a ``GatherBlockQuantized``."""
    attributes = {"bits": 8, "block_size": block_size, "gather_axis": 0, "quantize_axis": 1}
    inputs = [stored[0], node.inputs[1], *stored[1:]]
    replace(node, [ir.node("GatherBlockQuantized", inputs, attributes, domain="com.microsoft")])
    graph.opset_imports.setdefault("com.microsoft", 1)


class RoundedParts:
    """The parts of a rounded weight as initializers, computed when they are written, and only once."""

    def __init__(self, graph: ir.Graph, weight: ir.Value, scheme: list[Any]) -> None:
        self._graph, self._weight, self._scheme = graph, weight, scheme
        self._roundings = Roundings()

    def add(self, end: str, part: str, dtype: ir.DataType, shape: Sequence[int]) -> ir.Value:
        """Add the initializer of a part; ``end`` is the end of its name."""
        source, scheme, roundings = self._weight.const_value, self._scheme, self._roundings
        assert source is not None

        def read() -> ir.TensorProtocol:
            array = roundings.part("", part, lambda: rounding(source.numpy(), scheme))
            # the same numbers, if a type of its own is wanted for them
            return ir.Tensor(array.astype(dtype.numpy(), copy=False), dtype=dtype)

        name = f"{self._weight.name}_{end}"
        tensor = ir.LazyTensor(read, dtype, ir.Shape(shape), name=name)
        recipe = step("round", recipe_of(self._weight), [part, *scheme])
        kind = ir.TensorType(dtype)
        value = ir.Value(
            name=name, type=kind, shape=ir.Shape(shape), const_value=recorded(tensor, recipe)
        )
        self._graph.register_initializer(value)
        return value
