"""Which axes of the tensors around a node have the same channels: if one is cut, the others have to be.

A rule takes a node and yields groups of axes, most as equations of ``Einsum``: axes with the same
letter are a group. An axis that a node sums over, and that nothing else has, is a group of its own.
Axes in no group cannot be cut.
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
"""Axes with the same channels: axis → how often the channels repeat, and neighbours with one channel.

An axis with (2, 3) and two channels is ``aaabbbaaabbb``: the shape [2, channels, 3], flattened.
Most have (1, 1).
"""

Values: TypeAlias = Sequence[ir.Value | None]
Rule: TypeAlias = Callable[[ir.Node, Symbolic], Iterator[Group]]

RECURRENT = {"LSTM": 4, "GRU": 3, "RNN": 1}
"""Recurrent operator → the gates of a hidden unit, which have rows of the weights."""

_ONE_EACH = 1, 1  # no repetition, and one neighbour, see `Group`
_LETTERS = string.ascii_letters
_ALONE = "."  # in an equation, an axis that stands in no group

_LIKE_FIRST = """
Abs Acos Acosh Asin Asinh Atan Atanh Cast Ceil Celu Clip Cos Cosh Dropout Elu Erf Exp Floor Gelu HardSigmoid HardSwish
Identity IsInf IsNaN LeakyRelu Log LogSoftmax Mish Neg Not Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh
Softmax Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu com.microsoft::Gelu com.microsoft::FastGelu
com.microsoft::QuickGelu Expand
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
    "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum",
    "ReduceLogSumExp", "ReduceSumSquare",
)  # fmt: skip


def groups_of(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    """The groups of axes of a node; none for an operator without a rule.

    Operators that give an axis another place or length (`Reshape`, `Concat`, `Split`, `Slice`) have
    only those groups that stay; see ``coupling``.

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
    """The axes of values with the same letter, for a word of letters for each value."""
    groups: dict[str, dict[Axis, tuple[int, int]]] = {}
    for value, letters in zip(values, equations, strict=False):
        for axis, letter in enumerate(letters if value is not None else ""):
            if value is not None and letter != _ALONE:
                groups.setdefault(letter, {})[value, axis] = _ONE_EACH
    yield from groups.values()


def _from_right(values: Values, shapes: Symbolic, skipped: int = 0) -> Iterator[Group]:
    """Axes that are broadcast together, counted from the last one."""
    present = [(value, _rank(shapes, value)) for value in values if value is not None]
    for place in range(1 + skipped, max((rank for _, rank in present), default=0) + 1):
        yield {(value, rank - place): _ONE_EACH for value, rank in present if rank >= place}


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
    """What an operator reads the size of, or makes without reading a tensor."""
    yield from _each_alone(
        node.inputs[0] if operator_of(node) in SIZES_ONLY else node.outputs[0], shapes
    )


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
        yield from _by_letters(
            values, ["bi", "io" if node.op_type == "ConvTranspose" else "oi", "bo", "o"]
        )
    else:
        yield from _by_letters(values, ["b", "", "b"])
        yield from _grouped_convolution(node, shapes)


def _batch_norm(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    letters = _LETTERS[: _rank(shapes, node.inputs[0])]
    vectors = [letters[1:2]] * len(node.inputs[1:])
    yield from _by_letters(
        [node.inputs[0], node.outputs[0], *node.inputs[1:]], [letters, letters, *vectors]
    )


def _first_two(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    yield from _by_letters([node.inputs[0], *node.outputs], ["bc"] * (1 + len(node.outputs)))


def _transpose(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    letters = _LETTERS[: _rank(shapes, node.inputs[0])]
    order = node.attributes.get_ints("perm") or range(len(letters) - 1, -1, -1)
    yield from _by_letters(
        [node.inputs[0], node.outputs[0]], [letters, "".join(letters[axis] for axis in order)]
    )


def _reduction(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    letters = _LETTERS[: _rank(shapes, node.inputs[0])]
    listed = node.attributes.get_ints("axes")
    if listed is None and len(node.inputs) > 1 and node.inputs[1] is not None:
        listed = shapes.constant(node.inputs[1])
        if listed is None:
            return
    reduced = {axis % len(letters) for axis in listed} if listed else set(range(len(letters)))
    left = _ALONE if node.attributes.get_int("keepdims", 1) else ""
    kept = "".join(left if axis in reduced else letter for axis, letter in enumerate(letters))
    yield from _by_letters([node.inputs[0], node.outputs[0]], [letters, kept])


def _gather(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    rank, width = (_rank(shapes, value) for value in node.inputs[:2])
    at = node.attributes.get_int("axis", 0) % max(rank, 1)
    indices = _LETTERS[rank : rank + width]
    before, behind = _LETTERS[:at], _LETTERS[at + 1 : rank]
    words = [before + _ALONE + behind if rank else "", indices, before + indices + behind]
    yield from _by_letters([*node.inputs[:2], node.outputs[0]], words)


def _gather_nd(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    rank, width = (_rank(shapes, value) for value in node.inputs[:2])
    given = shapes.shape(node.inputs[1])
    if (
        given
        and isinstance(depth := given[-1], int)
        and not node.attributes.get_int("batch_dims", 0)
    ):
        indices, behind = _LETTERS[: width - 1], _LETTERS[width : width + rank - depth]
        yield from _by_letters(
            [*node.inputs[:2], node.outputs[0]],
            [_ALONE * depth + behind, indices + _ALONE, indices + behind],
        )


def gathered(node: ir.Node, shapes: Symbolic) -> tuple[int, Array] | None:
    """The axis along which a Gather or GatherND takes known indices, and these, from 0; None if it takes no axis so."""
    table, given = (shapes.shape(value) for value in node.inputs[:2])
    if not table or not given or node.attributes.get_int("batch_dims", 0) != 0:
        return None
    at = node.attributes.get_int("axis", 0) % len(table)
    value = node.inputs[1]
    tensor = None if value is None else stored_tensor(value)
    numbers = shapes.constant(value) if tensor is None else tensor.numpy()
    if (
        numbers is None
        or not isinstance(length := table[at], int)
        or not all(isinstance(size, int) for size in given)
    ):
        return None
    indices = np.asarray(numbers, np.int64).reshape([int(str(size)) for size in given]) % length
    if node.op_type == "GatherND":
        return (at, indices[..., 0]) if indices.shape[-1] == 1 else None
    return at, indices


def _beside(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    """All axes but the one that is split, sliced or concatenated."""
    changed = changed_axes(node, shapes)
    values = [*(node.inputs if node.op_type == "Concat" else node.inputs[:1]), *node.outputs]
    letters = _LETTERS[: _rank(shapes, node.inputs[0])] if changed is not None else ""
    word = "".join(
        _ALONE if axis in (changed or ()) else letter for axis, letter in enumerate(letters)
    )
    yield from _by_letters(values, [word] * len(values))


def changed_axes(node: ir.Node, shapes: Symbolic) -> list[int] | None:
    """The axes that a Concat, Split or Slice changes; None if that is not known."""
    if node.op_type == "Slice":
        return sliced_axes(node, shapes)
    rank = _rank(shapes, node.inputs[0])
    return [node.attributes.get_int("axis", 0) % rank] if rank else None


def slice_start(node: ir.Node, axis: int, shapes: Symbolic, size: int) -> int | None:
    """The first index of a slice with steps of 1 along an axis; None if it is computed or has other steps."""
    bounds = slice_bounds(node, shapes)
    if bounds is None or bounds[axis][2] != 1:
        return None
    start = bounds[axis][0]
    return min(max(start + size if start < 0 else start, 0), size)


def _pad(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    rank = _rank(shapes, node.inputs[0])
    pads = node.attributes.get_ints("pads") or (
        shapes.constant(node.inputs[1]) if len(node.inputs) > 1 else None
    )
    if pads is not None and len(pads) == 2 * rank:
        word = "".join(
            _ALONE if pads[axis] or pads[axis + rank] else _LETTERS[axis] for axis in range(rank)
        )
        yield from _by_letters([node.inputs[0], node.outputs[0]], [word, word])


def _einsum(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    equation = node.attributes.get_string("equation", "").replace(" ", "")
    left, arrow, right = equation.partition("->")
    if arrow and "." not in equation:
        yield from _by_letters([*node.inputs, node.outputs[0]], [*left.split(","), right])


def is_cut_by_groups(node: ir.Node, shapes: Symbolic) -> bool:
    """Whether whole groups of a convolution are cut out, as each has one channel on a side; else some of each."""
    return 1 in _sizes_of_group(node, shapes)


def _sizes_of_group(node: ir.Node, shapes: Symbolic) -> tuple[int, int]:
    """The channels that a group of a convolution reads, and those that it computes; 0 for an unknown number."""
    group = node.attributes.get_int("group", 1)
    found = [shapes.shape(value) for value in (node.inputs[0], node.outputs[0])]
    sizes = [shape[1] if shape else 0 for shape in found]
    read, computed = (size // group if isinstance(size, int) else 0 for size in sizes)
    return read, computed


def _grouped_convolution(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    group = node.attributes.get_int("group", 1)
    read, computed = _sizes_of_group(node, shapes)
    if not read or not computed:
        return
    (x, weight), y = node.inputs[:2], node.outputs[0]
    assert x is not None
    assert weight is not None
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    results: list[Axis] = [(y, 1)] if bias is None else [(y, 1), (bias, 0)]
    turned = node.op_type == "ConvTranspose"
    if is_cut_by_groups(node, shapes):
        yield {(x, 1): (1, read), (weight, 0): (1, read if turned else computed)} | dict.fromkeys(
            results, (1, computed)
        )
    elif turned:
        yield {(x, 1): (group, 1), (weight, 0): (group, 1)}
        yield {(weight, 1): (1, 1)} | dict.fromkeys(results, (group, 1))
    else:
        yield {(x, 1): (group, 1), (weight, 1): (1, 1)}
        yield {(weight, 0): (group, 1)} | dict.fromkeys(results, (group, 1))


def _recurrent(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    """What is read, and the hidden states; weights have rows of all gates, biases those of both products."""
    gates = RECURRENT[node.op_type]
    values = [*node.inputs, *[None] * (8 - len(node.inputs))]
    x, w, r, b, _, h, c, peepholes = values
    hidden = [
        (w, 1, gates),
        (r, 1, gates),
        (r, 2, 1),
        (b, 1, 2 * gates),
        (h, 2, 1),
        (c, 2, 1),
        (peepholes, 1, 3),
    ]
    hidden += [(value, 3 if place == 0 else 2, 1) for place, value in enumerate(node.outputs)]
    if node.attributes.get_int("layout", 0) == 0:  # ONNX Runtime has no other
        yield {(value, axis): (1, 1) for value, axis in ((x, 2), (w, 2)) if value is not None}
        yield {(value, axis): (times, 1) for value, axis, times in hidden if value is not None}


def _depth_to_space(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    (x,), y = node.inputs, node.outputs[0]
    assert x is not None
    times = node.attributes.get_int("blocksize", 1) ** 2
    tile = (1, times) if node.attributes.get_string("mode", "DCR") == "CRD" else (times, 1)
    yield (
        {(x, 1): _ONE_EACH, (y, 1): tile}
        if node.op_type == "SpaceToDepth"
        else {(x, 1): tile, (y, 1): _ONE_EACH}
    )


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
