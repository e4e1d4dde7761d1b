"""Factors and summands after a normalization, folded into its weights."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.registry import NodePass, absorbed, register
from htp_export.editing.editing import (
    Array,
    add_constant,
    constant_array,
    replace,
    times,
)
from htp_export.format.recipes import CONSTANT, Recipe, step
from htp_export.model.recipes import recipe_of

_NORMALIZATIONS = ("BatchNormalization", "InstanceNormalization")
"""Operators with a scale and a bias for each channel, the second dimension."""


@register("fuse_normalization_scale", level="tolerant")
class FuseNormalizationScale(NodePass):
    """Folds ``Mul`` and ``Add`` of one number a channel into the normalization before them.

    The normalization is an instance or batch normalization.
    """

    operators = ("Add", "Mul")

    def rewrite(self, node: ir.Node) -> bool:
        for value, factor in (node.inputs, tuple(reversed(node.inputs))):
            norm, numbers = absorbed(value, *_NORMALIZATIONS), constant_array(factor)
            if factor is None or numbers is None or norm is None:
                continue
            if self._fuse(norm, node, factor, numbers):
                return True
        return False

    def _fuse(self, norm: ir.Node, node: ir.Node, factor: ir.Value, numbers: Array) -> bool:
        scale, bias = constant_array(norm.inputs[1]), constant_array(norm.inputs[2])
        rank = self.known.rank(norm.inputs[0])
        if scale is None or bias is None or rank is None:
            return False
        is_training = norm.attributes.get_int("training_mode", 0)
        if is_training or any(output.uses() for output in norm.outputs[1:]):
            return False
        per_channel = _per_channel(numbers, rank, len(scale))
        if per_channel is None or per_channel.dtype != scale.dtype:
            return False
        new, recipes = {"scale": scale, "bias": bias}, _recipes(norm, len(scale))
        of_factor = _channels(factor, numbers, len(scale))
        for kind in ("scale", "bias") if node.op_type == "Mul" else ("bias",):
            computed = _computed(node.op_type, new[kind], per_channel)
            if computed is None:
                return False
            new[kind] = computed
            recipes[kind] = step(node.op_type.lower(), recipes[kind], of_factor)
        parameters: list[ir.Value] = []
        for kind, array in new.items():
            name = f"{node.outputs[0].name}_{kind}"
            parameters.append(add_constant(self.graph, array, name, recipes[kind]))
        inputs = [norm.inputs[0], *parameters, *norm.inputs[3:]]
        replace(node, [ir.node(norm.op_type, inputs, norm.attributes)])
        return True


def _computed(op_type: str, one: Array, other: Array) -> Array | None:
    """The sum or the product of two arrays; None if an element overflows, or a product underflows."""
    if op_type == "Mul":
        return times(one, other)
    with np.errstate(over="ignore"):
        total = one + other
    return total if np.isfinite(total).all() else None


def _recipes(norm: ir.Node, channels: int) -> dict[str, Recipe]:
    """The recipes of the scale and the bias of a normalization."""
    found: dict[str, Recipe] = {}
    for kind, value in (("scale", norm.inputs[1]), ("bias", norm.inputs[2])):
        array = constant_array(value)
        assert value is not None
        assert array is not None
        found[kind] = _channels(value, array, channels)
    return found


def _channels(value: ir.Value, array: Array, channels: int) -> Recipe:
    """The recipe of one number for each channel; of a constant that has the same for all, this number."""
    recipe = recipe_of(value)
    if recipe == CONSTANT:
        first = array.reshape(-1)[0]
        is_uniform = array.tobytes() == np.full_like(array, first).tobytes()
        return float(first) if is_uniform and np.isfinite(first) else recipe
    if array.ndim != 1:
        recipe = step("reshape", recipe, [array.size])
    return recipe if array.size == channels else step("expand", recipe, [channels])


def _per_channel(numbers: Array, rank: int, channels: int) -> Array | None:
    """One number for each channel from numbers that broadcast to a tensor.

    None if a channel has several.
    """
    if numbers.ndim > rank:
        return None
    shape = (1,) * (rank - numbers.ndim) + numbers.shape
    if any(size != 1 for axis, size in enumerate(shape) if axis != 1):
        return None
    if shape[1] not in (1, channels):
        return None
    return np.ascontiguousarray(np.broadcast_to(numbers.reshape(-1), (channels,)))
