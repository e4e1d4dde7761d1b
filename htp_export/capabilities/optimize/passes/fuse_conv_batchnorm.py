"""Batch normalization, folded into the convolution before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.registry import NodePass, decline, register
from htp_export.editing.editing import Array, add_initializer, is_constant, replace
from htp_export.model.folded_recipes import batchnorm_folded
from htp_export.model.neighbours import only_consumer, producer_of
from htp_export.model.recipes import recipe_of
from htp_export.weights.products import changed_when_written

_LARGEST = 1e8
"""The largest factor of a channel: with larger ones, weights may become infinite, and results may
not."""


@register("fuse_conv_batchnorm", level="tolerant")
class FuseConvBatchnorm(NodePass):
    """Folds a batch normalization into the weights and bias of the convolution before it.

    The new weights are computed when they are written, one at a time, so that memory holds no
    second set.
    """

    operators = ("BatchNormalization",)

    def rewrite(self, node: ir.Node) -> bool:
        conv = producer_of(node.inputs[0], "Conv")
        if conv is None:
            return False
        why = _why_not(conv, node)
        if why:
            return decline("conv_batchnorm", [conv, node], why)
        self._fuse(conv, node)
        return True

    def _fuse(self, conv: ir.Node, norm: ir.Node) -> None:
        weight: Any = conv.inputs[1]
        tensor, before = weight.const_value, _bias(conv)
        scale, shift = _scale_and_shift(norm, before)
        column = scale.reshape(-1, *[1] * (len(tensor.shape) - 1))
        recipes = batchnorm_folded(
            recipe_of(weight),
            None if before is None else recipe_of(before),
            [recipe_of(value) for value in norm.inputs[1:5] if value is not None],
            norm.attributes.get_float("epsilon", 1e-5),
            column.shape,
        )
        scaled = changed_when_written(
            tensor, lambda array: (array * column).astype(np.float32), recipes[0]
        )
        normalized = add_initializer(self.graph, scaled, f"{weight.name}_normalized", recipes[0])
        bias = add_initializer(self.graph, ir.tensor(shift), f"{weight.name}_bias", recipes[1])
        replace(norm, [ir.node("Conv", [conv.inputs[0], normalized, bias], conv.attributes)])


def _why_not(conv: ir.Node, norm: ir.Node) -> str:
    """Why the normalization cannot be folded; empty if it can."""
    if only_consumer(conv.outputs[0]) is None:
        return "other nodes use the result of the Conv"
    if norm.attributes.get_int("training_mode", 0) or len(norm.outputs) > 1:
        return "the normalization is in training mode"
    bias = [value for value in conv.inputs[2:] if value is not None]
    weights = [conv.inputs[1], *norm.inputs[1:], *bias]
    if not all(map(is_constant, weights)):
        return "weights or statistics are computed"
    if weights[0].dtype != ir.DataType.FLOAT:  # type: ignore[union-attr]
        return "the weight is not of float32"
    return "its factors are very large" if has_large_factors(norm, _bias(conv)) else ""


def _bias(conv: ir.Node) -> ir.Value | None:
    return conv.inputs[2] if len(conv.inputs) > 2 else None


def has_large_factors(norm: ir.Node, bias: ir.Value | None = None) -> bool:
    """Whether weights may overflow that a ``BatchNormalization`` is folded into.

    ``bias``: the bias of the layer before it.
    """
    scale, shift = _scale_and_shift(norm, bias)
    return not ((np.abs(scale) <= _LARGEST).all() and np.isfinite(shift).all())


def _scale_and_shift(norm: ir.Node, bias: ir.Value | None) -> tuple[Array, Array]:
    """The factor and the summand of each channel, with the bias of the layer before."""
    parameters: list[Any] = [value.const_value for value in norm.inputs[1:] if value is not None]
    gamma, beta, mean, variance = (tensor.numpy() for tensor in parameters)
    before: Array | int = 0
    if bias is not None and bias.const_value is not None:
        before = bias.const_value.numpy()
    with np.errstate(all="ignore"):
        scale = gamma / np.sqrt(variance + np.float32(norm.attributes.get_float("epsilon", 1e-5)))
        return scale, (beta + (before - mean) * scale).astype(np.float32)
