"""Factors and summands after a normalization, folded into its weights."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.registry import NodePass, absorbed, register
from htp_export.editing.editing import (
    Array,
    add_constant,
    constant_array,
    is_constant,
    replace,
    times,
)
from htp_export.model.recipes import of_values

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
            if numbers is not None and norm is not None and self._fuse(norm, node, numbers):
                return True
        return False

    def _fuse(self, norm: ir.Node, node: ir.Node, numbers: Array) -> bool:
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
        if node.op_type == "Mul":
            scale, bias = times(scale, per_channel), times(bias, per_channel)
        else:
            with np.errstate(over="ignore"):
                bias = bias + per_channel
        if scale is None or bias is None or not np.isfinite(bias).all():
            return False
        name, factors = node.outputs[0].name, [value for value in node.inputs if is_constant(value)]
        parameters: list[ir.Value] = []
        for kind, array, old in (("scale", scale, norm.inputs[1]), ("bias", bias, norm.inputs[2])):
            recipe = of_values("a normalization's scale", old, *factors)
            parameters.append(add_constant(self.graph, array, f"{name}_{kind}", recipe))
        inputs = [norm.inputs[0], *parameters, *norm.inputs[3:]]
        replace(node, [ir.node(norm.op_type, inputs, norm.attributes)])
        return True


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
