"""Work of operators that sort, select, sample and mix experts, by the usual algorithm.

Work that depends on values is counted at its maximum; ``docs/cost.md`` has the formulas as a table.
"""

from __future__ import annotations

import math

from htp_export.costs.execution import RunStep, UnknownShapeError
from htp_export.costs.formulas.attention import SOFTMAX
from htp_export.costs.work import Formula, Formulas, Work, nothing, per_input, per_output
from htp_export.shapes.operator_kinds import RANDOM

_CONTRIB = "com.microsoft"
_OVERLAP = 19  # of two boxes: corners 4, sides 4, area, both areas 6, union 2, division, comparison


def halvings(count: int) -> int:
    """How often a count can be halved: the comparisons of a binary search."""
    return max(count, 1).bit_length() - (count & (count - 1) == 0)


def _top_k(step: RunStep) -> Work:
    """``n * ceil(log2(k + 1))`` comparisons, with a heap of the k largest elements."""
    output = step.output_shape()
    return Work(0, math.prod(step.shape(0)) * halvings(output[step.integer("axis", -1)] + 1))


def _sort(step: RunStep) -> Work:
    """``n * ceil(log2(n))`` comparisons; with an axis, of slices, element by element."""
    shape = step.shape(0)
    count = shape[step.integer("axis")] if "axis" in step.attributes else math.prod(shape)
    return Work(0, math.prod(shape) * halvings(count))


def _non_max_suppression(step: RunStep) -> Work:
    """Compare scores with the threshold, sort them, compare kept boxes with later ones."""
    batches, classes, boxes = step.shape(1)
    limit = step.input(2)
    selected = boxes
    if limit is not None and limit.value is not None:
        selected = min(boxes, int(limit.value.reshape(-1)[0]))
    pairs = selected * (2 * boxes - selected - 1) // 2
    return Work(0, batches * classes * (boxes * (1 + halvings(boxes)) + _OVERLAP * pairs))


def _roi_align(step: RunStep) -> Work:
    """Mean or maximum of points between four neighbours: 8 operations for each point."""
    ratio = step.integer("sampling_ratio")
    if ratio <= 0:
        raise UnknownShapeError("how many points are taken: it depends on the size of each region")
    return Work(0, 8 * ratio * ratio * math.prod(step.output_shape()))


def _stft(step: RunStep) -> Work:
    """For each frame, the window, and ``5 n log2 n`` as for a fast Fourier transform."""
    if step.has_input(2):
        (length,) = step.shape(2)
    else:
        length_input = step.input(3)
        if length_input is None or length_input.value is None:
            raise UnknownShapeError("the length of frames")
        length = int(length_input.value.reshape(-1)[0])
    frames = math.prod(step.output_shape()[:2])
    window = length * step.has_input(2)
    transform = round(5 * length * math.log2(max(length, 2)))
    return Work(0, frames * (window + transform))


def _affine_grid(step: RunStep) -> Work:
    """The coordinates of each point, and a one, multiplied with a matrix."""
    grid = step.output_shape()
    return Work(math.prod(grid) * (grid[-1] + 1), math.prod(grid) // grid[0])


def _multinomial(step: RunStep) -> Work:
    """Probabilities and their cumulative sum; a random number and its binary search per sample."""
    logits = step.shape(0)
    samples = step.output_shape()
    distribution = math.prod(logits) * (SOFTMAX + 1)
    return Work(0, distribution + math.prod(samples) * (1 + halvings(logits[-1])))


def _determinant(step: RunStep) -> Work:
    """Elimination: ``2 n^3 / 3`` for each matrix."""
    shape = step.shape(0)
    return Work(0, math.prod(shape[:-2]) * 2 * shape[-1] ** 3 // 3)


def _inverse(step: RunStep) -> Work:
    """Elimination of the matrix with a right-hand side: ``2 n^3`` for each matrix."""
    return Work(0, math.prod(step.shape(0)) * 2 * step.shape(0)[-1])


def _expert_size(step: RunStep, position: int) -> int:
    """The elements of an input for one expert; experts are its first axis."""
    return math.prod(step.shape(position)[1:])


def _experts(biases: tuple[int, ...], weights: tuple[int, ...], bits: str = "") -> Formula:
    """``MoE`` and ``QMoE``: every token goes through k experts.

    The arguments are the input indices of the layers' biases and weights, ``[experts, …]`` (the
    third layer is optional), and the attribute with the bits of a packed weight.
    """

    def formula(step: RunStep) -> Work:
        packed = 8 // step.integer(bits, 4) if bits else 1
        x = step.shape(0)
        routed = step.shape(1)
        tokens = math.prod(x[:-1])
        chosen = step.integer("k", 1)
        sizes = [_expert_size(step, k) for k in weights if step.has_input(k)]
        macs = packed * sum(sizes)
        added = sum(_expert_size(step, k) for k in biases if step.has_input(k))
        inner = packed * _expert_size(step, weights[1]) // x[-1]
        # An activation of two operations, and a product with the gate if there is a third layer.
        activation = 3 if len(sizes) > 2 else 2
        # For each expert: biases, activation, and the weighted sum.
        per_expert = added + inner * activation + 2 * x[-1]
        routing = math.prod(routed) * SOFTMAX
        return Work(tokens * chosen * macs, routing + tokens * chosen * per_expert)

    return formula


def _distances(step: RunStep) -> Work:
    """A subtraction, a square and an addition for each element of each pair."""
    return Work(0, 3 * math.prod(step.output_shape()) * step.shape(0)[-1])


FORMULAS: Formulas = {
    ("", "TopK"): _top_k,
    ("", "Unique"): _sort,
    ("", "NonMaxSuppression"): _non_max_suppression,
    ("", "RoiAlign"): _roi_align,
    ("", "STFT"): _stft,
    ("", "AffineGrid"): _affine_grid,
    **{("", op): per_output(1) for op in RANDOM},
    ("", "Multinomial"): _multinomial,
    ("", "Det"): _determinant,
    ("", "Bernoulli"): per_output(2),  # a random number and its comparison
    ("", "HannWindow"): per_output(5),
    ("", "HammingWindow"): per_output(5),
    ("", "BlackmanWindow"): per_output(9),
    ("", "SwiGLU"): per_output(3),
    **{("", op): nothing for op in ("MaxUnpool", "TensorScatter")},
    (_CONTRIB, "MoE"): _experts((3, 5, 7), (2, 4, 6)),
    (_CONTRIB, "QMoE"): _experts((4, 7, 10), (2, 5, 8), "expert_weight_bits"),
    (_CONTRIB, "Unique"): _sort,
    (_CONTRIB, "Inverse"): _inverse,
    (_CONTRIB, "CDist"): _distances,
    (_CONTRIB, "SkipGroupNorm"): lambda step: per_output(
        8 + step.has_input(4) + 2 * step.integer("activation")
    )(step),
    (_CONTRIB, "GatherBlockQuantized"): per_output(2),
    (_CONTRIB, "BiasDropout"): per_output(2),
    (_CONTRIB, "ComplexMul"): per_output(3),
    (_CONTRIB, "ComplexMulConj"): per_output(3),
    **{(_CONTRIB, op): per_output(1) for op in ("MulInteger", "Range")},
    **{(_CONTRIB, op): per_input(1) for op in ("IsAllFinite", "ReduceSumInteger")},
    **{
        (_CONTRIB, op): nothing
        for op in ("GatherND", "RemovePadding", "RestorePadding", "UnfoldTensor")
    },
}
