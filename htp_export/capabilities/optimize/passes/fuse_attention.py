"""ONNX's own ``Attention`` (opset 23): products, scale, mask and softmax of an attention as one node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.node_pass import NodePass, absorbed
from htp_export.capabilities.optimize.passes.eliminate_redundant_transposes import permutation
from htp_export.capabilities.optimize.registry import register
from htp_export.editing.editing import is_boundary, multiple, replace, scaled
from htp_export.model.neighbours import only_consumer, producer_of
from htp_export.shapes.symbolic import Symbolic

_HEADS_FIRST = [0, 2, 1, 3]
"""From batch, length, heads, features to batch, heads, length, features; and back."""


@register("fuse_attention", level="tolerant")
class FuseAttention(NodePass):
    """Makes ``Attention`` of opset 23 of an attention's nodes, with its reshapes and transpositions where they fit.

    See https://onnx.ai/onnx/operators/onnx__Attention.html. In a file of an older opset it does nothing. What a module
    gives stays: where a dropout between softmax and product is a module of its own, so does the attention.
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
        keys = attention.keys
        if attention.turned:
            nodes.append(ir.node("Transpose", [keys], {"perm": _HEADS_FIRST}))
            keys = nodes[0].outputs[0]
        nodes.append(
            ir.node("Attention", [attention.queries, keys, attention.values, *attention.rest], attention.attributes)
        )
        replace(node, nodes)
        return True


@dataclass(frozen=True)
class _Attention:
    """The inputs of an attention, the first three of batch, heads, length and features, and its attributes."""

    queries: ir.Value
    keys: ir.Value
    values: ir.Value
    rest: Sequence[ir.Value | None] = ()
    attributes: Mapping[str, ir.Attr | float] = field(default_factory=dict)
    turned: bool = False  # the keys are of batch, length, heads, features


def _written(node: ir.Node) -> _Attention | None:
    """What an ``Attention`` has, if it can absorb the reshapes and transpositions that split and join heads."""
    queries, keys, values = node.inputs[:3]
    if queries is None or keys is None or values is None or len(node.outputs) > 1 or any(node.inputs[4:]):
        return None
    return _Attention(queries, keys, values, node.inputs[3:], node.attributes)


def _match(last: ir.Node, known: Symbolic) -> _Attention | None:
    """The attention whose last product is a node."""
    softmax, values = absorbed(last.inputs[0], "Softmax"), last.inputs[1]
    if softmax is None or softmax.attributes.get_int("axis", -1) not in (-1, 3):
        return None
    if values is None or known.rank(values) != 4:
        return None
    scores, mask = softmax.inputs[0], None
    if (masked := absorbed(scores, "Add")) is not None:
        place = next((k for k in (0, 1) if absorbed(masked.inputs[k], "MatMul", "Mul", "Div")), None)
        if place is None:
            return None
        scores, mask = masked.inputs[place], masked.inputs[1 - place]
    scale = 1.0
    while (scaling := absorbed(scores, "Mul", "Div")) is not None:
        factor = multiple(scaling)
        if factor is None or known.rank(factor[0]) != 4:
            return None
        scores, scale = factor[0], scale * float(factor[1])
    product = absorbed(scores, "MatMul")
    queries = product.inputs[0] if product is not None else None
    if (inner := scaled(queries)) is not None:
        queries, scale = inner[0], scale * float(inner[1])
    turning = producer_of(product.inputs[1], "Transpose") if product is not None else None
    if product is None or queries is None or known.rank(queries) != 4 or turning is None:
        return None
    perm, keys = permutation(turning, known), turning.inputs[0]
    if not 0 < scale < np.inf:  # ONNX Runtime takes its root
        return None
    if keys is None or perm not in ([0, 1, 3, 2], [0, 2, 3, 1]) or not _mask_fits(mask, product, known):
        return None
    rest = [mask] if mask is not None else []
    return _Attention(queries, keys, values, rest, {"scale": scale}, turned=perm == [0, 2, 3, 1])


def _mask_fits(mask: ir.Value | None, product: ir.Node, known: Symbolic) -> bool:
    """Whether a mask has a value for each query and key: ONNX Runtime broadcasts over batch and heads only."""
    if mask is None:
        return True
    shape, scores = known.shape(mask), known.shape(product.outputs[0])
    numbers = known.dtype(mask) == known.dtype(product.outputs[0]) is not None
    return shape is not None and scores is not None and numbers and 2 <= len(shape) <= 4 and shape[-2:] == scores[-2:]


def _joined(last: ir.Node, attention: _Attention, known: Symbolic) -> tuple[ir.Node, Sequence[ir.Value], int] | None:
    """The last node, inputs and number of heads of an attention between nodes that split and join heads."""
    inputs = []
    for value, turned in ((attention.queries, False), (attention.keys, attention.turned), (attention.values, False)):
        apart = value if turned else _past(value, "Transpose", known)
        joint = _past(apart, "Reshape", known) if apart is not None else None
        shape, parts = known.shape(joint), known.shape(apart)
        if joint is None or shape is None or parts is None or len(shape) != 3 or len(parts) != 4:
            return None
        if shape[:2] != parts[:2] or shape[2] != parts[2] * parts[3]:
            return None
        inputs.append((joint, parts[2]))
    turn = only_consumer(last.outputs[0], "Transpose")
    end = only_consumer(turn.outputs[0], "Reshape") if turn is not None else None
    heads = {count for _, count in inputs}
    number = next(iter(heads))
    if turn is None or end is None or len(heads) > 1 or not isinstance(number, int):
        return None
    if permutation(turn, known) != _HEADS_FIRST:
        return None
    apart_shape, shape = known.shape(turn.outputs[0]), known.shape(end.outputs[0])
    if apart_shape is None or shape is None or len(shape) != 3 or shape[:2] != apart_shape[:2]:
        return None
    if is_boundary(last.outputs[0]) or is_boundary(turn.outputs[0]) or end.inputs[0] is not turn.outputs[0]:
        return None
    return end, [value for value, _ in inputs], number


def _past(value: ir.Value, op_type: str, known: Symbolic) -> ir.Value | None:
    """The input of a ``Reshape``, or of a ``Transpose`` of lengths and heads; None if its output is a boundary."""
    node = producer_of(value, op_type)
    if node is None or is_boundary(value):
        return None
    return node.inputs[0] if op_type == "Reshape" or permutation(node, known) == _HEADS_FIRST else None
