"""Recipes of the integers, scales and zero points that ONNX Runtime's quantizers compute from weights.

The quantizers do not report how they rounded a weight. So each scheme is tried, and the one with
equal scales and zero points is recorded. Without one, the tensor is *computed*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.quantize.calibration_records import with_floats
from htp_export.capabilities.quantize.static_biases import is_bias
from htp_export.format import tags
from htp_export.format.recipes import CONSTANT, NO_AXIS, Recipe, step
from htp_export.model.neighbours import producer_of
from htp_export.model.recipes import recipe_of, recorded
from htp_export.runtime.arrays import Array
from htp_export.shapes.operator_kinds import dequantizes
from htp_export.weights.rounding import dequantized, linear_schemes, rounding

Weights = Mapping[str, tuple[Recipe, ir.TensorProtocol]]

_ENDS = {"scales": "_scale", "zero_points": "_zero_point", "levels": "_quantized"}
"""Part of a weight → the end of the name that ONNX Runtime's quantizers give it; cheap parts first."""


def float_weights(graph: ir.Graph) -> Weights:
    """Return the weights of a graph before quantization: name → recipe and values."""
    weights: dict[str, tuple[Recipe, ir.TensorProtocol]] = {}
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and tensor.dtype.is_floating_point():
            weights[name] = recipe_of(value), tensor
    return weights


def record_rounding(graph: ir.Graph, weights: Weights) -> None:
    """Record the rounding of the weights of a quantized graph, if a scheme has equal results."""
    for name, (recipe, weight) in weights.items():
        parts = dict(_parts(graph, name))
        if "levels" not in parts or "scales" not in parts:
            continue
        array = np.asarray(weight.numpy())
        for turned in _layouts(weight):
            scheme = _scheme(array.transpose(turned), parts)
            if scheme is not None:
                is_turned = turned != sorted(turned)
                made = step("transpose", recipe, turned) if is_turned else recipe
                _record(parts, made, scheme, array.transpose(turned))
                if made == CONSTANT:
                    _keep_floats(parts, array.transpose(turned), scheme)
                break


def _layouts(weight: ir.TensorProtocol) -> list[list[int]]:
    """Return the orders of axes in which ONNX Runtime stores a weight: unchanged, and transposed for an LSTM."""
    rank = len(weight.shape)
    as_it_is = list(range(rank))
    return [as_it_is, [0, 2, 1]] if rank == _OF_LSTM else [as_it_is]


_OF_LSTM = 3
"""Axes of the weights of an LSTM: directions, gates, inputs."""


def _record(parts: Mapping[str, ir.Value], recipe: Recipe, scheme: list[Any], array: Array) -> None:
    """Record the recipes of the parts of a weight; scales of an LSTM have one more axis."""
    for part, value in parts.items():
        tensor = value.const_value
        assert tensor is not None
        made = step("round", recipe, [part, *scheme])
        shape = tuple(tensor.shape.numpy())
        if shape != _shape_of(part, array, scheme):
            made = step("reshape", made, list(shape))
        value.const_value = recorded(_in_bytes(tensor), made)


def _in_bytes(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """A tensor as `bind` writes it: ONNX Runtime's quantizer lists its numbers one by one."""
    array = np.asarray(tensor.numpy())
    metadata = {**tensor.metadata_props}
    return ir.Tensor(array, dtype=tensor.dtype, name=tensor.name, metadata_props=metadata)


def _keep_floats(parts: Mapping[str, ir.Value], floats: Array, scheme: list[Any]) -> None:
    """Record the floats of a constant: no recipe can compute them again."""
    arrays: dict[str, Array] = {}
    for part, value in parts.items():
        assert value.const_value is not None
        arrays[part] = np.asarray(value.const_value.numpy())
    axis = scheme[2]
    points = arrays.get("zero_points", np.zeros((), arrays["levels"].dtype))
    found = dequantized(arrays["levels"], arrays["scales"], points, axis)
    levels = parts["levels"].const_value
    assert levels is not None
    parts["levels"].const_value = with_floats(levels, floats, found)


def record_biases(graph: ir.Graph, weights: Weights) -> None:
    """Record the rounding of biases to int32, by the scales of the input and of the weight of their operator."""
    for node in graph:
        if node.op_type != "DequantizeLinear" or len(node.inputs) < 2:
            continue
        levels, scales = node.inputs[0], node.inputs[1]
        name = "" if levels is None else str(levels.name).removesuffix(_ENDS["levels"])
        uses = [use for use in node.outputs[0].uses() if is_bias(use.node, use.idx)]
        if name not in weights or levels is None or scales is None or not uses:
            continue
        source = _weight_and_input(uses[0].node)
        if source is None:
            continue
        recipe, (weight_recipe, scheme) = weights[name][0], source
        for part, value in (("levels", levels), ("scales", scales)):
            tensor = _without_recipe(value)
            if tensor is not None:
                made = step("round_bias", recipe, weight_recipe, [part, *scheme])
                value.const_value = recorded(_in_bytes(tensor), made)


def _weight_and_input(node: ir.Node) -> tuple[Recipe, list[Any]] | None:
    """Return the recipe of the weight of an operator, and the scheme of its bias."""
    scale, of_weight = scale_of_input(node), producer_of(node.inputs[1])
    levels = of_weight.inputs[0] if of_weight is not None and dequantizes(of_weight) else None
    if scale is None or levels is None or levels.const_value is None:
        return None
    recipe = recipe_of(levels)
    if not isinstance(recipe, list) or recipe[0] != "round":
        return None
    return recipe[1], [scale, *recipe[-1][1:]]


def scale_of_input(node: ir.Node) -> float | None:
    """Return the scale of the first input of an operator; None if it is not dequantized by a single one."""
    of_input = producer_of(node.inputs[0])
    scale = of_input.inputs[1] if of_input is not None and dequantizes(of_input) else None
    tensor = None if scale is None else scale.const_value
    if tensor is None or tensor.size != 1:
        return None
    return float(tensor.numpy().item())


def record_ranges(graph: ir.Graph, measured: Iterable[str]) -> None:
    """Record scales and zero points of measured tensors as constants: they do not depend on weights."""
    for name in measured:
        for end in (_ENDS["scales"], _ENDS["zero_points"]):
            value = graph.initializers.get(f"{name}{end}")
            tensor = _without_recipe(value)
            if value is not None and tensor is not None:
                value.const_value = recorded(tensor, CONSTANT)


def _parts(graph: ir.Graph, name: str) -> Iterator[tuple[str, ir.Value]]:
    for part, end in _ENDS.items():
        value = graph.initializers.get(f"{name}{end}")
        if value is not None and _without_recipe(value) is not None:
            yield part, value


def _without_recipe(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the contents of an initializer that have no recipe yet; None if there are none."""
    tensor = None if value is None else value.const_value
    return None if tensor is None or tags.RECIPE in tensor.metadata_props else tensor


def _shape_of(part: str, array: Array, scheme: list[Any]) -> tuple[int, ...]:
    """Return the shape in which a part of a weight is rounded."""
    if part == "levels":
        return array.shape
    axis = scheme[2]
    return () if axis == NO_AXIS else (array.shape[axis],)


_SAMPLED = 4
"""Channels of a weight that are rounded again: the quantizer rounds all of them in the same way."""


def _scheme(array: Array, parts: Mapping[str, ir.Value]) -> list[Any] | None:
    """Return the scheme whose results are equal to the levels, scales and zero points of a weight."""
    tensors = {part: value.const_value for part, value in parts.items()}
    levels, scales = tensors["levels"], tensors["scales"]
    assert levels is not None
    assert scales is not None
    if tuple(levels.shape.numpy()) != array.shape or not array.size:
        return None
    found = {part: np.asarray(tensor.numpy()) for part, tensor in tensors.items() if tensor}
    for scheme in linear_schemes(array, levels.dtype.name.lower(), scales.size):
        axis = scheme[2]
        if axis == NO_AXIS:
            sample, expected = array, found
        else:  # a few channels with their levels, scales and zero points
            channels = np.linspace(0, array.shape[axis] - 1, _SAMPLED).astype(int)
            sample = array.take(channels, axis)
            expected = {
                part: each.take(channels, axis) if part == "levels" else each.reshape(-1)[channels]
                for part, each in found.items()
            }
        made = rounding(sample, scheme)
        if all(_is_same(made.part(part), each) for part, each in expected.items()):
            return scheme
    return None


def _is_same(array: Array, other: Array) -> bool:
    """Whether two arrays have equal values in order, in any shapes."""
    if array.size != other.size or array.dtype != other.dtype:
        return False
    return bool((array.reshape(-1) == other.reshape(-1)).all())
