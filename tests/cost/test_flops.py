"""What one node computes, against values worked out by hand."""

from typing import Any

import onnx_ir as ir
import pytest

from htp_export.costs.execution import RunStep, Tensor
from htp_export.costs.work import all_formulas, work_of

Shape = tuple[int, ...] | None


def step(
    op: str, inputs: list[Shape], *outputs: Shape, domain: str = "", **attributes: Any
) -> RunStep:
    """A node with inputs and outputs of these shapes; an input that is left out is None."""
    made = ir.node(op, [], attributes=attributes, domain=domain)
    given = tuple(
        None if shape is None else Tensor("", ir.DataType.FLOAT, shape) for shape in inputs
    )
    results = tuple(Tensor("", ir.DataType.FLOAT, shape) for shape in outputs)
    return RunStep(made, (), given, results, made.attributes)


def contrib(op: str, inputs: list[Shape], *outputs: Shape, **attributes: Any) -> RunStep:
    return step(op, inputs, *outputs, domain="com.microsoft", **attributes)


PRODUCTS = {
    "prelu of torch, as of ONNX": (step("prelu", [(4, 3), (3,)], (4, 3), domain="aten"), 0, 24),
    "a matrix product": (step("MatMul", [(4, 3), (3, 5)], (4, 5)), 4 * 3 * 5, 0),
    "a batch of products": (
        step("MatMul", [(2, 7, 4, 3), (3, 5)], (2, 7, 4, 5)),
        2 * 7 * 4 * 3 * 5,
        0,
    ),
    "a product of vectors": (step("MatMul", [(3,), (3,)], ()), 3, 0),
    "a vector times a matrix": (step("MatMul", [(3,), (3, 5)], (5,)), 15, 0),
    "whole numbers": (step("MatMulInteger", [(4, 3), (3, 5)], (4, 5)), 60, 0),
    "Gemm with bias": (step("Gemm", [(4, 3), (3, 5), (5,)], (4, 5)), 60, 20),
    "Gemm turned and scaled": (
        step("Gemm", [(3, 4), (5, 3)], (4, 5), transA=1, transB=1, alpha=0.5),
        60,
        20,
    ),
    "QLinearMatMul": (
        step("QLinearMatMul", [(4, 3), (), (), (3, 5), (), (), (), ()], (4, 5)),
        60,
        40,
    ),
    "Conv": (step("Conv", [(2, 6, 9, 9), (8, 6, 3, 3)], (2, 8, 7, 7)), 2 * 8 * 49 * 6 * 9, 0),
    "Conv with bias": (step("Conv", [(1, 1, 5), (2, 1, 3), (2,)], (1, 2, 3)), 1 * 2 * 3 * 3, 6),
    "depthwise Conv": (
        step("Conv", [(1, 6, 9, 9), (6, 1, 3, 3)], (1, 6, 7, 7), group=6),
        6 * 49 * 9,
        0,
    ),
    "ConvInteger": (step("ConvInteger", [(1, 2, 5), (4, 2, 3)], (1, 4, 3)), 4 * 3 * 2 * 3, 0),
    "QLinearConv": (
        step("QLinearConv", [(1, 2, 5), (), (), (4, 2, 3), (), (), (), (), (4,)], (1, 4, 3)),
        4 * 3 * 2 * 3,
        3 * 12,
    ),
    "ConvTranspose": (
        step("ConvTranspose", [(1, 6, 4, 4), (6, 5, 2, 2)], (1, 5, 8, 8)),
        6 * 16 * 5 * 4,
        0,
    ),
    "ConvTranspose in groups": (
        step("ConvTranspose", [(1, 6, 4), (6, 1, 2)], (1, 2, 8), group=2),
        6 * 4 * 2,
        0,
    ),
    "LSTM": (
        # 5 steps, 2 examples, 3 in, 4 hidden, both directions; 4 gates of 4 operations and 5 for the state
        step("LSTM", [(5, 2, 3), (2, 16, 3), (2, 16, 4)], (5, 2, 2, 4), hidden_size=4),
        5 * 2 * 2 * 16 * (3 + 4),
        5 * 2 * 2 * 4 * (4 * 4 + 5),
    ),
    "GRU": (
        step("GRU", [(5, 2, 3), (1, 12, 3), (1, 12, 4)], (5, 1, 2, 4), hidden_size=4),
        5 * 2 * 12 * 7,
        5 * 2 * 4 * (3 * 4 + 5),
    ),
    "RNN": (
        step("RNN", [(5, 2, 3), (1, 4, 3), (1, 4, 4)], (5, 1, 2, 4), hidden_size=4),
        5 * 2 * 4 * 7,
        5 * 2 * 4 * 4,
    ),
    "Einsum, a product": (step("Einsum", [(4, 3), (3, 5)], (4, 5), equation="ij,jk->ik"), 60, 0),
    "Einsum, implicit output": (step("Einsum", [(4, 3), (3, 5)], (4, 5), equation="ij,jk"), 60, 0),
    "Einsum with ellipsis": (
        step("Einsum", [(2, 4, 3), (2, 5, 3)], (2, 4, 5), equation="...qd,...kd->...qk"),
        120,
        0,
    ),
    "Einsum, an outer product": (step("Einsum", [(4,), (5,)], (4, 5), equation="i,j->ij"), 0, 20),
    "Einsum, a sum": (step("Einsum", [(4, 5)], (4,), equation="ij->i"), 0, 20),
    "Einsum, turned": (step("Einsum", [(4, 5)], (5, 4), equation="ij->ji"), 0, 0),
    "Einsum of three": (
        step("Einsum", [(2, 3), (3, 4), (4, 5)], (2, 5), equation="ab,bc,cd->ad"),
        2 * 3 * 4 + 2 * 4 * 5,
        0,
    ),
    "FusedMatMul": (contrib("FusedMatMul", [(3, 4), (5, 3)], (4, 5), transA=1, transB=1), 60, 0),
    "FusedMatMul, rows before the batch": (
        contrib("FusedMatMul", [(3, 2, 7, 4), (2, 7, 3, 5)], (2, 7, 4, 5), transA=1, transBatchA=1),
        2 * 7 * 60,
        0,
    ),
    "FusedGemm": (contrib("FusedGemm", [(4, 3), (3, 5), (5,)], (4, 5), activation="Relu"), 60, 40),
    "FusedConv": (
        contrib("FusedConv", [(1, 1, 5), (2, 1, 3), (2,)], (1, 2, 3), activation="Relu"),
        18,
        12,
    ),
    "MatMulNBits": (
        contrib("MatMulNBits", [(4, 32), (8, 1, 16), (8,)], (4, 8), K=32, N=8, bits=4),
        4 * 32 * 8,
        0,
    ),
    "DynamicQuantizeMatMul": (
        contrib("DynamicQuantizeMatMul", [(4, 3), (3, 5), ()], (4, 5)),
        60,
        20 + 5 * 12,
    ),
    "MatMulIntegerToFloat": (
        contrib("MatMulIntegerToFloat", [(4, 3), (3, 5), (), ()], (4, 5)),
        60,
        20,
    ),
}

B, S, T, H, D = 2, 6, 10, 4, 8  # batch, length, length with the cache, heads, size of a head
SCORES = B * H * S * S
ATTENTION = {
    "Attention of four dimensions": (
        step("Attention", [(B, H, S, D)] * 3, (B, H, S, D)),
        SCORES * 2 * D,
        SCORES * 6,
    ),
    "Attention of three dimensions, masked": (
        step(
            "Attention",
            [(B, S, H * D)] * 3 + [(S, S)],
            (B, S, H * D),
            q_num_heads=H,
            kv_num_heads=H,
        ),
        SCORES * 2 * D,
        SCORES * 7,
    ),
    "Attention with shared heads and a cache": (
        step(
            "Attention",
            [(B, H, S, D), (B, 2, S, D), (B, 2, S, D), None, (B, 2, T - S, D)],
            (B, H, S, D),
        ),
        B * H * S * T * 2 * D,
        B * H * S * T * 6,
    ),
    "contrib Attention": (
        contrib("Attention", [(B, S, 32), (32, 96), (96,)], (B, S, 32), num_heads=H),
        B * S * 32 * 96 + SCORES * 2 * D,
        B * S * 96 + SCORES * 6,
    ),
    "QAttention": (
        contrib("QAttention", [(B, S, 32), (32, 96), (96,), (), ()], (B, S, 32), num_heads=H),
        B * S * 32 * 96 + SCORES * 2 * D,
        B * S * 96 + SCORES * 6,
    ),
    "MultiHeadAttention": (
        contrib(
            "MultiHeadAttention", [(B, S, 32), (B, T, 32), (B, T, 32)], (B, S, 32), num_heads=H
        ),
        B * H * S * T * 2 * D,
        B * H * S * T * 6,
    ),
    "MultiHeadAttention, keys as they are in the cache": (
        contrib(
            "MultiHeadAttention", [(B, S, 32), (B, H, T, D), (B, H, T, D)], (B, S, 32), num_heads=H
        ),
        B * H * S * T * 2 * D,
        B * H * S * T * 6,
    ),
    "MultiHeadAttention, packed": (
        contrib("MultiHeadAttention", [(B, S, H, 3, D)], (B, S, 32), num_heads=H),
        SCORES * 2 * D,
        SCORES * 6,
    ),
    "GroupQueryAttention": (
        contrib(
            "GroupQueryAttention",
            [(B, S, 32), (B, S, 16), (B, S, 16), (B, 2, T - S, D), (B, 2, T - S, D)],
            (B, S, 32),
            num_heads=H,
            kv_num_heads=2,
            do_rotary=1,
        ),
        B * H * S * T * 2 * D,
        B * H * S * T * 7 + 3 * B * S * 6 * D,
    ),
    "GroupQueryAttention, packed": (
        contrib(
            "GroupQueryAttention",
            [(B, S, (H + 4) * D), None, None],
            (B, S, 32),
            num_heads=H,
            kv_num_heads=2,
        ),
        SCORES * 2 * D,
        SCORES * 7,
    ),
}

X = (2, 3, 8)
N = 48
OTHERS = {
    "Add": (step("Add", [X, (8,)], X), 0, N),
    "Reshape": (step("Reshape", [X, (2,)], (6, 8)), 0, 0),
    "Cast": (step("Cast", [X], X), 0, 0),
    "Gather": (step("Gather", [(100, 8), (2, 3)], X), 0, 0),
    "Softmax": (step("Softmax", [X], X), 0, 5 * N),
    "LayerNormalization": (step("LayerNormalization", [X, (8,), (8,)], X), 0, 7 * N),
    "LayerNormalization without bias": (step("LayerNormalization", [X, (8,)], X), 0, 6 * N),
    "RMSNormalization": (step("RMSNormalization", [X, (8,)], X), 0, 4 * N),
    "SkipLayerNormalization": (
        contrib("SkipLayerNormalization", [X, X, (8,), (8,), (8,)], X),
        0,
        9 * N,
    ),
    "SkipSimplifiedLayerNormalization": (
        contrib("SkipSimplifiedLayerNormalization", [X, X, (8,)], X),
        0,
        5 * N,
    ),
    "BatchNormalization": (step("BatchNormalization", [X, (3,), (3,), (3,), (3,)], X), 0, 2 * N),
    "ReduceMean": (step("ReduceMean", [X], (2, 3, 1)), 0, N),
    "MaxPool": (step("MaxPool", [(1, 2, 8, 8)], (1, 2, 4, 4), kernel_shape=[2, 2]), 0, 32 * 4),
    "Gelu": (step("Gelu", [X], X), 0, 5 * N),
    "Gelu by tanh": (step("Gelu", [X], X, approximate="tanh"), 0, 8 * N),
    "BiasGelu": (contrib("BiasGelu", [X, (8,)], X), 0, 6 * N),
    "FastGelu with bias": (contrib("FastGelu", [X, (8,)], X), 0, 9 * N),
    "Clip": (step("Clip", [X, (), None], X), 0, N),
    "Max of three": (step("Max", [X, X, X], X), 0, 2 * N),
    "Resize, linear along two axes": (
        step("Resize", [(1, 2, 4, 4)], (1, 2, 8, 8), mode="linear"),
        0,
        128 * 7,
    ),
    "Resize, nearest": (step("Resize", [(1, 2, 4, 4)], (1, 2, 8, 8), mode="nearest"), 0, 0),
    "ScatterND that adds": (
        step("ScatterND", [(9, 8), (2, 1), (2, 8)], (9, 8), reduction="add"),
        0,
        16,
    ),
    "QuantizeLinear": (step("QuantizeLinear", [X, ()], X), 0, 4 * N),
    "TopK of one": (step("TopK", [X, (1,)], (2, 3, 1), (2, 3, 1)), 0, N),
    "TopK of three": (step("TopK", [X, (1,)], (2, 3, 3), (2, 3, 3)), 0, 2 * N),
    "TopK of four, along another axis": (
        step("TopK", [(5, 7), (1,)], (4, 7), (4, 7), axis=0),
        0,
        3 * 35,
    ),
    "Unique": (step("Unique", [(8,)], None), 0, 8 * 3),
    "Unique slices": (step("Unique", [(5, 7)], None, axis=0), 0, 35 * 3),
    # 5 boxes, 2 classes: a comparison and an order of 3 halvings for each, and 10 pairs
    "NonMaxSuppression": (
        step("NonMaxSuppression", [(1, 5, 4), (1, 2, 5)], None),
        0,
        2 * (5 * 4 + 19 * 10),
    ),
    "RoiAlign": (step("RoiAlign", [X, X, X], (1, 1, 2, 2), sampling_ratio=3), 0, 4 * 9 * 8),
    "STFT": (step("STFT", [(1, 64, 1), (), (16,)], (1, 7, 9, 2)), 0, 7 * (16 + 5 * 16 * 4)),
    "AffineGrid": (step("AffineGrid", [(2, 2, 3), (4,)], (2, 5, 5, 2)), 2 * 5 * 5 * 2 * 3, 50),
    "Multinomial": (step("Multinomial", [(2, 8)], (2, 3)), 0, 16 * 6 + 6 * 4),
    "RandomNormalLike": (step("RandomNormalLike", [X], X), 0, N),
    "SwiGLU": (step("SwiGLU", [X, X], X), 0, 3 * N),
    # 6 tokens of 8, each to 2 of 4 experts of 16: two layers, an activation, the weighted sum; and the router
    "MoE": (
        contrib("MoE", [(2, 3, 8), (6, 4), (4, 8, 16), None, (4, 16, 8)], (2, 3, 8), k=2),
        6 * 2 * (2 * 8 * 16),
        6 * 4 * 5 + 6 * 2 * (16 * 2 + 2 * 8),
    ),
    "QMoE, two weights in a byte": (
        contrib(
            "QMoE",
            [(6, 8), (6, 4), (4, 16, 4), None, None, (4, 8, 8)],
            (6, 8),
            k=2,
            expert_weight_bits=4,
        ),
        6 * 2 * (2 * 8 * 16),
        6 * 4 * 5 + 6 * 2 * (16 * 2 + 2 * 8),
    ),
    "GatherBlockQuantized": (
        contrib("GatherBlockQuantized", [(9, 8), (2, 3), (9, 1)], X),
        0,
        2 * N,
    ),
}


@pytest.mark.parametrize(("node", "macs", "other"), [*PRODUCTS.values(), *ATTENTION.values(), *OTHERS.values()],
                         ids=[*PRODUCTS, *ATTENTION, *OTHERS])  # fmt: skip
def test_work_is_what_a_hand_works_out(node, macs, other):
    found = work_of(node)
    assert found is not None
    assert (found.macs, found.other) == (macs, other)


@pytest.mark.parametrize(
    "node",
    [
        pytest.param(step("LinearAttention", [X, X, X], X), id="no formula"),
        pytest.param(step("RoiAlign", [X, X, X], (1, 1, 2, 2)), id="points by values"),
        pytest.param(step("Add", [X, X], X, domain="my.own"), id="another domain"),
        pytest.param(step("MatMul", [None, (3, 5)], (4, 5)), id="no input"),
        pytest.param(step("Relu", [X], None), id="no shape"),
        pytest.param(step("Attention", [(B, S, H * D)] * 3, (B, S, H * D)), id="no heads"),
        pytest.param(step("Einsum", [(4, 3)], (4, 5), equation="ij,jk->ik"), id="missing operand"),
        pytest.param(
            contrib("MultiHeadAttention", [(B, S, 32), (B, T, 32)], (B, S, 32)),
            id="no heads, contrib",
        ),
    ],
)
def test_what_cannot_be_counted_is_none_and_not_zero(node):
    assert work_of(node) is None


def test_every_operator_of_onnx_is_counted_or_known_not_to_be():
    import onnx

    counted = {op for domain, op in all_formulas() if not domain}
    every = {
        schema.name
        for schema in onnx.defs.get_all_schemas()
        if not schema.domain
        and not schema.deprecated
        and not schema.has_function
        and schema.since_version <= 27
    }
    holders = {"If", "Loop", "Scan"}
    left = {
        "ConvTransposeGrad", "GatherGrad", "ImageDecoder", "LinearAttention", "MaxRoiPool", "MelWeightMatrix",
        "NegativeLogLikelihoodLoss", "RegexFullMatch", "SequenceMap", "StringConcat", "StringNormalizer", "StringSplit",
        "TfIdfVectorizer",
    }  # fmt: skip
    assert every - counted - holders - left == set()
