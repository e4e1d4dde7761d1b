"""Biases in a form that ONNX Runtime's static quantizer supports: vectors of integers, or floats.

The scale of a bias is that of the input times that of the weight, one for each channel. The
quantizer fails on a bias of another shape, or writes scales along the wrong axis. Such a bias is
replaced by an input of the graph: the quantizer leaves a bias that is not constant in fp32, and
quantizes the other inputs of the node.
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

_PLACE = 2
"""The place of the bias among the inputs of these operators."""


def is_bias(node: ir.Node, place: int) -> bool:
    """Whether an input of a node is a bias."""
    return place == _PLACE and node.op_type in WITH_BIAS


def bias_shape(node: ir.Node, shape: Sequence[int], scales: int) -> tuple[int, ...] | None:
    """The shape in which a bias can be quantized with a number of scales; None if it cannot.

    Examples:
        >>> gemm = ir.node("Gemm", [ir.val("x"), ir.val("weight"), ir.val("bias")])
        >>> bias_shape(gemm, (1, 8), 8), bias_shape(gemm, (4, 8), 8), bias_shape(gemm, (4, 8), 0)
        ((8,), None, (4, 8))
    """
    if not scales or tuple(shape) == (scales,):
        return tuple(shape)
    # A Gemm broadcasts its bias: a row of one element, or of all channels, becomes a vector.
    is_row = bool(shape) and math.prod(shape[:-1]) == 1 and shape[-1] in (1, scales)
    return (scales,) if node.op_type == "Gemm" and is_row else None


def fit_biases(graph: ir.Graph, scales_of: Callable[[ir.Node], int]) -> dict[str, str]:
    """Convert the biases of a part to vectors, in place.

    Args:
        graph: The part.
        scales_of: Returns the number of scales of the weight of a node; 0 for a single scale.

    Returns:
        Name of a node → the reason why its bias cannot be quantized.
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
                f"its shape is {list(shape)}, and ONNX Runtime has {scales} scales for it"
            )
        elif fitting != shape:
            node.replace_input_with(_PLACE, _in_shape(graph, bias, tensor, fitting))
            remove_unused([bias])
    return unfit


def _in_shape(
    graph: ir.Graph, bias: ir.Value, tensor: ir.TensorProtocol, shape: tuple[int, ...]
) -> ir.Value:
    """Add an initializer: a bias broadcast to a vector."""
    recipe = step("reshape", recipe_of(bias), [tensor.size])
    if tensor.size < math.prod(shape):
        recipe = step("expand", recipe, list(shape))

    def broadcast(array: Array) -> Array:
        return np.broadcast_to(array.reshape(-1), shape)

    return add_initializer(
        graph, changed_when_written(tensor, broadcast, recipe, shape), f"{bias.name}_row", recipe
    )


def hide_biases(graph: ir.Graph, names: Iterable[str]) -> dict[str, ir.Value]:
    """Replace the biases of nodes by inputs, in place; returns name of the input → bias."""
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
    """Replace the inputs of `hide_biases` by the constants, in the quantized graph, in place."""
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
