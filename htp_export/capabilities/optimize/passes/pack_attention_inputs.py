"""Queries, keys and values that are parts of one tensor, read by ``GroupQueryAttention`` as this tensor."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from htp_export.capabilities.optimize.passes.merge_parallel_projections import is_group_query_attention
from htp_export.capabilities.optimize.passes.merge_slices import sliced
from htp_export.capabilities.optimize.registry import register
from htp_export.editing.editing import remove_unused
from htp_export.model.neighbours import producer_of
from htp_export.shapes.symbolic import Symbolic


@register("pack_attention_inputs", level="fused", after="merge_parallel_projections")
class PackAttentionInputs(ir.passes.InPlacePass):
    """Gives ``GroupQueryAttention`` one tensor of which its queries, keys and values are the consecutive parts.

    The operator takes them without a copy, as query without key and value. See
    https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.GroupQueryAttention.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [node for node in model.graph if is_group_query_attention(node)]
        known = Symbolic(model.graph) if found else None
        modified = False
        for node in found:
            whole = _whole(node.inputs[:3], known) if known is not None else None
            if whole is not None:
                _read(node, whole)
                modified = True
        if modified:
            remove_unused(model)
        return ir.passes.PassResult(model, modified)


def _whole(values: Sequence[ir.Value | None], known: Symbolic) -> ir.Value | None:
    """The tensor of which some values are all parts of the last dimension, in order."""
    split = producer_of(values[0], "Split")
    if split is not None:
        rank, axis = known.rank(split.inputs[0]), split.attributes.get_int("axis", 0)
        return split.inputs[0] if tuple(split.outputs) == tuple(values) and axis in (-1, (rank or 0) - 1) else None
    cuts = [sliced(producer_of(value, "Slice"), known) for value in values]
    sources = {None if cut is None else cut.source for cut in cuts}
    source = sources.pop()
    shape = known.shape(source)
    if sources or source is None or shape is None:
        return None
    at = 0
    for cut in cuts:
        bounds = cut.bounds.get(len(shape) - 1) if cut is not None and len(cut.bounds) == 1 else None
        if bounds is None or bounds[0] != at or bounds[2] != 1:
            return None
        at = bounds[1]
    size = shape[-1]
    return source if isinstance(size, int) and at >= size else None


def _read(node: ir.Node, whole: ir.Value) -> None:
    graph = node.graph
    if graph is None:
        raise ValueError(f"{node.op_type} {node.name!r} is in no graph")
    inputs = [whole, None, None, *node.inputs[3:]]
    new = ir.node(
        node.op_type, inputs, node.attributes, domain=node.domain, num_outputs=len(node.outputs), name=node.name
    )
    ir.convenience.replace_nodes_and_values(graph, node, [node], [new], list(node.outputs), list(new.outputs))
