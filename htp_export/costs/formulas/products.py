"""Work of matrix products, convolutions and recurrent layers, in floating point and quantized.

A product of an ``m x k`` and a ``k x n`` matrix is ``m * n * k`` multiply-adds. Padding counts like
data.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

from htp_export.costs.execution import RunStep, UnknownShapeError
from htp_export.costs.work import Formula, Formulas, Work


def _matmul(step: RunStep) -> Work:
    a = step.shape(0)
    if step.integer("transA") and len(a) > 1:
        inner = a[0] if step.integer("transBatchA") else a[-2]
    else:
        inner = a[-1] if a else 1
    return Work(_outputs(step) * inner)


def matmul_with_bias(bias: int, after: int = 0) -> Formula:
    """A product, an optional bias, and ``after`` operations for each output element."""

    def formula(step: RunStep) -> Work:
        added = int(step.has_input(bias))
        return Work(_matmul(step).macs, (added + after) * _outputs(step))

    return formula


def _gemm(step: RunStep) -> Work:
    added = step.has_input(2) and step.real("beta", 1.0) != 0
    scaled = (step.real("alpha", 1.0) != 1) + (added and step.real("beta", 1.0) != 1)
    return Work(_matmul(step).macs, (int(added) + scaled) * _outputs(step))


def _einsum(step: RunStep) -> Work:
    """Multiply operands from left to right, and sum over an index as soon as no later one needs it.

    A pair with an index to sum over is a matrix product; a pair without is an elementwise one.
    """
    operands, output = _einsum_terms(step)
    sizes: dict[str, int] = {}
    for position, term in enumerate(operands):
        for index, size in zip(term, step.shape(position), strict=True):
            sizes[index] = max(size, sizes.get(index, 1))
    if len(operands) == 1:
        is_summed = bool(set(operands[0]) - set(output))
        elements = math.prod(sizes[index] for index in set(operands[0]))
        return Work(0, elements if is_summed else 0)
    macs = elementwise = 0
    left = set(operands[0])
    for position in range(1, len(operands)):
        together = left | set(operands[position])
        later = set(output).union(*operands[position + 1 :])
        size = math.prod(sizes[index] for index in together)
        if together - later:
            macs += size
        else:
            elementwise += size
        left = together & later
    return Work(macs, elementwise)


def _einsum_terms(step: RunStep) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """The indices of each operand and of the output; ``...`` becomes numbers, from the right."""
    equation = step.text("equation").replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(step.inputs):
        raise UnknownShapeError(f"the operands of {equation!r}")

    def indices(term: str, rank: int) -> tuple[str, ...]:
        before, dots, after = term.partition("...")
        hidden = rank - len(before) - len(after) if dots else 0
        numbers = map(str, range(hidden - 1, -1, -1))
        return (*before, *numbers, *after)

    operands = []
    for position, term in enumerate(terms):
        rank = len(step.shape(position))
        operands.append(indices(term, rank))
    for position, operand in enumerate(operands):
        if len(operand) != len(step.shape(position)):
            raise UnknownShapeError(f"the operands of {equation!r}")
    hidden = max((sum(map(str.isdecimal, operand)) for operand in operands), default=0)
    if arrow:
        return operands, indices(right, hidden + len(right.replace("...", "")))
    # Without an output term, indices that occur once are kept.
    occurrences = Counter(itertools.chain.from_iterable(operands))
    kept = [index for index, count in occurrences.items() if index.isdecimal() or count == 1]
    return operands, tuple(kept)


def _conv(weight: int, bias: int | None = None, after: int = 0) -> Formula:
    """Each output element is a sum over the filter and the input channels of its group."""

    def formula(step: RunStep) -> Work:
        filters = step.shape(weight)
        added = int(bias is not None and step.has_input(bias))
        return Work(_outputs(step) * math.prod(filters[1:]), (added + after) * _outputs(step))

    return formula


def _fused_conv(step: RunStep) -> Work:
    activation = bool(step.text("activation"))
    summand = step.has_input(3)
    return _conv(1, 2, int(activation) + int(summand))(step)


def _causal_conv(step: RunStep) -> Work:
    swish = 2 if step.text("activation", "none").lower() not in ("", "none") else 0
    return _conv(1, 2, swish)(step)


def _deform_conv(step: RunStep) -> Work:
    """A convolution of inputs between four neighbours: 7 operations each, and a mask."""
    filters = step.shape(1)
    output = step.output_shape()
    work = _conv(1, 3)(step)
    sampled = output[0] * math.prod(output[2:]) * math.prod(filters[2:]) * step.shape(0)[1]
    return Work(work.macs, work.other + sampled * (7 + step.has_input(4)))


def _conv_transpose(step: RunStep) -> Work:
    """Each input element is multiplied with the filters of its group."""
    added = int(step.has_input(2))
    return Work(math.prod(step.shape(0)) * math.prod(step.shape(1)[1:]), added * _outputs(step))


def _recurrent(gates: int, update: int) -> Formula:
    """For each step: the products; three additions and an activation for each gate; the update."""

    def formula(step: RunStep) -> Work:
        x = step.shape(0)
        state = step.shape(2)
        runs = x[0] * x[1]
        directions = state[0]
        hidden = step.integer("hidden_size") or min(state[1:])
        macs = runs * (math.prod(step.shape(1)) + math.prod(state))
        return Work(macs, runs * directions * hidden * (gates * 4 + update))

    return formula


def _outputs(step: RunStep) -> int:
    return math.prod(step.output_shape())


_LSTM = _recurrent(4, 5)  # c' = f * c + i * g, h' = o * tanh(c')

FORMULAS: Formulas = {
    ("", "MatMul"): _matmul,
    ("", "MatMulInteger"): _matmul,
    ("", "QLinearMatMul"): matmul_with_bias(99, after=2),  # scaled and rounded
    ("", "Gemm"): _gemm,
    ("", "Einsum"): _einsum,
    ("", "Conv"): _conv(1, 2),
    ("", "CausalConvWithState"): _causal_conv,
    ("", "ConvInteger"): _conv(1),
    ("", "QLinearConv"): _conv(3, 8, after=2),
    ("", "ConvTranspose"): _conv_transpose,
    ("", "DeformConv"): _deform_conv,
    ("", "LSTM"): _LSTM,
    # h' = (1 - z) * n + z * h, and r * h before or after its product
    ("", "GRU"): _recurrent(3, 5),
    ("", "RNN"): _recurrent(1, 0),
    ("com.microsoft", "FusedMatMul"): _matmul,
    ("com.microsoft", "TransposeMatMul"): _matmul,
    ("com.microsoft", "FusedMatMulActivation"): matmul_with_bias(99, after=1),
    ("com.microsoft", "FusedGemm"): lambda step: Work(
        _gemm(step).macs, _gemm(step).other + _outputs(step)
    ),
    ("com.microsoft", "GemmFastGelu"): matmul_with_bias(2, after=8),
    ("com.microsoft", "QGemm"): matmul_with_bias(6, after=2),
    ("com.microsoft", "MatMulIntegerToFloat"): matmul_with_bias(6, after=1),
    ("com.microsoft", "DynamicQuantizeMatMul"): lambda step: Work(
        _matmul(step).macs,
        _outputs(step) * (1 + step.has_input(4)) + 5 * math.prod(step.shape(0)),
    ),
    ("com.microsoft", "MatMulNBits"): matmul_with_bias(5),
    ("com.microsoft", "MatMulBnb4"): _matmul,
    ("com.microsoft", "FusedConv"): _fused_conv,
    ("com.microsoft", "NhwcConv"): _conv(1, 2),
    ("com.microsoft", "NhwcFusedConv"): _fused_conv,
    ("com.microsoft", "QLinearConv"): _conv(3, 8, after=2),
    ("com.microsoft", "ConvTransposeWithDynamicPads"): lambda step: Work(
        math.prod(step.shape(0)) * math.prod(step.shape(1)[1:])
    ),
    ("com.microsoft", "DynamicQuantizeLSTM"): _LSTM,
}
