"""Batch normalisation, done by the weights of the convolution before it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from htp_export.model.operators import is_standard
from htp_export.passes.editing import add_initializer, is_constant, only_reader, remove_unused, replace
from htp_export.passes.registry import register

__all__ = ["FuseConvBatchnorm"]


@register("fuse_conv_batchnorm", level="tolerant")
class FuseConvBatchnorm(ir.passes.InPlacePass):
    """Scales the weights and bias of a convolution as the batch normalisation after it would scale the result.

    The new weights are computed when they are written, one at a time: no second set is held in memory.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in model.graph:
            conv = node.inputs[0].producer() if is_standard(node, "BatchNormalization") and node.inputs[0] else None
            if conv is not None and is_standard(conv, "Conv") and only_reader(conv.outputs[0]) is not None:
                modified |= _fuse(model.graph, conv, node)
        if modified:
            remove_unused(model)
        return ir.passes.PassResult(model, modified)


def _fuse(graph: ir.Graph, conv: ir.Node, norm: ir.Node) -> bool:
    if norm.attributes.get_int("training_mode", 0) or len(norm.outputs) > 1:
        return False
    weight, bias = conv.inputs[1], conv.inputs[2] if len(conv.inputs) > 2 else None
    if not all(map(is_constant, (weight, *norm.inputs[1:]))) or (bias is not None and not is_constant(bias)):
        return False
    tensor = weight.const_value  # type: ignore[union-attr]
    gamma, beta, mean, variance = (value.const_value.numpy() for value in norm.inputs[1:])  # type: ignore[union-attr]
    if tensor is None or tensor.dtype != ir.DataType.FLOAT:
        return False
    scale = gamma / np.sqrt(variance + np.float32(norm.attributes.get_float("epsilon", 1e-5)))
    shift = 0 if bias is None or bias.const_value is None else bias.const_value.numpy()
    added = (beta + (shift - mean) * scale).astype(np.float32)
    column = scale.reshape(-1, *[1] * (len(tensor.shape) - 1))
    lazy = ir.LazyTensor(
        lambda: ir.tensor((tensor.numpy() * column).astype(np.float32)), tensor.dtype, ir.Shape(tensor.shape.numpy())
    )
    inputs = [
        conv.inputs[0],
        add_initializer(graph, lazy, f"{weight.name}_normalized"),  # type: ignore[union-attr]
        add_initializer(graph, ir.tensor(added), f"{weight.name}_bias"),  # type: ignore[union-attr]
    ]
    replace(norm, [ir.node("Conv", inputs, conv.attributes)])
    return True
