"""Axes of the tensors around a node that have the same channels: they can only be cut together.

A rule takes a node and yields groups of axes, most as equations of ``Einsum``: axes with the same
letter are a group. An axis that a node sums over, and that no other tensor has, is a group of its
own. Axes in no group cannot be cut.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from htp_export.model.module_facts import stored_tensor
from htp_export.runtime.arrays import Array
from htp_export.shapes.operator_kinds import SIZES_ONLY, operator_of
from htp_export.shapes.operators.elementwise import ELEMENTWISE
from htp_export.shapes.operators.indexing import slice_bounds, sliced_axes
from htp_export.shapes.symbolic import Symbolic

Axis: TypeAlias = tuple[ir.Value, int]
"""A tensor and one of its axes, from 0."""

Group: TypeAlias = Mapping[Axis, tuple[int, int]]
"""Axes with the same channels: axis → repetitions of the channels, and adjacent indices of each.

An axis with (2, 3) and two channels is ``aaabbbaaabbb``: the shape [2, channels, 3], flattened.
Most have (1, 1).
"""

Values: TypeAlias = Sequence[ir.Value | None]
Rule: TypeAlias = Callable[[ir.Node, Symbolic], Iterator[Group]]

RECURRENT = {"LSTM": 4, "GRU": 3, "RNN": 1}
"""Recurrent operator → the gates of a hidden unit; each gate has a row of the weights."""

_ONE_EACH = 1, 1  # no repetition, and one index for each channel, see `Group`
_LETTERS = string.ascii_letters
_ALONE = "."  # in an equation, an axis in no group

_LIKE_FIRST = """
Abs Acos Acosh Asin Asinh Atan Atanh Cast Ceil Celu Clip Cos Cosh Dropout Elu Erf Exp Floor Gelu
HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Log LogSoftmax Mish Neg Not Reciprocal Relu
Round Selu Shrink Sigmoid Sign Sin Sinh Softmax Softplus Softsign Sqrt Swish Tan Tanh
ThresholdedRelu com.microsoft::Gelu com.microsoft::FastGelu com.microsoft::QuickGelu Expand
""".split()  # noqa: SIM905 - as a list of strings it would fill the screen
_POOLS = (
    "AveragePool",
    "MaxPool",
    "LpPool",
    "GlobalAveragePool",
    "GlobalMaxPool",
    "GlobalLpPool",
    "Resize",
)
_REDUCTIONS = (
    "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd",
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare",
)  # fmt: skip


def groups_of(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    """The groups of axes of a node; none for an operator without a rule.

    Of operators that move an axis or change its length (`Reshape`, `Concat`, `Split`, `Slice`),
    only the unchanged axes are in groups; `Coupling` follows the others.

    Examples:
        >>> x, w = ir.val("x", ir.DataType.FLOAT, [2, 3]), ir.val("w", ir.DataType.FLOAT, [3, 4])
        >>> product = ir.node("MatMul", [x, w])
        >>> graph = ir.Graph([x, w], product.outputs, nodes=[product], opset_imports={"": 20})
        >>> [[(value.name, axis) for value, axis in group] for group in groups_of(product, Symbolic(graph))]
        [[('x', 0), ('val_0', 0)], [('x', 1), ('w', 0)], [('w', 1), ('val_0', 1)]]
        >>> x, y = ir.val("x", ir.DataType.FLOAT, [1, 8, 2, 2]), ir.val("y", ir.DataType.FLOAT, [1, 2, 4, 4])
        >>> node = ir.node("DepthToSpace", [x], {"blocksize": 2}, outputs=[y])
        >>> shapes = Symbolic(ir.Graph([x], [y], nodes=[node], opset_imports={"": 20}))
        >>> [{(value.name, axis): tile for (value, axis), tile in group.items()} for group in groups_of(node, shapes)]
        [{('x', 1): (4, 1), ('y', 1): (1, 1)}]
    """
    rule = _RULES.get(operator_of(node))
    if rule is not None:
        yield from rule(node, shapes)


def _rank(shapes: Symbolic, value: ir.Value | None) -> int:
    return (shapes.rank(value) or 0) if value is not None else 0


def _by_letters(values: Values, equations: Sequence[str]) -> Iterator[Group]:
    """The axes of values with the same letter, from a word of letters for each value."""
    groups: dict[str, dict[Axis, tuple[int, int]]] = {}
    for value, letters in zip(values, equations, strict=False):
        for axis, letter in enumerate(letters if value is not None else ""):
            if value is not None and letter != _ALONE:
                groups.setdefault(letter, {})[value, axis] = _ONE_EACH
    yield from groups.values()


def _from_right(values: Values, shapes: Symbolic, skipped: int = 0) -> Iterator[Group]:
    """Axes that are broadcast together, counted from the last one."""
    ranks = {value: _rank(shapes, value) for value in values if value is not None}
    for distance in range(1 + skipped, max(ranks.values(), default=0) + 1):
        yield {
            (value, rank - distance): _ONE_EACH for value, rank in ranks.items() if rank >= distance
        }


def _elementwise(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    yield from _from_right([*node.inputs, *node.outputs], shapes)


def _like_first(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    yield from _from_right([node.inputs[0], *node.outputs], shapes)


def _layer_norm(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    yield from _from_right([*node.inputs, node.outputs[0]], shapes)


def _cast_like(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    yield from _like_first(node, shapes)
    yield from _each_alone(node.inputs[1], shapes)


def _alone(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    """Axes of a tensor of which only the sizes are used, or that has no tensor as its source."""
    value = node.inputs[0] if operator_of(node) in SIZES_ONLY else node.outputs[0]
    yield from _each_alone(value, shapes)


def _each_alone(value: ir.Value | None, shapes: Symbolic) -> Iterator[Group]:
    if value is not None:
        yield from ({(value, axis): _ONE_EACH} for axis in range(_rank(shapes, value)))


def _matmul(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    values = [*node.inputs, *node.outputs]
    ranks = [_rank(shapes, value) for value in values]
    if min(ranks[:2]) >= 2:
        batches = (_ALONE * (rank - 2) for rank in ranks)
        words = zip(batches, ("mk", "kn", "mn"), strict=True)
        yield from _by_letters(values, ["".join(word) for word in words])
        yield from _from_right(values, shapes, skipped=2)


def _gemm(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    first = "km" if node.attributes.get_int("transA", 0) else "mk"
    second = "nk" if node.attributes.get_int("transB", 0) else "kn"
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    values = [*node.inputs[:2], node.outputs[0], bias]
    yield from _by_letters(values, [first, second, "mn", "mn"[2 - min(_rank(shapes, bias), 2) :]])


def _convolution(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    x, weight = node.inputs[:2]
    values = [x, weight, node.outputs[0], *node.inputs[2:3]]
    if node.attributes.get_int("group", 1) == 1:
        weight_axes = "io" if node.op_type == "ConvTranspose" else "oi"
        yield from _by_letters(values, ["bi", weight_axes, "bo", "o"])
    else:
        yield from _by_letters(values, ["b", "", "b"])
        yield from _grouped_convolution(node, shapes)


def _batch_norm(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    x, *vectors = node.inputs
    letters = _LETTERS[: _rank(shapes, x)]
    channels = letters[1:2]
    words = [letters, letters, *[channels] * len(vectors)]
    yield from _by_letters([x, node.outputs[0], *vectors], words)


def _first_two(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    yield from _by_letters([node.inputs[0], *node.outputs], ["bc"] * (1 + len(node.outputs)))


def _transpose(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    letters = _LETTERS[: _rank(shapes, node.inputs[0])]
    order = node.attributes.get_ints("perm") or range(len(letters) - 1, -1, -1)
    permuted = "".join(letters[axis] for axis in order)
    yield from _by_letters([node.inputs[0], node.outputs[0]], [letters, permuted])


def _reduction(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    letters = _LETTERS[: _rank(shapes, node.inputs[0])]
    listed = node.attributes.get_ints("axes")
    if listed is None and len(node.inputs) > 1 and node.inputs[1] is not None:
        listed = shapes.constant(node.inputs[1])
        if listed is None:
            return
    reduced = {axis % len(letters) for axis in listed or range(len(letters))}
    keeps_axes = node.attributes.get_int("keepdims", 1) != 0
    reduced_letter = _ALONE if keeps_axes else ""
    word = ""
    for axis, letter in enumerate(letters):
        word += reduced_letter if axis in reduced else letter
    yield from _by_letters([node.inputs[0], node.outputs[0]], [letters, word])


def _gather(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    rank, indices_rank = (_rank(shapes, value) for value in node.inputs[:2])
    axis = node.attributes.get_int("axis", 0) % max(rank, 1)
    indices = _LETTERS[rank : rank + indices_rank]
    before, after = _LETTERS[:axis], _LETTERS[axis + 1 : rank]
    words = [before + _ALONE + after if rank else "", indices, before + indices + after]
    yield from _by_letters([*node.inputs[:2], node.outputs[0]], words)


def _gather_nd(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    rank, indices_rank = (_rank(shapes, value) for value in node.inputs[:2])
    indices_shape = shapes.shape(node.inputs[1])
    if not indices_shape or node.attributes.get_int("batch_dims", 0) != 0:
        return
    depth = indices_shape[-1]
    if not isinstance(depth, int):
        return
    indices = _LETTERS[: indices_rank - 1]
    after = _LETTERS[indices_rank : indices_rank + rank - depth]
    words = [_ALONE * depth + after, indices + _ALONE, indices + after]
    yield from _by_letters([*node.inputs[:2], node.outputs[0]], words)


def gathered(node: ir.Node, shapes: Symbolic) -> tuple[int, Array] | None:
    """The axis that a Gather or GatherND indexes, and its constant indices, from 0.

    None if the indices are computed, or index several axes.
    """
    table, index_shape = (shapes.shape(value) for value in node.inputs[:2])
    if not table or not index_shape or node.attributes.get_int("batch_dims", 0) != 0:
        return None
    axis = node.attributes.get_int("axis", 0) % len(table)
    value = node.inputs[1]
    tensor = None if value is None else stored_tensor(value)
    numbers = shapes.constant(value) if tensor is None else tensor.numpy()
    length = table[axis]
    sizes = [size for size in index_shape if isinstance(size, int)]
    if numbers is None or not isinstance(length, int) or len(sizes) < len(index_shape):
        return None
    indices = np.asarray(numbers, np.int64).reshape(sizes) % length
    if node.op_type == "Gather":
        return axis, indices
    return (axis, indices[..., 0]) if indices.shape[-1] == 1 else None


def _beside(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    """All axes but the one that is split, sliced or concatenated."""
    changed = changed_axes(node, shapes)
    if changed is None:
        return
    word = ""
    for axis, letter in enumerate(_LETTERS[: _rank(shapes, node.inputs[0])]):
        word += _ALONE if axis in changed else letter
    sources = node.inputs if node.op_type == "Concat" else node.inputs[:1]
    values = [*sources, *node.outputs]
    yield from _by_letters(values, [word] * len(values))


def changed_axes(node: ir.Node, shapes: Symbolic) -> list[int] | None:
    """The axes that a Concat, Split or Slice changes; None if they are computed."""
    if node.op_type == "Slice":
        return sliced_axes(node, shapes)
    rank = _rank(shapes, node.inputs[0])
    return [node.attributes.get_int("axis", 0) % rank] if rank else None


def slice_start(node: ir.Node, axis: int, shapes: Symbolic, size: int) -> int | None:
    """The first index of a slice along an axis; None if it is computed, or if the step is not 1."""
    bounds = slice_bounds(node, shapes)
    if bounds is None or bounds[axis][2] != 1:
        return None
    start = bounds[axis][0]
    return min(max(start + size if start < 0 else start, 0), size)


def _pad(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    rank = _rank(shapes, node.inputs[0])
    pads: Sequence[int] | None = node.attributes.get_ints("pads")
    if not pads and len(node.inputs) > 1:
        pads = shapes.constant(node.inputs[1])
    if pads is None or len(pads) != 2 * rank:
        return
    word = ""
    for axis in range(rank):
        word += _ALONE if pads[axis] or pads[axis + rank] else _LETTERS[axis]
    yield from _by_letters([node.inputs[0], node.outputs[0]], [word, word])


def _einsum(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    equation = node.attributes.get_string("equation", "").replace(" ", "")
    left, arrow, right = equation.partition("->")
    if arrow and "." not in equation:
        yield from _by_letters([*node.inputs, node.outputs[0]], [*left.split(","), right])


def is_cut_by_groups(node: ir.Node, shapes: Symbolic) -> bool:
    """Whether a convolution loses whole groups, because each has one channel on one side.

    Otherwise each group loses some of its channels.
    """
    return 1 in _sizes_of_group(node, shapes)


def _sizes_of_group(node: ir.Node, shapes: Symbolic) -> tuple[int, int]:
    """The channels of the input and of the result in a group of a convolution; 0 if unknown."""
    group = node.attributes.get_int("group", 1)
    found = [shapes.shape(value) for value in (node.inputs[0], node.outputs[0])]
    sizes = [shape[1] if shape else 0 for shape in found]
    read, computed = (size // group if isinstance(size, int) else 0 for size in sizes)
    return read, computed


def _grouped_convolution(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    """The channels of the input and of the result of a convolution with groups.

    A group maps axes to (repetitions, adjacent indices) of a channel. The weight of ``Conv`` is
    (out, in / group, ...), that of ``ConvTranspose`` (in, out / group, ...). With 2 groups, 4
    inputs and 6 outputs, a weight of ``Conv`` has shape (6, 2, ...): its axis 0 has 3 outputs of
    each group side by side, and each index of its axis 1 is an input of both groups. So an index
    of axis 1 can only be cut with one input of each group: inputs 0 and 2, or 1 and 3.
    """
    group = node.attributes.get_int("group", 1)
    read, computed = _sizes_of_group(node, shapes)
    if not read or not computed:
        return
    (x, weight), y = node.inputs[:2], node.outputs[0]
    assert x is not None
    assert weight is not None
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    results: list[Axis] = [(y, 1)] if bias is None else [(y, 1), (bias, 0)]
    is_transposed = node.op_type == "ConvTranspose"
    # Depthwise, or one output for each group: whole groups are cut.
    if is_cut_by_groups(node, shapes):
        rows = read if is_transposed else computed
        inputs = {(x, 1): (1, read), (weight, 0): (1, rows)}
        yield inputs | dict.fromkeys(results, (1, computed))
    elif is_transposed:
        yield {(x, 1): (group, 1), (weight, 0): (group, 1)}
        yield {(weight, 1): (1, 1)} | dict.fromkeys(results, (group, 1))
    else:
        yield {(x, 1): (group, 1), (weight, 1): (1, 1)}
        yield {(weight, 0): (group, 1)} | dict.fromkeys(results, (group, 1))


def _recurrent(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    """The channels of the input, and the channels of the hidden state.

    Weights and biases have a row for each gate of a hidden unit.
    """
    if node.attributes.get_int("layout", 0) != 0:  # ONNX Runtime has no other
        return
    gates = RECURRENT[node.op_type]
    values = [*node.inputs, *[None] * (8 - len(node.inputs))]
    x, w, r, b, _, h, c, peepholes = values
    hidden = [
        (w, 1, gates),
        (r, 1, gates),
        (r, 2, 1),
        (b, 1, 2 * gates),  # of the input, and of the hidden state
        (h, 2, 1),
        (c, 2, 1),
        (peepholes, 1, 3),  # of three gates
    ]
    # the output of all steps has an axis more than the last states
    hidden += [(value, 3 if position == 0 else 2, 1) for position, value in enumerate(node.outputs)]
    yield {(value, axis): _ONE_EACH for value, axis in ((x, 2), (w, 2)) if value is not None}
    yield {(value, axis): (times, 1) for value, axis, times in hidden if value is not None}


def _depth_to_space(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    (x,), y = node.inputs, node.outputs[0]
    assert x is not None
    times = node.attributes.get_int("blocksize", 1) ** 2
    tile = (1, times) if node.attributes.get_string("mode", "DCR") == "CRD" else (times, 1)
    if node.op_type == "SpaceToDepth":
        yield {(x, 1): _ONE_EACH, (y, 1): tile}
    else:
        yield {(x, 1): tile, (y, 1): _ONE_EACH}


_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(_LIKE_FIRST, _like_first),
    **dict.fromkeys(_POOLS, _first_two),
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(("Conv", "ConvTranspose", "com.microsoft::FusedConv"), _convolution),
    **dict.fromkeys(
        ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"), _layer_norm
    ),
    **dict.fromkeys(("Concat", "Split", "Slice"), _beside),
    **dict.fromkeys((*SIZES_ONLY, "ConstantOfShape", "Constant"), _alone),
    **dict.fromkeys(RECURRENT, _recurrent),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), _depth_to_space),
    "CastLike": _cast_like,
    "PRelu": _elementwise,
    "com.microsoft::BiasGelu": _elementwise,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "BatchNormalization": _batch_norm,
    "InstanceNormalization": _batch_norm,
    "Transpose": _transpose,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Pad": _pad,
    "Einsum": _einsum,
}
