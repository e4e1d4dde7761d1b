"""Work of all but matrix products: elementwise operators, reductions, normalisations.

The numbers follow the operators' definitions, one for each arithmetic operation, comparison or
logical operation; ``docs/cost.md`` has them as a table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from htp_export.costs.execution import RunStep
from htp_export.costs.formulas.attention import SOFTMAX
from htp_export.costs.work import (
    NOTHING,
    Formula,
    Formulas,
    Work,
    names,
    nothing,
    per_input,
    per_output,
)

_CONTRIB = "com.microsoft"


def _each_further_input(step: RunStep) -> Work:
    """Variadic operators: one operation for each input after the first; ``Mean`` also divides."""
    inputs = sum(tensor is not None for tensor in step.inputs)
    return Work(0, (inputs - 1 + (step.node.op_type == "Mean")) * math.prod(step.output_shape()))


def _clip(step: RunStep) -> Work:
    bounds = sum(map(step.has_input, (1, 2)))
    bounds += sum(name in step.attributes for name in ("min", "max"))
    return Work(0, bounds * math.prod(step.output_shape()))


def _gelu(step: RunStep) -> Work:
    """``x * 0.5 * (1 + erf(x / sqrt(2)))`` or ``x * 0.5 * (1 + tanh(a * (x + b * x**3)))``."""
    return per_output(8 if step.text("approximate", "none") == "tanh" else 5)(step)


def _layer_norm(summands: int = 0, centred: bool = True) -> Formula:
    """Mean and its subtraction if centred, mean of squares, division, scale, bias.

    ``summands`` is the index of the first input that is added before; 0 for none.
    """

    def formula(step: RunStep) -> Work:
        count = (2 if centred else 0) + 2 + 1 + 1
        if centred and summands in _BIAS_INDEX:
            count += step.has_input(_BIAS_INDEX[summands])
        if summands:
            further = 4 if centred else 3
            count += 1 + step.has_input(further)
        return per_input(count)(step)

    return formula


_BIAS_INDEX = {0: 2, 1: 3}
"""Index of the first summand of a layer norm → index of its bias."""


def _pool(step: RunStep) -> Work:
    window = math.prod(step.integers("kernel_shape"))
    return per_output(window * (2 if step.node.op_type == "LpPool" else 1))(step)


def _resize(step: RunStep) -> Work:
    """``nearest`` copies; linear and cubic sum 2 or 4 neighbours along each axis that changes."""
    taps_of = {"linear": 2, "cubic": 4, "bilinear": 2, "bicubic": 4}
    taps = taps_of.get(step.text("mode", "nearest"), 0)
    before = step.shape(0)
    after = step.output_shape()
    axes = sum(a != b for a, b in zip(before, after, strict=False))
    if not taps or not axes:
        return NOTHING
    return Work(0, (2 * taps**axes - 1) * math.prod(after))


def _grid_sample(step: RunStep) -> Work:
    mode = step.text("mode", "linear")
    axes = len(step.shape(0)) - 2
    taps = 4 if "cubic" in mode else 2
    if mode == "nearest":
        return NOTHING
    return Work(0, (2 * taps**axes - 1) * math.prod(step.output_shape()))


def _dft(step: RunStep) -> Work:
    """``5 n log2 n`` for each transform, the usual count for a fast Fourier transform."""
    shape = step.output_shape()
    axis = step.integer("axis", -2)
    length = step.shape(0)[axis]
    transforms = math.prod(step.shape(0)[:-1]) // max(length, 1)
    if not shape:
        return NOTHING
    return Work(0, round(5 * length * math.log2(max(length, 2))) * transforms)


def _scatter(step: RunStep) -> Work:
    """Copies are free; with a reduction, each update is one operation."""
    reduces = step.text("reduction", "none") != "none"
    return Work(0, math.prod(step.shape(2))) if reduces else NOTHING


_ONE = names("""
    Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Ceil Cos Cosh
    Div Equal Erf Exp Floor Greater GreaterOrEqual IsInf IsNaN Less LessOrEqual Log Mod Mul Neg Not Or Pow Range
    Reciprocal Relu Round Sigmoid Sign Sin Sinh Sqrt Sub Tan Tanh ThresholdedRelu Where Xor
""")

PER_OUTPUT: Mapping[str, int] = {
    **dict.fromkeys(_ONE, 1),
    "BatchNormalization": 2,  # at inference: scale and shift
    "Binarizer": 1,
    "Celu": 4,
    "DequantizeLinear": 2,
    "Elu": 3,
    "HardSigmoid": 4,
    "HardSwish": 5,
    "LeakyRelu": 2,
    "Mish": 4,
    "PRelu": 2,
    "QuantizeLinear": 4,  # divide, round, add the zero point, saturate
    "RotaryEmbedding": 3,
    "Selu": 4,
    "Shrink": 2,
    "Softplus": 3,
    "Softsign": 3,
    "Swish": 2,
}
"""Operator → operations for each element of the output; the same for torch's, in lower case."""

_PER_INPUT: Mapping[str, int] = {
    **dict.fromkeys(
        ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceLogSum"), 1
    ),
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceSumSquare"), 2),
    **dict.fromkeys(
        ("ArgMax", "ArgMin", "CumProd", "CumSum", "GlobalAveragePool", "GlobalMaxPool", "Hardmax"),
        1,
    ),
    "Col2Im": 1,
    "DynamicQuantizeLinear": 6,  # minimum and maximum, then as QuantizeLinear
    "GlobalLpPool": 2,
    "GroupNormalization": 7,
    "InstanceNormalization": 7,
    "LogSoftmax": SOFTMAX,
    "LpNormalization": 3,
    "MeanVarianceNormalization": 5,
    "ReduceLogSumExp": 4,
    "Softmax": SOFTMAX,
    "SoftmaxCrossEntropyLoss": SOFTMAX + 1,
}

# These move, select, reshape or convert elements.
_WITHOUT_ARITHMETIC = names("""
    BitCast Cast CastLike CenterCropPad Compress Concat ConcatFromSequence Constant ConstantOfShape DepthToSpace
    Dropout Expand EyeLike Flatten Gather GatherElements GatherND Identity NonZero OneHot Optional
    OptionalGetElement OptionalHasElement Pad Reshape ReverseSequence Scatter SequenceAt SequenceConstruct
    SequenceEmpty SequenceErase SequenceInsert SequenceLength Shape Size Slice SpaceToDepth Split SplitToSequence
    Squeeze Tile Transpose Trilu Unsqueeze
""")

_CONTRIB_PER_OUTPUT: Mapping[str, int] = {
    "BiasAdd": 2,  # bias and residual
    "BiasGelu": 6,
    "BiasSplitGelu": 7,
    "DequantizeLinear": 2,
    "Gelu": 5,
    "QLinearAdd": 9,  # both are dequantized, and the result quantized
    "QLinearMul": 9,
    "QLinearLeakyRelu": 8,
    "QLinearSigmoid": 7,
    "QuantizeLinear": 4,
    "QuickGelu": 3,
    "RotaryEmbedding": 3,
}

FORMULAS: Formulas = {
    **{("", op): per_output(count) for op, count in PER_OUTPUT.items()},
    **{("", op): per_input(count) for op, count in _PER_INPUT.items()},
    **{("", op): nothing for op in _WITHOUT_ARITHMETIC},
    **{("", op): _each_further_input for op in ("Max", "Min", "Sum", "Mean")},
    **{("", op): _pool for op in ("AveragePool", "MaxPool", "LpPool")},
    **{("", op): _scatter for op in ("ScatterElements", "ScatterND")},
    **{("", op): _resize for op in ("Resize", "Upsample")},
    ("", "Clip"): _clip,
    ("", "DFT"): _dft,
    ("", "Gelu"): _gelu,
    ("", "GridSample"): _grid_sample,
    ("", "LRN"): lambda step: per_output(step.integer("size") + 4)(step),
    ("", "LayerNormalization"): _layer_norm(),
    ("", "RMSNormalization"): _layer_norm(centred=False),
    # ONNX Runtime registers this operator in ONNX's domain.
    ("", "SimplifiedLayerNormalization"): _layer_norm(centred=False),
    ("", "SkipLayerNormalization"): _layer_norm(1),
    **{(_CONTRIB, op): per_output(count) for op, count in _CONTRIB_PER_OUTPUT.items()},
    (_CONTRIB, "BiasSoftmax"): per_output(SOFTMAX + 1),
    (_CONTRIB, "EmbedLayerNormalization"): per_output(2 + 7),
    (_CONTRIB, "FastGelu"): lambda step: per_output(8 + step.has_input(1))(step),
    (_CONTRIB, "GroupNorm"): lambda step: per_output(7 + 2 * step.integer("activation"))(step),
    (_CONTRIB, "QLinearSoftmax"): per_output(SOFTMAX + 6),
    (_CONTRIB, "QLinearAveragePool"): _pool,
    (_CONTRIB, "QLinearGlobalAveragePool"): per_input(1),
    (_CONTRIB, "QLinearConcat"): nothing,
    (_CONTRIB, "LayerNormalization"): _layer_norm(),
    (_CONTRIB, "SimplifiedLayerNormalization"): _layer_norm(centred=False),
    (_CONTRIB, "SkipLayerNormalization"): _layer_norm(1),
    (_CONTRIB, "SkipSimplifiedLayerNormalization"): _layer_norm(1, centred=False),
    **{(_CONTRIB, op): nothing for op in ("ExpandDims", "Pad", "Trilu")},
}
