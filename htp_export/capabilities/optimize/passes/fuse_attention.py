"""ONNX's ``Attention`` (opset 23): products, scale, mask and softmax as one node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from htp_export.capabilities.optimize.attention_matching import (
    HEADS_FIRST,
    Placed,
    match_head_merge,
    match_scores,
)
from htp_export.capabilities.optimize.passes.eliminate_redundant_transposes import permutation
from htp_export.capabilities.optimize.registry import NodePass, absorbed, register
from htp_export.editing.editing import is_boundary, replace
from htp_export.model.neighbours import producer_of
from htp_export.shapes.symbolic import Symbolic


@register("fuse_attention", level="tolerant")
class FuseAttention(NodePass):
    """Fuses an attention into ``Attention`` of opset 23, with the nodes that split its heads.

    See https://onnx.ai/onnx/operators/onnx__Attention.html. In a file of an older opset it does
    nothing. Outputs of modules stay: a dropout module between softmax and product prevents the
    fusion.
    """

    operators = ("Attention", "MatMul")
    opset = 23

    def rewrite(self, node: ir.Node) -> bool:
        attention = _written(node) if node.op_type == "Attention" else _match(node, self.known)
        if attention is None:
            return False
        between_heads = _between_heads(node, attention, self.known)
        if between_heads is not None:
            end, inputs, heads = between_heads
            attributes = {**attention.attributes, "q_num_heads": heads, "kv_num_heads": heads}
            replace(end, [ir.node("Attention", [*inputs, *attention.rest], attributes)])
            return True
        if node.op_type == "Attention":
            return False
        nodes: list[ir.Node] = []
        queries, keys, values = (placed.value for placed in attention.sources)
        if not attention.sources[1].heads_first:
            nodes.append(ir.node("Transpose", [keys], {"perm": HEADS_FIRST}))
            keys = nodes[0].outputs[0]
        arguments = [queries, keys, values, *attention.rest]
        nodes.append(ir.node("Attention", arguments, attention.attributes))
        replace(node, nodes)
        return True


@dataclass(frozen=True)
class _Attention:
    """Queries, keys and values of an attention, its other inputs, and its attributes."""

    sources: Sequence[Placed]
    rest: Sequence[ir.Value | None] = ()
    attributes: Mapping[str, ir.Attr | float] = field(default_factory=dict)


def _written(node: ir.Node) -> _Attention | None:
    """The parts of an ``Attention`` that can absorb the nodes that split and merge heads."""
    sources = [Placed(value) for value in node.inputs[:3] if value is not None]
    if len(sources) < 3 or len(node.outputs) > 1 or any(node.inputs[4:]):
        return None
    return _Attention(sources, node.inputs[3:], node.attributes)


def _match(last: ir.Node, known: Symbolic) -> _Attention | None:
    """The attention whose last product is this node."""
    softmax, values = absorbed(last.inputs[0], "Softmax"), last.inputs[1]
    if softmax is None or softmax.attributes.get_int("axis", -1) not in (-1, 3) or values is None:
        return None
    scores = match_scores(softmax.inputs[0], absorbed)
    if scores is None or scores.softcap:
        return None
    transpose = producer_of(scores.keys, "Transpose")
    keys = transpose.inputs[0] if transpose is not None else None
    if transpose is None or keys is None:
        return None
    if any(known.rank(value) != 4 for value in (scores.queries, scores.product.outputs[0], values)):
        return None
    perm = permutation(transpose, known)
    if perm not in ([0, 1, 3, 2], [0, 2, 3, 1]):
        return None
    if not _mask_fits(scores.bias, scores.product, known):
        return None
    keys_placed = Placed(keys, heads_first=perm == [0, 1, 3, 2])
    sources = [Placed(scores.queries), keys_placed, Placed(values)]
    rest = [scores.bias] if scores.bias is not None else []
    return _Attention(sources, rest, {"scale": scores.scale})


def _mask_fits(mask: ir.Value | None, product: ir.Node, known: Symbolic) -> bool:
    """Whether a mask has a number for each query and key.

    ONNX Runtime broadcasts it over batch and heads only.
    """
    if mask is None:
        return True
    scores = product.outputs[0]
    shape, scores_shape = known.shape(mask), known.shape(scores)
    if shape is None or scores_shape is None or not 2 <= len(shape) <= 4:
        return False
    dtype = known.dtype(scores)
    return dtype is not None and known.dtype(mask) == dtype and shape[-2:] == scores_shape[-2:]


def _between_heads(
    last: ir.Node, attention: _Attention, known: Symbolic
) -> tuple[ir.Node, Sequence[ir.Value], int] | None:
    """The last node, inputs and number of heads, with the nodes that split and merge heads."""
    split = [placed.before_transpose(known, _inside) for placed in attention.sources]
    inputs: list[ir.Value] = []
    for placed in split:
        merged = placed.merged(known, _inside)
        if merged is None:
            return None
        inputs.append(merged)
    transpose, merge = match_head_merge(last.outputs[0], known)
    if transpose is None or merge is None:
        return None
    if is_boundary(last.outputs[0]) or is_boundary(transpose.outputs[0]):
        return None
    heads = {(known.shape(placed.value) or (None,) * 4)[2] for placed in split}
    number = heads.pop()
    return (merge, inputs, number) if isinstance(number, int) and not heads else None


def _inside(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The producer of a value that is no input or output of a module."""
    return None if value is None or is_boundary(value) else producer_of(value, *op_types)
