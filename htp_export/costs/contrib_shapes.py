"""Shapes of what ONNX Runtime's own operators make (domain ``com.microsoft``), which ONNX has no schemas of.

Source: ONNX Runtime's ``docs/ContribOperators.md``. What is not here keeps the shape that the file says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from htp_export.costs.execution import Step, Tensor

__all__ = ["contrib_shape"]


def contrib_shape(step: Step) -> tuple[int, ...] | None:
    """The shape of the first output of a node of ONNX Runtime's; None where it is not known how it is found.

    Args:
        step: The node and its inputs; what its outputs are is not looked at.

    Raises:
        UnknownShapeError: If a shape that it depends on is not known.
    """
    rule = _RULES.get(step.op[1]) if step.op[0] == "com.microsoft" else None
    return rule(step) if rule is not None else None


def _as_first(step: Step) -> tuple[int, ...]:
    return step.shape(0)


def _matmul(left: int, right: int) -> Callable[[Step], tuple[int, ...]]:
    def rule(step: Step) -> tuple[int, ...]:
        a, b = list(step.shape(left)), list(step.shape(right))
        if step.integer("transBatchA"):  # the rows stand before the batch
            a = [*a[1:-1], a[0], a[-1]]
        if step.integer("transBatchB"):
            b = [*b[1:-1], b[0], b[-1]]
        if step.integer("transA"):
            a[-2:] = reversed(a[-2:])
        if step.integer("transB"):
            b[-2:] = reversed(b[-2:])
        if len(b) == 1:
            return tuple(a[:-1])
        return (*_broadcast(tuple(a[:-2]), tuple(b[:-2])), *a[-2:-1], b[-1])

    return rule


def _matmul_nbits(step: Step) -> tuple[int, ...]:
    return (*step.shape(0)[:-1], step.integer("N"))


def _attention(step: Step) -> tuple[int, ...]:
    batch, length = step.shape(0)[:2]
    sizes = step.integers("qkv_hidden_sizes")
    return (batch, length, sizes[2] if len(sizes) == 3 else step.shape(1)[1] // 3)


def _multi_head(step: Step) -> tuple[int, ...]:
    query = step.shape(0)
    if len(query) == 5:  # packed: batch, length, heads, 3, size of a head
        return (*query[:2], query[2] * query[4])
    value: Tensor | None = step.input(2)
    if value is not None and value.shape is not None:
        width = value.shape[2] if len(value.shape) == 3 else value.shape[1] * value.shape[3]
        return (*query[:2], width)
    return query


def _grouped_query(step: Step) -> tuple[int, ...]:
    batch, length, width = step.shape(0)
    if step.input(1) is None:  # query, key and value in one
        heads, shared = step.integer("num_heads"), step.integer("kv_num_heads")
        width = width // (heads + 2 * shared) * heads
    return (batch, length, width)


def _embed(step: Step) -> tuple[int, ...]:
    return (*step.shape(0), step.shape(2)[-1])


def _elementwise(step: Step) -> tuple[int, ...]:
    return _broadcast(step.shape(0), step.shape(1))


def _quantized_elementwise(step: Step) -> tuple[int, ...]:
    return _broadcast(step.shape(0), step.shape(3))


def _broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    rank = max(len(one), len(other))
    one, other = (1,) * (rank - len(one)) + one, (1,) * (rank - len(other)) + other
    return tuple(b if a == 1 else a for a, b in zip(one, other, strict=True))


def _conv(weight: int) -> Callable[[Step], tuple[int, ...]]:
    def rule(step: Step) -> tuple[int, ...]:
        x, w = step.shape(0), step.shape(weight)
        rank = len(x) - 2
        strides = step.integers("strides") or (1,) * rank
        dilations = step.integers("dilations") or (1,) * rank
        pads = step.integers("pads") or (0,) * (2 * rank)
        automatic = step.text("auto_pad", "NOTSET")
        sizes = []
        for k in range(rank):
            if automatic.startswith("SAME"):
                sizes.append(math.ceil(x[2 + k] / strides[k]))
            else:
                padded = x[2 + k] + (pads[k] + pads[rank + k] if automatic == "NOTSET" else 0)
                sizes.append((padded - dilations[k] * (w[2 + k] - 1) - 1) // strides[k] + 1)
        return (x[0], w[0], *sizes)

    return rule


_RULES: Mapping[str, Callable[[Step], tuple[int, ...]]] = {
    **dict.fromkeys(
        (
            "BiasGelu",
            "BiasSoftmax",
            "BiasDropout",
            "BiasAdd",
            "DequantizeLinear",
            "FastGelu",
            "Gelu",
            "GroupNorm",
            "LayerNormalization",
            "QLinearLeakyRelu",
            "QLinearSigmoid",
            "QLinearSoftmax",
            "QuantizeLinear",
            "QuickGelu",
            "RotaryEmbedding",
            "SkipGroupNorm",
            "SkipLayerNormalization",
            "SkipSimplifiedLayerNormalization",
            "SimplifiedLayerNormalization",
        ),
        _as_first,
    ),
    "FusedMatMul": _matmul(0, 1),
    "FusedGemm": _matmul(0, 1),
    "GemmFastGelu": _matmul(0, 1),
    "DynamicQuantizeMatMul": _matmul(0, 1),
    "MatMulIntegerToFloat": _matmul(0, 1),
    "QGemm": _matmul(0, 3),
    "MatMulNBits": _matmul_nbits,
    "MatMulBnb4": _matmul_nbits,
    "Attention": _attention,
    "QAttention": _attention,
    "MultiHeadAttention": _multi_head,
    "GroupQueryAttention": _grouped_query,
    "EmbedLayerNormalization": _embed,
    "QLinearAdd": _quantized_elementwise,
    "QLinearMul": _quantized_elementwise,
    "FusedConv": _conv(1),
}
