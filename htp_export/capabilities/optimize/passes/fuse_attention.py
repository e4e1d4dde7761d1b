"""ONNX's own ``Attention`` (opset 23): products, scale, mask and softmax of an attention as one node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from htp_export.capabilities.optimize.attention_matching import (
    HEADS_FIRST,
    Placed,
    match_scores,
    turned_back,
)
from htp_export.capabilities.optimize.passes.eliminate_redundant_transposes import permutation
from htp_export.capabilities.optimize.registry import NodePass, absorbed, register
from htp_export.editing.editing import is_boundary, replace
from htp_export.model.neighbours import producer_of
from htp_export.shapes.symbolic import Symbolic


@register("fuse_attention", level="tolerant")
class FuseAttention(NodePass):
    """Makes ``Attention`` of opset 23 of an attention's nodes, with its reshapes and transpositions where they fit.

    See https://onnx.ai/onnx/operators/onnx__Attention.html. In a file of an older opset it does
    nothing. What a module gives stays: where a dropout between softmax and product is a module of
    its own, so does the attention.
    """

    operators = ("Attention", "MatMul")
    opset = 23

    def rewrite(self, node: ir.Node) -> bool:
        attention = _written(node) if node.op_type == "Attention" else _match(node, self.known)
        if attention is None:
            return False
        if joined := _joined(node, attention, self.known):
            end, inputs, heads = joined
            attributes = {**attention.attributes, "q_num_heads": heads, "kv_num_heads": heads}
            replace(end, [ir.node("Attention", [*inputs, *attention.rest], attributes)])
            return True
        if node.op_type == "Attention":
            return False
        nodes: list[ir.Node] = []
        queries, keys, values = (placed.value for placed in attention.sources)
        if not attention.sources[1].is_turned:
            nodes.append(ir.node("Transpose", [keys], {"perm": HEADS_FIRST}))
            keys = nodes[0].outputs[0]
        nodes.append(
            ir.node("Attention", [queries, keys, values, *attention.rest], attention.attributes)
        )
        replace(node, nodes)
        return True


@dataclass(frozen=True)
class _Attention:
    """Queries, keys and values of an attention, its other inputs, and its attributes."""

    sources: Sequence[Placed]
    rest: Sequence[ir.Value | None] = ()
    attributes: Mapping[str, ir.Attr | float] = field(default_factory=dict)


def _written(node: ir.Node) -> _Attention | None:
    """What an ``Attention`` has, if it can absorb the reshapes and transpositions that split and join heads."""
    sources = [Placed(value) for value in node.inputs[:3] if value is not None]
    if len(sources) < 3 or len(node.outputs) > 1 or any(node.inputs[4:]):
        return None
    return _Attention(sources, node.inputs[3:], node.attributes)


def _match(last: ir.Node, known: Symbolic) -> _Attention | None:
    """The attention whose last product is a node."""
    softmax, values = absorbed(last.inputs[0], "Softmax"), last.inputs[1]
    if softmax is None or softmax.attributes.get_int("axis", -1) not in (-1, 3) or values is None:
        return None
    scores = match_scores(softmax.inputs[0], absorbed)
    turning = producer_of(scores.keys, "Transpose") if scores is not None else None
    keys = turning.inputs[0] if turning is not None else None
    if scores is None or turning is None or keys is None or scores.softcap:
        return None
    if any(known.rank(value) != 4 for value in (scores.queries, scores.product.outputs[0], values)):
        return None
    perm = permutation(turning, known)
    if perm not in ([0, 1, 3, 2], [0, 2, 3, 1]) or not _mask_fits(
        scores.bias, scores.product, known
    ):
        return None
    sources = [Placed(scores.queries), Placed(keys, is_turned=perm == [0, 1, 3, 2]), Placed(values)]
    return _Attention(
        sources, [scores.bias] if scores.bias is not None else [], {"scale": scores.scale}
    )


def _mask_fits(mask: ir.Value | None, product: ir.Node, known: Symbolic) -> bool:
    """Whether a mask has a value for each query and key: ONNX Runtime broadcasts over batch and heads only."""
    if mask is None:
        return True
    shape, scores = known.shape(mask), known.shape(product.outputs[0])
    numbers = known.dtype(mask) == known.dtype(product.outputs[0]) is not None
    return (
        shape is not None
        and scores is not None
        and numbers
        and 2 <= len(shape) <= 4
        and shape[-2:] == scores[-2:]
    )


def _joined(
    last: ir.Node, attention: _Attention, known: Symbolic
) -> tuple[ir.Node, Sequence[ir.Value], int] | None:
    """The last node, inputs and number of heads of an attention between nodes that split and join heads."""
    apart = [placed.before_turning(known, _inside) for placed in attention.sources]
    inputs = [joint for placed in apart if (joint := placed.joint(known, _inside)) is not None]
    turn, end = turned_back(last.outputs[0], known)
    if len(inputs) < len(apart) or turn is None or end is None:
        return None
    if is_boundary(last.outputs[0]) or is_boundary(turn.outputs[0]):
        return None
    heads = {(known.shape(placed.value) or (None,) * 4)[2] for placed in apart}
    number = heads.pop()
    return (end, inputs, number) if isinstance(number, int) and not heads else None


def _inside(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The producer of a value that no module takes or gives."""
    return None if value is None or is_boundary(value) else producer_of(value, *op_types)
