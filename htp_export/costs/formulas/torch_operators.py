"""Work of torch operators, in graphs that are not ONNX files: the numbers of ONNX's counterparts.

Input tensors have the order of the operators' schemas, without gaps for other arguments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from htp_export.costs.execution import RunStep
from htp_export.costs.formulas import elementwise, products, selection
from htp_export.costs.formulas.attention import SOFTMAX
from htp_export.costs.formulas.selection import halvings
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
from htp_export.format.tags import ATEN

_ONNX = {**products.FORMULAS, **elementwise.FORMULAS, **selection.FORMULAS}


def _product_with_bias(step: RunStep) -> Work:
    """``addmm`` and its relatives: a summand, and a product of the two tensors after it."""
    inner = step.shape(1)[-1]
    return Work(math.prod(step.output_shape()) * inner, math.prod(step.output_shape()))


def _bilinear(step: RunStep) -> Work:
    """For each output, a matrix between two vectors."""
    outputs = math.prod(step.output_shape())
    (_, rows, columns) = step.shape(2)
    return Work(outputs * rows * (columns + 1), outputs * step.has_input(3))


def _convolution(step: RunStep) -> Work:
    return _ONNX["", "ConvTranspose" if step.integer("transposed") else "Conv"](step)


def _attention(step: RunStep) -> Work:
    """Scores and context: every query with all keys, also masked ones."""
    query = step.shape(0)
    key = step.shape(1)
    value = step.shape(2)
    scores = math.prod(query[:-1]) * key[-2]
    masked = step.has_input(3) or step.integer("is_causal")
    return Work(scores * (query[-1] + value[-1]), scores * (1 + bool(masked) + SOFTMAX))


def _recurrent(gates: int, update: int) -> Formula:
    """A recurrent layer of any depth: the sequence, states of rank 3, matrices and biases."""

    def formula(step: RunStep) -> Work:
        runs = math.prod(step.shape(0)[:-1])
        matrices = []
        for k, tensor in enumerate(step.inputs):
            if k and tensor and len(tensor.shape or ()) == 2:
                matrices.append(step.shape(k))
        hidden = sum(matrix[0] // gates for matrix in matrices[1::2])
        return Work(runs * sum(map(math.prod, matrices)), runs * hidden * (gates * 4 + update))

    return formula


def _cell(gates: int, update: int) -> Formula:
    """One step of a recurrent layer: the input, the states, two matrices, and biases."""

    def formula(step: RunStep) -> Work:
        batch = step.shape(0)[0]
        states = 2 if step.node.op_type == "lstm_cell" else 1
        matrices = [step.shape(1 + states), step.shape(2 + states)]
        hidden = matrices[1][0] // gates
        return Work(batch * sum(map(math.prod, matrices)), batch * hidden * (gates * 4 + update))

    return formula


def _pool(step: RunStep) -> Work:
    window = step.integers("kernel_size")
    axes = next(count for count in (1, 2, 3) if f"{count}d" in step.node.op_type)
    return per_output(math.prod(window) if len(window) > 1 else window[0] ** axes)(step)


def _sort(step: RunStep) -> Work:
    """``n * ceil(log2(n))`` comparisons along a dimension; ``topk`` uses a heap."""
    shape = step.shape(0)
    dim = step.integer("dim", -1)
    if step.node.op_type == "topk":
        count = step.output_shape()[dim] + 1
    else:
        count = shape[dim] if shape else 1
    return Work(0, math.prod(shape) * halvings(count))


def _clamp(step: RunStep) -> Work:
    bounds = sum(name in step.attributes for name in ("min", "max")) or len(step.inputs) - 1
    return per_output(bounds)(step)


def _each_summand(step: RunStep) -> Work:
    """``add``, ``sub``, ``addcmul``: one operation for each tensor, and one for the factor."""
    return per_output(1 + ("alpha" in step.attributes))(step)


def _norm(count: int) -> Formula:
    """A number of operations for each element, and one each for scale and bias, if present."""
    return lambda step: per_input(count + step.has_input(1) + step.has_input(2))(step)


def _reduces(step: RunStep) -> Work:
    """``scatter`` copies; with a reduction, each update is one operation."""
    updates = step.inputs[-1]
    adds = step.integer("accumulate") or "add" in step.node.op_type or "reduce" in step.node.op_type
    if not adds or updates is None or not updates.shape:
        return NOTHING
    return Work(0, math.prod(updates.shape))


_ONE = names("""
    atan2 bitwise_and bitwise_not bitwise_or bitwise_xor eq exp2 expm1 floor_divide fmod ge gt le log10 log1p log2
    logical_and logical_not logical_or logical_xor lt maximum minimum ne remainder rsqrt square threshold trunc rsub
    masked_fill arange bernoulli rand randn rand_like randn_like randint logaddexp special_expm1 fmax fmin isfinite
    true_divide absolute arccos arcsin arctan divide greater_equal less_equal multiply negative not_equal special_erf
    special_expit heaviside
""")

_PER_OUTPUT: Mapping[str, int] = {
    **{op.lower(): count for op, count in elementwise.PER_OUTPUT.items()},
    **dict.fromkeys(_ONE, 1),
    "_weight_norm": 4,
    "addcdiv": 3,
    "addcmul": 3,
    "glu": 2,
    "hardtanh": 2,
    "leaky_relu": 2,
    "lerp": 3,
    "log_sigmoid": 3,
    "logit": 3,
    "native_dropout": 2,
    "relu6": 2,
    "silu": 2,
    "upsample_bicubic2d": 31,
    "upsample_bilinear2d": 7,
    "upsample_linear1d": 3,
    "upsample_trilinear3d": 15,
}


_PER_INPUT: Mapping[str, int] = {
    **dict.fromkeys(
        names("all amax amin any argmax argmin cummax cumprod cumsum max mean min prod sum"), 1
    ),
    **dict.fromkeys(names("linalg_vector_norm norm"), 2),
    **dict.fromkeys(names("_log_softmax _safe_softmax _softmax log_softmax softmax"), SOFTMAX),
    **dict.fromkeys(names("std std_mean var var_mean"), 4),
    "_native_batch_norm_legit_functional": 7,  # in training: with the statistics
    "instance_norm": 7,
    "logsumexp": 4,
}

# These move, select, reshape or convert elements, or ask for sizes.
_WITHOUT_ARITHMETIC = names("""
    _assert_tensor_metadata _local_scalar_dense _reshape_alias _shape_as_tensor _to_copy _unsafe_view alias as_strided
    as_strided_copy as_strided_scatter bucketize cat channel_shuffle chunk clone concat constant_pad_nd contiguous
    copy detach diagonal diagonal_scatter dropout embedding empty empty_like expand expand_as eye feature_dropout
    fill flatten flip full full_like gather hstack im2col index index_select item lift_fresh lift_fresh_copy
    masked_select meshgrid movedim narrow new_empty new_full new_ones new_zeros nonzero nonzero_numpy numpy_T one_hot
    ones ones_like pad permute pixel_shuffle pixel_unshuffle ravel reflection_pad1d reflection_pad2d repeat
    repeat_interleave replication_pad1d replication_pad2d reshape reshape_as resolve_conj resolve_neg roll
    scalar_tensor select select_scatter slice slice_scatter split split_with_sizes squeeze stack sym_numel
    sym_size sym_storage_offset sym_stride t take tensor_split tile to to_dense transpose tril triu type_as unbind
    unflatten unfold unsqueeze upsample_nearest1d upsample_nearest2d upsample_nearest3d view view_as vstack zeros
    zeros_like
""")

_SIZES = names("""
    __and__ __or__ abs add ceil eq floor floordiv ge gt le lt max min mod mul ne neg not_ pow round sub sym_float
    sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum truediv trunc
""")

_ATEN: Mapping[str, Formula] = {
    **{name: per_output(count) for name, count in _PER_OUTPUT.items()},
    **{name: per_input(count) for name, count in _PER_INPUT.items()},
    **dict.fromkeys(_WITHOUT_ARITHMETIC, nothing),
    **dict.fromkeys(names("bmm matmul mm mv linalg_matmul dot inner vdot"), _ONNX["", "MatMul"]),
    **dict.fromkeys(names("addbmm addmm addmv baddbmm"), _product_with_bias),
    **dict.fromkeys(names("_convolution conv1d conv2d conv3d convolution"), _convolution),
    **dict.fromkeys(
        names("conv_transpose1d conv_transpose2d conv_transpose3d"), _ONNX["", "ConvTranspose"]
    ),
    **dict.fromkeys(
        names("""
            _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention
            _scaled_dot_product_flash_attention_for_cpu scaled_dot_product_attention
        """),
        _attention,
    ),
    **dict.fromkeys(
        names(
            "_native_batch_norm_legit _native_batch_norm_legit_no_training batch_norm native_batch_norm"
        ),
        per_output(2),  # at inference: scale and shift
    ),
    **dict.fromkeys(names("layer_norm native_layer_norm group_norm native_group_norm"), _norm(5)),
    **dict.fromkeys(
        names("avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d"), _pool
    ),
    **dict.fromkeys(names("max_pool2d_with_indices max_pool3d_with_indices"), _pool),
    **dict.fromkeys(
        names("""
            _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
            adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
        """),
        lambda step: Work(0, max(math.prod(step.shape(0)), math.prod(step.output_shape()))),
    ),
    **dict.fromkeys(names("add sub subtract"), _each_summand),
    **dict.fromkeys(names("clamp clamp_max clamp_min clip"), _clamp),
    **dict.fromkeys(
        names("index_add index_put index_reduce scatter scatter_add scatter_reduce masked_scatter"),
        _reduces,
    ),
    **dict.fromkeys(names("argsort msort sort topk"), _sort),
    **dict.fromkeys(names("_unique2 unique_dim"), _ONNX["", "Unique"]),
    "bilinear": _bilinear,
    "einsum": _ONNX["", "Einsum"],
    "gelu": _ONNX["", "Gelu"],
    "gru": _recurrent(3, 5),
    "gru_cell": _cell(3, 5),
    "linear": products.matmul_with_bias(2),
    "lstm": _recurrent(4, 5),
    "lstm_cell": _cell(4, 5),
    "rms_norm": _norm(3),
    "rnn_relu": _recurrent(1, 0),
    "rnn_relu_cell": _cell(1, 0),
    "rnn_tanh": _recurrent(1, 0),
    "rnn_tanh_cell": _cell(1, 0),
}

FORMULAS: Formulas = {
    **{(ATEN, name): formula for name, formula in _ATEN.items()},
    **{("python", name): nothing for name in _SIZES},
}
