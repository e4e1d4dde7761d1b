"""Work of fused attention operators, of ONNX (opset 23) and of ONNX Runtime.

For each head, scores are ``length x total`` sums over the head size, and the context ``length x
size`` sums over ``total``, the length of keys including the cache. A causal mask does not reduce the
work, as in the unfused form. Each score is also scaled, masked if there is a mask, and goes through
softmax.
"""

from __future__ import annotations

import math

from htp_export.costs.execution import RunStep, UnknownShapeError
from htp_export.costs.work import Formula, Formulas, Work

SOFTMAX = 5
"""Operations for each element of a softmax: maximum, subtraction, exponential, sum, division."""


def _attend(
    batch: int, heads: int, length: int, total: int, size: int, value_size: int, per_score: int
) -> Work:
    scores = batch * heads * length * total
    return Work(scores * (size + value_size), scores * per_score)


def _onnx_attention(step: RunStep) -> Work:
    """ONNX's ``Attention``: inputs of rank 4, with separate heads, or of rank 3."""
    query = step.shape(0)
    key = step.shape(1)
    value = step.shape(2)
    if len(query) == 3:
        heads = step.integer("q_num_heads")
        shared = step.integer("kv_num_heads")
        if not heads or not shared:
            raise UnknownShapeError("the number of heads")
        query = (query[0], heads, query[1], query[2] // heads)
        key = (key[0], shared, key[1], key[2] // shared)
        value = (value[0], shared, value[1], value[2] // shared)
    past = step.shape(4)[2] if step.input(4) is not None else 0
    batch, heads, length, size = query
    masked = step.input(3) is not None or step.integer("is_causal")
    capped = 3 if step.real("softcap", 0.0) else 0
    per_score = 1 + bool(masked) + capped + SOFTMAX
    return _attend(batch, heads, length, key[2] + past, size, value[3], per_score)


def _packed_attention(past: int, bias: int, mask: int, extra: int) -> Formula:
    """Attention that projects its input; the arguments are indices of inputs.

    ``extra`` is the input that is added to the scores.
    """

    def formula(step: RunStep) -> Work:
        batch, length, _ = step.shape(0)
        weights = step.shape(1)
        sizes = step.integers("qkv_hidden_sizes") or (weights[1] // 3,) * 3
        heads = step.integer("num_heads")
        if not heads or len(sizes) != 3:
            raise UnknownShapeError("the sizes of heads")
        earlier = step.shape(past)[-2] if step.input(past) is not None else 0
        per_score = 1 + sum(step.input(k) is not None for k in (mask, extra)) + SOFTMAX
        attended = _attend(
            batch, heads, length, length + earlier, sizes[0] // heads, sizes[2] // heads, per_score
        )
        added = batch * length * weights[1] if step.input(bias) is not None else 0
        return Work(attended.macs + batch * length * math.prod(weights), attended.other + added)

    return formula


def _multi_head(step: RunStep) -> Work:
    """``MultiHeadAttention``: separate queries, keys, values, or packed in rank 5."""
    query = step.shape(0)
    heads = step.integer("num_heads")
    if not heads:
        raise UnknownShapeError("the number of heads")
    batch, length = query[:2]
    key = step.shape(1) if step.input(1) is not None else None
    if len(query) == 5:
        size = value_size = query[4]
        total = length
    else:
        size = query[2] // heads
        if key is None:
            raise UnknownShapeError("the length of keys")
        value_size = size
        if step.input(2) is not None:
            value = step.shape(2)
            value_size = value[3] if len(value) == 4 else value[2] // heads
        total = key[2] if len(key) == 4 else key[1]
    total += step.shape(6)[2] if step.input(6) is not None else 0
    added = 0
    if step.input(3) is not None:
        added = sum(math.prod(shape) for shape in (query, key) if shape)
    per_score = 1 + sum(step.input(k) is not None for k in (4, 5)) + SOFTMAX
    work = _attend(batch, heads, length, total, size, value_size, per_score)
    return Work(work.macs, work.other + added)


def _grouped_query(step: RunStep) -> Work:
    """``GroupQueryAttention``: one head of keys for several of queries, with cache and rotation."""
    batch, length, width = step.shape(0)
    heads = step.integer("num_heads")
    shared = step.integer("kv_num_heads")
    if not heads or not shared:
        raise UnknownShapeError("the number of heads")
    size = width // (heads + 2 * shared) if step.input(1) is None else width // heads
    present = step.outputs[1].shape if len(step.outputs) > 1 else None
    cached = step.shape(3)[2] if step.input(3) is not None else 0
    total = present[2] if present is not None else length + cached
    work = _attend(batch, heads, length, total, size, size, 2 + SOFTMAX)
    turned = 3 * batch * length * (heads + shared) * size if step.integer("do_rotary") else 0
    return Work(work.macs, work.other + turned)


FORMULAS: Formulas = {
    ("", "Attention"): _onnx_attention,
    ("com.microsoft", "Attention"): _packed_attention(past=4, bias=2, mask=3, extra=5),
    ("com.microsoft", "QAttention"): _packed_attention(past=8, bias=2, mask=5, extra=99),
    ("com.microsoft", "MultiHeadAttention"): _multi_head,
    ("com.microsoft", "GroupQueryAttention"): _grouped_query,
}
