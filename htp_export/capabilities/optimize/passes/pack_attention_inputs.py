"""Queries, keys and values as one packed input of ``GroupQueryAttention``."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from htp_export.capabilities.optimize.passes.merge_parallel_projections import (
    Layer,
    joint_product,
    layer_of,
)
from htp_export.capabilities.optimize.passes.merge_slices import Part, covers, part_of, put_split
from htp_export.capabilities.optimize.registry import register, shapes_in
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
"""Operators on queries and keys before the attention, which rotates them by their positions."""


@register("pack_attention_inputs", level="fused", after="fuse_conv_batchnorm")
class PackAttentionInputs(ir.passes.InPlacePass):
    """Packs queries, keys and values of ``GroupQueryAttention`` into one tensor.

    The three linear layers before it become one product and a ``Split``, also if queries and keys
    are normalized in between. The operator accepts the packed tensor as query, without key and
    value, and does not copy it. See
    https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.GroupQueryAttention.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        attentions = [node for node in model.graph if _is_unpacked(node)]
        if not attentions:
            return ir.passes.PassResult(model, modified=False)
        known = shapes_in(model.graph)
        modified = False
        for node in attentions:
            behind = map(_layer_behind, node.inputs[:3])
            layers = [layer for layer in behind if layer is not None]
            joint = joint_product(model.graph, layers)
            if joint is not None:
                put_split(model.graph, joint, -1, [(layer.columns, layer.end) for layer in layers])
                # the next run packs the parts, unless the layers have to stay exact
                modified = True
                continue
            packed = _packed(node.inputs[:3], known)
            if packed is not None:
                _set_packed(node, packed)
                modified = True
        if modified:
            remove_unused(model)
        return ir.passes.PassResult(model, modified)


def _is_unpacked(node: ir.Node) -> bool:
    """Whether a node is ``GroupQueryAttention`` with separate queries, keys and values."""
    if (node.domain, node.op_type) != ("com.microsoft", "GroupQueryAttention"):
        return False
    return all(value is not None for value in node.inputs[:3])


def _layer_behind(value: ir.Value | None) -> Layer | None:
    """The linear layer of queries, keys or values, before they are normalized and split."""
    layer = layer_of(value)
    while layer is None and value is not None and is_standard(value.producer(), *_BETWEEN):
        value = value.producer().inputs[0]  # type: ignore[union-attr]
        layer = layer_of(value)
    return layer


def _packed(values: Sequence[ir.Value | None], known: Symbolic) -> ir.Value | None:
    """The tensor whose last axis consists of some values, in order."""
    parts: list[Part] = []
    for value in values:
        part = part_of(value, known)
        if part is None:
            return None
        parts.append(part)
    if not covers(parts, known):
        return None
    source, axis = parts[0].source, parts[0].axis
    return source if known.rank(source) == axis + 1 else None


def _set_packed(node: ir.Node, packed: ir.Value) -> None:
    """Replace queries, keys and values by one input."""
    inputs, outputs = [packed, None, None, *node.inputs[3:]], list(node.outputs)
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
