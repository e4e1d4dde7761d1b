"""Batch normalisation, folded into the convolution before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.registry import NodePass, decline, register
from htp_export.editing.editing import Array, add_initializer, is_constant, replace
from htp_export.model.neighbours import only_consumer, producer_of
from htp_export.model.recipes import batchnorm_folded, recipe_of
from htp_export.weights.products import changed_when_written

_LARGEST = 1e8
"""Factors of a channel; larger ones may make weights infinite, which stay finite where the results are scaled."""


@register("fuse_conv_batchnorm", level="tolerant")
class FuseConvBatchnorm(NodePass):
    """Scales the weights and bias of a convolution as the batch normalisation after it would scale the result.

    The new weights are computed when they are written, one at a time: no second set is held in
    memory.
    """

    operators = ("BatchNormalization",)

    def rewrite(self, node: ir.Node) -> bool:
        conv = producer_of(node.inputs[0], "Conv")
        if conv is None:
            return False
        if why := _why_not(conv, node):
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
    """Why the normalisation cannot be folded; empty if it can."""
    if only_consumer(conv.outputs[0]) is None:
        return "what the Conv gives is read elsewhere"
    if norm.attributes.get_int("training_mode", 0) or len(norm.outputs) > 1:
        return "the normalisation is in training mode"
    weights = [
        conv.inputs[1],
        *norm.inputs[1:],
        *(value for value in conv.inputs[2:] if value is not None),
    ]
    if not all(map(is_constant, weights)):
        return "weights or statistics are computed"
    if weights[0].dtype != ir.DataType.FLOAT:  # type: ignore[union-attr]
        return "the weight is not of float32"
    return "its factors are very large" if has_large_factors(norm, _bias(conv)) else ""


def _bias(conv: ir.Node) -> ir.Value | None:
    return conv.inputs[2] if len(conv.inputs) > 2 else None


def has_large_factors(norm: ir.Node, bias: ir.Value | None = None) -> bool:
    """Whether weights that are scaled like the results of a layer before a ``BatchNormalization`` may overflow."""
    scale, shift = _scale_and_shift(norm, bias)
    return not ((np.abs(scale) <= _LARGEST).all() and np.isfinite(shift).all())


def _scale_and_shift(norm: ir.Node, bias: ir.Value | None) -> tuple[Array, Array]:
    """The factor of each channel, and what is added to it, with the bias of the layer before."""
    gamma, beta, mean, variance = (value.const_value.numpy() for value in norm.inputs[1:])  # type: ignore[union-attr]
    before = 0 if bias is None or bias.const_value is None else bias.const_value.numpy()
    with np.errstate(all="ignore"):
        scale = gamma / np.sqrt(variance + np.float32(norm.attributes.get_float("epsilon", 1e-5)))
        return scale, (beta + (before - mean) * scale).astype(np.float32)
