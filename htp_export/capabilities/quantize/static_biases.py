"""Biases of a part as ONNX Runtime's static quantizer can have them: vectors of 32-bit integers, or floats.

A bias gets the scale of the input times those of the weight, one for each channel, and the
quantizer fails on a bias of another shape, or writes scales along the wrong axis. What it cannot
have is hidden from it: it leaves the bias in fp32 where this is no constant, and quantizes
everything else of the node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from htp_export.editing.editing import add_initializer
from htp_export.editing.submodels import constant_of, remove_unused
from htp_export.format.recipes import step
from htp_export.model.recipes import recipe_of
from htp_export.runtime.arrays import Array
from htp_export.weights.products import changed_when_written

WITH_BIAS = frozenset(
    (
        "Conv",
        "ConvTranspose",
        "Gemm",
        "LayerNormalization",
        "InstanceNormalization",
        "BatchNormalization",
    )
)
"""Operators whose third input is a bias, which gets 32 bits."""

_PLACE = 2  # of a bias among the inputs of these operators


def is_bias(node: ir.Node, place: int) -> bool:
    """Whether an input of a node is a bias."""
    return place == _PLACE and node.op_type in WITH_BIAS


def bias_shape(node: ir.Node, shape: Sequence[int], scales: int) -> tuple[int, ...] | None:
    """The shape in which a bias of a node can be quantized with so many scales; None for no shape.

    Examples:
        >>> gemm = ir.node("Gemm", [ir.val("x"), ir.val("weight"), ir.val("bias")])
        >>> bias_shape(gemm, (1, 8), 8), bias_shape(gemm, (4, 8), 8), bias_shape(gemm, (4, 8), 0)
        ((8,), None, (4, 8))
    """
    is_row = bool(shape) and math.prod(shape[:-1]) == 1 and shape[-1] in (1, scales)
    if not scales or tuple(shape) == (scales,):
        return tuple(shape)
    return (scales,) if node.op_type == "Gemm" and is_row else None


def fit_biases(graph: ir.Graph, scales_of: Callable[[ir.Node], int]) -> dict[str, str]:
    """Write the biases of a part as vectors, in place.

    Args:
        graph: The part.
        scales_of: The number of scales of the weight of a node; 0 for one scale of the whole
            weight.

    Returns:
        Name of a node → why its bias cannot be quantized.
    """
    unfit: dict[str, str] = {}
    for node in graph:
        if node.op_type not in WITH_BIAS or len(node.inputs) <= _PLACE:
            continue
        bias, scales = node.inputs[_PLACE], scales_of(node)
        tensor = constant_of(bias)
        if bias is None or tensor is None:
            continue
        shape = tuple(int(size) for size in tensor.shape.numpy())
        fitting = bias_shape(node, shape, scales)
        if fitting is None:
            unfit[str(node.name)] = (
                f"its shape is {list(shape)}, and ONNX Runtime has a scale for {scales} numbers"
            )
        elif fitting != shape:
            node.replace_input_with(_PLACE, _in_shape(graph, bias, tensor, fitting))
            remove_unused([bias])
    return unfit


def _in_shape(
    graph: ir.Graph, bias: ir.Value, tensor: ir.TensorProtocol, shape: tuple[int, ...]
) -> ir.Value:
    """A bias that is broadcast to a vector."""
    recipe = step("reshape", recipe_of(bias), [tensor.size])
    if tensor.size < math.prod(shape):
        recipe = step("expand", recipe, list(shape))

    def broadcast(array: Array) -> Array:
        return np.broadcast_to(array.reshape(-1), shape)

    return add_initializer(
        graph, changed_when_written(tensor, broadcast, recipe, shape), f"{bias.name}_row", recipe
    )


def hide_biases(graph: ir.Graph, names: Iterable[str]) -> dict[str, ir.Value]:
    """Make inputs of a graph of the biases of its nodes of these names, in place; name of the input → the constant."""
    hidden: dict[str, ir.Value] = {}
    chosen = frozenset(names)
    for node in graph:
        bias = node.inputs[_PLACE] if node.name in chosen else None
        if bias is None or bias.is_graph_input():
            continue
        name = f"{bias.name}_float"
        entry = next((value for value in graph.inputs if value.name == name), None)
        if entry is None:
            entry = ir.Value(name=name, type=bias.type, shape=bias.shape)
            graph.inputs.append(entry)
            hidden[name] = bias
        node.replace_input_with(_PLACE, entry)
        remove_unused([bias])
    return hidden


def show_biases(made: ir.Graph, hidden: Mapping[str, ir.Value]) -> None:
    """Make constants again of hidden biases, in what the quantizer made of a graph, in place."""
    for entry in [value for value in made.inputs if value.name in hidden]:
        bias = hidden[str(entry.name)]
        constant = made.initializers.get(str(bias.name))
        if constant is None:
            constant = ir.Value(
                name=bias.name, type=bias.type, shape=bias.shape, const_value=bias.const_value
            )
            made.register_initializer(constant)
        entry.replace_all_uses_with(constant)
        made.inputs.remove(entry)
