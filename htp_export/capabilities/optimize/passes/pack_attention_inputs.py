"""Queries, keys and values that are parts of one tensor, read by ``GroupQueryAttention`` as this tensor."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from htp_export.capabilities.optimize.passes.merge_parallel_projections import (
    Layer,
    joint_product,
    layer_of,
)
from htp_export.capabilities.optimize.passes.merge_slices import covers, part_of, put_split
from htp_export.capabilities.optimize.registry import register
from htp_export.editing.editing import remove_unused
from htp_export.shapes.operator_kinds import LAYOUT, is_standard
from htp_export.shapes.symbolic import Symbolic

_BETWEEN = (
    *LAYOUT,
    "Cast",
    "LayerNormalization",
    "RMSNormalization",
    "SimplifiedLayerNormalization",
)
"""What models do to queries and keys before the attention that turns them by their positions."""


@register("pack_attention_inputs", level="fused", after="fuse_conv_batchnorm")
class PackAttentionInputs(ir.passes.InPlacePass):
    """Gives ``GroupQueryAttention`` one tensor of which its queries, keys and values are the consecutive parts.

    Three linear layers that it reads become one product and a ``Split``, also where queries and
    keys are normalized in between. The operator takes the parts of one tensor without a copy, as
    query without key and value. See
    https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.GroupQueryAttention.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [node for node in model.graph if _is_apart(node)]
        known = Symbolic(model.graph) if found else None
        modified = False
        for node in found:
            layers = [
                layer for value in node.inputs[:3] if (layer := _layer_behind(value)) is not None
            ]
            joint = joint_product(model.graph, layers)
            if joint is not None:
                put_split(model.graph, joint, -1, [(layer.columns, layer.end) for layer in layers])
                # its parts are read as one next time, unless the layers have to stay exact
                modified = True
                continue
            whole = _whole(node.inputs[:3], known) if known is not None else None
            if whole is not None:
                _read(node, whole)
                modified = True
        if modified:
            remove_unused(model)
        return ir.passes.PassResult(model, modified)


def _is_apart(node: ir.Node) -> bool:
    """Whether a node is ONNX Runtime's attention with a cache, with queries, keys and values apart."""
    is_it = (node.domain, node.op_type) == ("com.microsoft", "GroupQueryAttention")
    return is_it and all(value is not None for value in node.inputs[:3])


def _layer_behind(value: ir.Value | None) -> Layer | None:
    """The linear layer that gives queries, keys or values, before they are normalized and arranged by heads."""
    layer = layer_of(value)
    while layer is None and value is not None and is_standard(value.producer(), *_BETWEEN):
        value = value.producer().inputs[0]  # type: ignore[union-attr]
        layer = layer_of(value)
    return layer


def _whole(values: Sequence[ir.Value | None], known: Symbolic) -> ir.Value | None:
    """The tensor of which some values are all parts of the last dimension, in order."""
    parts = [part for value in values if (part := part_of(value, known)) is not None]
    if len(parts) < len(values) or not covers(parts, known):
        return None
    source, axis = parts[0][:2]
    return source if known.rank(source) == axis + 1 else None


def _read(node: ir.Node, whole: ir.Value) -> None:
    inputs, outputs = [whole, None, None, *node.inputs[3:]], list(node.outputs)
    new = ir.node(
        node.op_type,
        inputs,
        node.attributes,
        domain=node.domain,
        num_outputs=len(outputs),
        name=node.name,
    )
    graph = node.graph
    assert graph is not None
    ir.convenience.replace_nodes_and_values(graph, node, [node], [new], outputs, list(new.outputs))
