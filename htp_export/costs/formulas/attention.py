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


def _length(step: RunStep, position: int, axis: int) -> int:
    """The size of an axis of an optional input; 0 without the input."""
    return step.shape(position)[axis] if step.has_input(position) else 0


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
    past = _length(step, 4, axis=2)
    batch, heads, length, size = query
    masked = step.has_input(3) or step.integer("is_causal")
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
        earlier = _length(step, past, axis=-2)
        per_score = 1 + sum(map(step.has_input, (mask, extra))) + SOFTMAX
        attended = _attend(
            batch, heads, length, length + earlier, sizes[0] // heads, sizes[2] // heads, per_score
        )
        added = batch * length * weights[1] * step.has_input(bias)
        return Work(attended.macs + batch * length * math.prod(weights), attended.other + added)

    return formula


def _multi_head(step: RunStep) -> Work:
    """``MultiHeadAttention``: separate queries, keys, values, or packed in rank 5."""
    query = step.shape(0)
    heads = step.integer("num_heads")
    if not heads:
        raise UnknownShapeError("the number of heads")
    batch, length = query[:2]
    key = step.shape(1) if step.has_input(1) else None
    if len(query) == 5:
        size = value_size = query[4]
        total = length
    else:
        size = query[2] // heads
        if key is None:
            raise UnknownShapeError("the length of keys")
        value_size = size
        if step.has_input(2):
            value = step.shape(2)
            value_size = value[3] if len(value) == 4 else value[2] // heads
        total = key[2] if len(key) == 4 else key[1]
    total += _length(step, 6, axis=2)
    added = 0
    if step.has_input(3):
        added = sum(math.prod(shape) for shape in (query, key) if shape)
    per_score = 1 + sum(map(step.has_input, (4, 5))) + SOFTMAX
    work = _attend(batch, heads, length, total, size, value_size, per_score)
    return Work(work.macs, work.other + added)


def _grouped_query(step: RunStep) -> Work:
    """``GroupQueryAttention``: one head of keys for several of queries, with cache and rotation."""
    batch, length, width = step.shape(0)
    heads = step.integer("num_heads")
    shared = step.integer("kv_num_heads")
    if not heads or not shared:
        raise UnknownShapeError("the number of heads")
    # without keys as an input of their own, keys and values are in the first one, too
    is_packed = not step.has_input(1)
    size = width // (heads + 2 * shared if is_packed else heads)
    present = step.outputs[1].shape if len(step.outputs) > 1 else None
    total = length + _length(step, 3, axis=2)
    if present is not None:
        total = present[2]
    work = _attend(batch, heads, length, total, size, size, 2 + SOFTMAX)
    rotation = 0
    if step.integer("do_rotary"):
        rotation = 3 * batch * length * (heads + shared) * size
    return Work(work.macs, work.other + rotation)


FORMULAS: Formulas = {
    ("", "Attention"): _onnx_attention,
    ("com.microsoft", "Attention"): _packed_attention(past=4, bias=2, mask=3, extra=5),
    ("com.microsoft", "QAttention"): _packed_attention(past=8, bias=2, mask=5, extra=99),
    ("com.microsoft", "MultiHeadAttention"): _multi_head,
    ("com.microsoft", "GroupQueryAttention"): _grouped_query,
}
