"""Which axes of the tensors around a node have the same channels: if one is cut, the others have to be.

A rule takes a node and yields groups of axes. An axis that a node sums over, and that nothing else has, is a group of
its own. Axes that stand in no group cannot be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import onnx_ir as ir

from htp_export.shapes.operator_kinds import SIZES_ONLY, operator_of
from htp_export.shapes.operators.elementwise import ELEMENTWISE
from htp_export.shapes.symbolic import Symbolic

__all__ = ["Axis", "Group", "changed_axes", "groups_of"]

Axis: TypeAlias = tuple[ir.Value, int]
"""A tensor and one of its axes, from 0."""

Group: TypeAlias = Sequence[Axis]
Rule: TypeAlias = Callable[[ir.Node, Symbolic], Iterator[Group]]

_LIKE_FIRST = """
Abs Acos Acosh Asin Asinh Atan Atanh Cast Ceil Celu Clip Cos Cosh Dropout Elu Erf Exp Floor Gelu HardSigmoid HardSwish
Identity IsInf IsNaN LeakyRelu Log LogSoftmax Mish Neg Not Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh
Softmax Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu com.microsoft::Gelu com.microsoft::FastGelu
com.microsoft::QuickGelu
""".split()  # noqa: SIM905 - as a list of strings it would fill the screen
_POOLS = ("AveragePool", "MaxPool", "LpPool", "GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool", "Resize")
_REDUCTIONS = (
    "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum",
    "ReduceLogSumExp", "ReduceSumSquare",
)  # fmt: skip


def groups_of(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    """The groups of axes of a node; none for an operator without a rule.

    Operators that give an axis another place or length (`Reshape`, `Concat`, `Split`, `Slice`) have only those groups
    that stay; see ``coupling``.

    Args:
        node: The node.
        shapes: The shapes of the model's tensors.

    Examples:
        >>> x, w = ir.val("x", ir.DataType.FLOAT, [2, 3]), ir.val("w", ir.DataType.FLOAT, [3, 4])
        >>> product = ir.node("MatMul", [x, w])
        >>> graph = ir.Graph([x, w], product.outputs, nodes=[product], opset_imports={"": 20})
        >>> [[(value.name, axis) for value, axis in group] for group in groups_of(product, Symbolic(graph))]
        [[('x', 1), ('w', 0)], [('x', 0), ('val_0', 0)], [('w', 1), ('val_0', 1)]]
    """
    rule = _RULES.get(operator_of(node))
    if rule is not None:
        yield from rule(node, shapes)


def _rank(shapes: Symbolic, value: ir.Value | None) -> int:
    return (shapes.rank(value) or 0) if value is not None else 0


def _from_right(values: Sequence[ir.Value | None], shapes: Symbolic, skipped: int = 0) -> Iterator[Group]:
    """Axes that are broadcast together, counted from the last one."""
    present = [(value, _rank(shapes, value)) for value in values if value is not None]
    for place in range(1 + skipped, max((rank for _, rank in present), default=0) + 1):
        yield [(value, rank - place) for value, rank in present if rank >= place]


def _elementwise(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    yield from _from_right([*node.inputs, *node.outputs], shapes)


def _like_first(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    yield from _from_right([node.inputs[0], *node.outputs], shapes)


def _cast_like(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    yield from _like_first(node, shapes)
    yield from _each_alone(node.inputs[1], shapes)


def _each_alone(value: ir.Value | None, shapes: Symbolic) -> Iterator[Group]:
    if value is not None:
        yield from ([(value, axis)] for axis in range(_rank(shapes, value)))


def _matmul(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    first, second, result = node.inputs[0], node.inputs[1], node.outputs[0]
    ranks = [_rank(shapes, value) for value in (first, second, result)]
    if first is None or second is None or min(ranks[:2]) < 2:
        return
    yield [(first, ranks[0] - 1), (second, ranks[1] - 2)]
    yield [(first, ranks[0] - 2), (result, ranks[2] - 2)]
    yield [(second, ranks[1] - 1), (result, ranks[2] - 1)]
    yield from _from_right([first, second, result], shapes, skipped=2)


def _gemm(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    first, second, result = node.inputs[0], node.inputs[1], node.outputs[0]
    if first is None or second is None:
        return
    turned = [node.attributes.get_int(name, 0) for name in ("transA", "transB")]
    rows, summed = (1, 0) if turned[0] else (0, 1)
    inner, columns = (1, 0) if turned[1] else (0, 1)
    yield [(first, summed), (second, inner)]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    rank = _rank(shapes, bias)
    yield [(first, rows), (result, 0), *([(bias, 0)] if bias is not None and rank == 2 else [])]
    yield [(second, columns), (result, 1), *([(bias, rank - 1)] if bias is not None and rank else [])]


def _convolution(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    x, weight, result = node.inputs[0], node.inputs[1], node.outputs[0]
    if x is None or weight is None:
        return
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    more = [(bias, 0)] if bias is not None else []
    group = node.attributes.get_int("group", 1)
    yield [(x, 0), (result, 0)]
    sizes = [shapes.shape(value) for value in (x, weight)]
    turned = node.op_type == "ConvTranspose"
    if group == 1:
        yield [(x, 1), (weight, 0 if turned else 1)]
        yield [(weight, 1 if turned else 0), (result, 1), *more]
    elif sizes[0] is not None and sizes[1] is not None and sizes[0][1] == group == sizes[1][0] and sizes[1][1] == 1:
        yield [(x, 1), (weight, 0), (result, 1), *more]  # each channel by itself; `group` is their number


def _batch_norm(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    x, result = node.inputs[0], node.outputs[0]
    if x is not None:
        for axis in range(_rank(shapes, x)):
            factors = [(value, 0) for value in node.inputs[1:] if value is not None] if axis == 1 else []
            yield [(x, axis), (result, axis), *factors]


def _layer_norm(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    yield from _from_right([*node.inputs, node.outputs[0]], shapes)


def _first_two(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    x = node.inputs[0]
    if x is not None:
        yield from ([(x, axis), *((value, axis) for value in node.outputs)] for axis in (0, 1))


def _transpose(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    x = node.inputs[0]
    if x is not None:
        order = node.attributes.get_ints("perm") or range(_rank(shapes, x) - 1, -1, -1)
        yield from ([(x, axis), (node.outputs[0], place)] for place, axis in enumerate(order))


def _reduction(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    x, result = node.inputs[0], node.outputs[0]
    rank = _rank(shapes, x)
    listed = node.attributes.get_ints("axes")
    if listed is None and len(node.inputs) > 1 and node.inputs[1] is not None:
        listed = shapes.constant(node.inputs[1])
        if listed is None:
            return
    reduced = {axis % rank for axis in listed} if listed else set(range(rank))
    kept = 0
    for axis in range(rank) if x is not None else ():
        if axis in reduced:
            yield [(x, axis)]  # type: ignore[list-item]
            kept += node.attributes.get_int("keepdims", 1)
        else:
            yield [(x, axis), (result, kept)]  # type: ignore[list-item]
            kept += 1


def _gather(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    data, indices, result = node.inputs[0], node.inputs[1], node.outputs[0]
    if data is None or indices is None:
        return
    rank, width = _rank(shapes, data), _rank(shapes, indices)
    at = node.attributes.get_int("axis", 0) % max(rank, 1)
    for axis in range(rank):
        if axis != at:
            yield [(data, axis), (result, axis if axis < at else axis + width - 1)]
    yield from ([(indices, axis), (result, at + axis)] for axis in range(width))


def _beside(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    """All axes but the one that is split, sliced or concatenated."""
    changed = changed_axes(node, shapes)
    values = [value for value in (node.inputs if node.op_type == "Concat" else node.inputs[:1]) if value is not None]
    for axis in range(_rank(shapes, values[0])) if values and changed is not None else ():
        if axis not in changed:  # type: ignore[operator]
            yield [(value, axis) for value in (*values, *node.outputs)]


def changed_axes(node: ir.Node, shapes: Symbolic) -> list[int] | None:
    """The axes that a Concat, Split or Slice changes; None if that is not known."""
    rank = _rank(shapes, node.inputs[0])
    if node.op_type != "Slice":
        axis = node.attributes.get_int("axis", 0)
        return [axis % rank] if rank else None
    axes = node.attributes.get_ints("axes")
    if axes is None and len(node.inputs) > 3 and node.inputs[3] is not None:
        axes = shapes.constant(node.inputs[3])
    elif axes is None:
        starts = shapes.shape(node.inputs[1]) if len(node.inputs) > 1 else None
        axes = range(starts[0]) if starts and isinstance(starts[0], int) else None
    return None if axes is None or not rank else [axis % rank for axis in axes]


def _expand(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    yield from _from_right([node.inputs[0], node.outputs[0]], shapes)


def _pad(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    x, rank = node.inputs[0], _rank(shapes, node.inputs[0])
    pads = node.attributes.get_ints("pads") or (shapes.constant(node.inputs[1]) if len(node.inputs) > 1 else None)
    if x is None or pads is None or len(pads) != 2 * rank:
        return
    for axis in range(rank):
        if not pads[axis] and not pads[axis + rank]:
            yield [(x, axis), (node.outputs[0], axis)]


def _einsum(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    equation = node.attributes.get_string("equation", "").replace(" ", "")
    left, arrow, right = equation.partition("->")
    if not arrow or "." in equation:
        return
    groups: dict[str, list[Axis]] = {}
    for letters, value in (*zip(left.split(","), node.inputs, strict=False), (right, node.outputs[0])):
        for axis, letter in enumerate(letters if value is not None else ""):
            groups.setdefault(letter, []).append((value, axis))  # type: ignore[arg-type]
    yield from groups.values()


def _shape(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    yield from _each_alone(node.inputs[0], shapes)


def _made(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    yield from _each_alone(node.outputs[0], shapes)


def _scaled(node: ir.Node, shapes: Symbolic) -> Iterator[Group]:
    """Quantization: a scale for all, or for each element of one axis."""
    x, rank = node.inputs[0], _rank(shapes, node.inputs[0])
    at = node.attributes.get_int("axis", 1) % max(rank, 1)
    factors = [(value, 0) for value in node.inputs[1:] if value is not None and _rank(shapes, value) == 1]
    for axis in range(rank) if x is not None else ():
        yield [(x, axis), (node.outputs[0], axis), *(factors if axis == at else [])]  # type: ignore[list-item]


_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(_LIKE_FIRST, _like_first),
    **dict.fromkeys(_POOLS, _first_two),
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(("Conv", "ConvTranspose", "com.microsoft::FusedConv"), _convolution),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"), _layer_norm),
    **dict.fromkeys(("Concat", "Split", "Slice"), _beside),
    **dict.fromkeys(SIZES_ONLY, _shape),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _scaled),
    "PRelu": _elementwise,
    "com.microsoft::BiasGelu": _elementwise,
    "CastLike": _cast_like,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "BatchNormalization": _batch_norm,
    "InstanceNormalization": _batch_norm,
    "Transpose": _transpose,
    "Gather": _gather,
    "Expand": _expand,
    "Pad": _pad,
    "Einsum": _einsum,
    "ConstantOfShape": _made,
    "Constant": _made,
}
