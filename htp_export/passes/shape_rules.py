"""Shapes of what operators make, operator by operator; see https://onnx.ai/onnx/operators/.

A rule gives one shape for each output, or None where it cannot tell; a dimension that it cannot tell is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from htp_export.passes.known import Dims, Known, Rule, Shape
from htp_export.passes.sizes import Dim, Size, divide, product
from htp_export.passes.spatial_rules import SPATIAL_RULES

__all__ = ["ELEMENTWISE", "LIKE_FIRST", "REDUCE", "SHAPE_RULES", "axes_of", "broadcast", "normalized", "slice_length"]

LIKE_FIRST = """
Abs Acos Acosh Asin Asinh Atan Atanh BatchNormalization BitwiseNot Cast CastLike Ceil Celu Clip Cos Cosh CumSum
Dropout Elu Erf Exp Floor Gelu HardSigmoid HardSwish Hardmax Identity InstanceNormalization IsInf IsNaN
GroupNormalization LRN LayerNormalization LeakyRelu Log LogSoftmax LpNormalization MeanVarianceNormalization
Mish Neg Not PRelu QuantizeLinear DequantizeLinear RMSNormalization RandomNormalLike RandomUniformLike
Reciprocal Relu RotaryEmbedding Round ScatterElements ScatterND Selu Shrink Sigmoid Sign Sin Sinh Softmax
Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu Trilu
""".split()  # noqa: SIM905 - as a list of strings it would fill the screen
ELEMENTWISE = """
Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min
Mod Mul Or Pow Sub Sum Where Xor
""".split()  # noqa: SIM905 - as a list of strings it would fill the screen
REDUCE = """
ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum
ReduceSumSquare
""".split()  # noqa: SIM905 - as a list of strings it would fill the screen


def normalized(axis: int, rank: int) -> int:
    """An axis counted from the front."""
    return axis + rank if axis < 0 else axis


def axes_of(node: ir.Node, known: Known, name: str = "axes", place: int = 1) -> list[int] | None:
    """Axes as an attribute, or as an input of newer opsets; None where there are none or they are not constant."""
    if name in node.attributes:
        return list(node.attributes[name].as_ints())
    return known.constant(node.inputs[place]) if place < len(node.inputs) else None


def broadcast(shapes: Iterable[Shape]) -> Dims:
    """The shape of an element-wise operation."""
    result: list[Dim | None] = []
    for shape in shapes:
        result = [*[1] * (len(shape) - len(result)), *result]
        for k in range(1, len(shape) + 1):
            result[-k] = _joined(result[-k], shape[-k])
    return result


def _joined(one: Dim | None, other: Dim | None) -> Dim | None:
    if one == 1:
        return other
    if other == 1 or one == other:
        return one
    if one is None or other is None:
        given = other if one is None else one
        return given if isinstance(given, int) else None
    if isinstance(one, int):  # the other one is the same or 1
        return one
    return other if isinstance(other, int) else None


def slice_length(dim: Dim, start: Dim, end: Dim, step: int) -> Dim | None:
    """How many elements a slice of one axis takes; None where that depends on sizes that are not known."""
    if step == 1:
        first, last = _clamped(start, dim), _clamped(end, dim)
        if first is None or last is None:
            return None
        length = last - first
        return max(length, 0) if isinstance(length, int) else length if _natural(length) else None
    if all(isinstance(each, int) for each in (dim, start, end)):
        return len(range(dim)[slice(start, end, step)])  # type: ignore[arg-type]
    return None


def _natural(length: Size) -> bool:
    return length.least is not None and length.least >= 0


def _clamped(bound: Dim, dim: Dim) -> Dim | None:
    """A bound of a slice, counted from the front and not past the end."""
    if isinstance(bound, int):
        if bound >= 2**31 - 1:
            return dim
        if bound < 0:
            bound = dim + bound
            return bound if isinstance(bound, Size) else max(bound, 0)
    beyond = bound - dim
    if isinstance(beyond, int):
        return dim if beyond > 0 else bound
    if bound == 0:
        return bound
    least_left = (dim - bound).least if isinstance(dim - bound, Size) else None  # type: ignore[union-attr]
    return bound if least_left is not None and least_left >= 0 else None


def _like_first(node: ir.Node, known: Known) -> Sequence[Dims | None]:
    return [known.shape(node.inputs[0])]


def _broadcast(node: ir.Node, known: Known) -> Sequence[Dims | None] | None:
    shapes = [known.shape(value) for value in node.inputs]
    return None if None in shapes else [broadcast(shape for shape in shapes if shape is not None)]


def _matmul(node: ir.Node, known: Known) -> Sequence[Dims | None] | None:
    one, other = (known.shape(value) for value in node.inputs[:2])
    if one is None or other is None or not one or not other:
        return None
    left = one if len(one) > 1 else (1, *one)
    right = other if len(other) > 1 else (*other, 1)
    ends = [*([left[-2]] if len(one) > 1 else []), *([right[-1]] if len(other) > 1 else [])]
    return [[*broadcast([left[:-2], right[:-2]]), *ends]]


def _gemm(node: ir.Node, known: Known) -> Sequence[Dims | None] | None:
    one, other = known.shape(node.inputs[0]), known.shape(node.inputs[1])
    if one is None or other is None:
        return None
    rows = one[1 if node.attributes.get_int("transA", 0) else 0]
    return [[rows, other[0 if node.attributes.get_int("transB", 0) else 1]]]


def _attention(node: ir.Node, known: Known) -> Sequence[Dims | None] | None:
    """The first result; with heads apart, or side by side in three dimensions."""
    queries, values = known.shape(node.inputs[0]), known.shape(node.inputs[2])
    if queries is None or values is None or len(queries) != len(values):
        return None
    if len(queries) == 4:
        return [[*queries[:3], values[3]]]
    heads, groups = (node.attributes.get_int(f"{side}_num_heads", 0) for side in ("q", "kv"))
    return [[*queries[:2], divide(values[2], groups) * heads]] if len(queries) == 3 and groups else None


def _transpose(node: ir.Node, known: Known) -> Sequence[Dims | None] | None:
    shape = known.shape(node.inputs[0])
    if shape is None:
        return None
    return [[shape[axis] for axis in node.attributes.get_ints("perm") or reversed(range(len(shape)))]]


def _reshape(node: ir.Node, known: Known) -> Sequence[Dims | None] | None:
    shape, wanted = known.shape(node.inputs[0]), known.contents(node.inputs[1])
    if wanted is None:
        rank = known.shape(node.inputs[1])
        return [[None] * rank[0]] if rank is not None and isinstance(rank[0], int) else None
    keeps_zero = bool(node.attributes.get_int("allowzero", 0))
    result: list[Dim | None] = []
    for place, dim in enumerate(wanted.tolist()):
        if dim == 0 and not keeps_zero:
            result.append(shape[place] if shape is not None else None)
        else:
            result.append(dim)
    if -1 in result:
        rest = [dim for dim in result if dim != -1]
        whole = None if shape is None or None in rest else product(shape)
        inferred = None if whole is None else divide(whole, product(dim for dim in rest if dim is not None))
        result[result.index(-1)] = inferred
    return [result]


def _unsqueeze(node: ir.Node, known: Known) -> Sequence[Dims | None] | None:
    shape, axes = known.shape(node.inputs[0]), axes_of(node, known)
    if shape is None or axes is None:
        return None
    rank = len(shape) + len(axes)
    inserted, left = {normalized(axis, rank) for axis in axes}, iter(shape)
    return [[1 if place in inserted else next(left) for place in range(rank)]]


def _squeeze(node: ir.Node, known: Known) -> Sequence[Dims | None] | None:
    shape, axes = known.shape(node.inputs[0]), axes_of(node, known)
    if shape is None:
        return None
    if axes is None:
        if len(node.inputs) > 1 or any(not isinstance(dim, int) for dim in shape):
            return None
        axes = [place for place, dim in enumerate(shape) if dim == 1]
    gone = {normalized(axis, len(shape)) for axis in axes}
    return [[dim for place, dim in enumerate(shape) if place not in gone]]


def _flatten(node: ir.Node, known: Known) -> Sequence[Dims | None] | None:
    shape = known.shape(node.inputs[0])
    if shape is None:
        return None
    axis = normalized(node.attributes.get_int("axis", 1), len(shape))
    return [[product(shape[:axis]), product(shape[axis:])]]


def _concat(node: ir.Node, known: Known) -> Sequence[Dims | None] | None:
    shapes = [shape for value in node.inputs if (shape := known.shape(value)) is not None]
    if len(shapes) < len(node.inputs):
        return None
    axis = normalized(node.attributes["axis"].as_int(), len(shapes[0]))
    result: list[Dim | None] = [
        next((shape[k] for shape in shapes if isinstance(shape[k], int)), shapes[0][k]) for k in range(len(shapes[0]))
    ]
    total: Dim = 0
    for shape in shapes:
        total = shape[axis] + total
    result[axis] = total
    return [result]


def _split(node: ir.Node, known: Known) -> Sequence[Dims | None] | None:
    shape = known.shape(node.inputs[0])
    if shape is None:
        return None
    axis, count = normalized(node.attributes.get_int("axis", 0), len(shape)), len(node.outputs)
    sizes: Sequence[Dim | None] | None = axes_of(node, known, "split")
    if sizes is None:
        whole = shape[axis]
        sizes = [None] * count if len(node.inputs) > 1 or not isinstance(whole, int) or whole % count else None
        sizes = sizes or [divide(whole, count)] * count
    return [[*shape[:axis], size, *shape[axis + 1 :]] for size in sizes]


def _slice(node: ir.Node, known: Known) -> Sequence[Dims | None] | None:
    shape = known.shape(node.inputs[0])
    if shape is None or len(node.inputs) < 3:
        return None
    starts, ends = known.contents(node.inputs[1]), known.contents(node.inputs[2])
    axes = axes_of(node, known, place=3)
    steps = axes_of(node, known, "steps", place=4)
    if axes is None:
        if len(node.inputs) > 3 and node.inputs[3] is not None:
            return [[None] * len(shape)]
        axes = list(range(len(shape)))
    result: list[Dim | None] = list(shape)
    for k, axis in enumerate(axes):
        place = normalized(axis, len(shape))
        if starts is None or ends is None or (steps is None and len(node.inputs) > 4):
            result[place] = None
        else:
            result[place] = slice_length(shape[place], starts[k], ends[k], steps[k] if steps else 1)
    return [result]


def _gather(node: ir.Node, known: Known) -> Sequence[Dims | None] | None:
    data, indices = (known.shape(value) for value in node.inputs)
    if data is None or indices is None:
        return None
    axis = normalized(node.attributes.get_int("axis", 0), len(data))
    return [[*data[:axis], *indices, *data[axis + 1 :]]]


def _gather_nd(node: ir.Node, known: Known) -> Sequence[Dims | None] | None:
    data, indices = (known.shape(value) for value in node.inputs)
    if data is None or indices is None or not isinstance(indices[-1], int):
        return None
    return [[*indices[:-1], *data[node.attributes.get_int("batch_dims", 0) + indices[-1] :]]]


def _expand(node: ir.Node, known: Known) -> Sequence[Dims | None] | None:
    shape, wanted = known.shape(node.inputs[0]), known.contents(node.inputs[1])
    return None if shape is None or wanted is None else [broadcast([shape, tuple(wanted.tolist())])]


def _reduce(node: ir.Node, known: Known) -> Sequence[Dims | None] | None:
    shape, axes = known.shape(node.inputs[0]), axes_of(node, known)
    if shape is None or (axes is None and len(node.inputs) > 1 and node.inputs[1] is not None):
        return None
    if not axes:
        if node.attributes.get_int("noop_with_empty_axes", 0):
            return [shape]
        axes = list(range(len(shape)))
    keep, gone = node.attributes.get_int("keepdims", 1), {normalized(axis, len(shape)) for axis in axes}
    return [[1 if place in gone else dim for place, dim in enumerate(shape) if keep or place not in gone]]


def _arg(node: ir.Node, known: Known) -> Sequence[Dims | None] | None:
    shape = known.shape(node.inputs[0])
    if shape is None:
        return None
    axis, keep = normalized(node.attributes.get_int("axis", 0), len(shape)), node.attributes.get_int("keepdims", 1)
    return [[1 if place == axis else dim for place, dim in enumerate(shape) if keep or place != axis]]


def _shape(node: ir.Node, known: Known) -> Sequence[Dims | None] | None:
    contents = known.shape(node.inputs[0])
    start, end = (node.attributes.get_int(key, default) for key, default in (("start", 0), ("end", None)))
    return None if contents is None else [[len(contents[start:end])]]


def _constant_of_shape(node: ir.Node, known: Known) -> Sequence[Dims | None] | None:
    contents = known.contents(node.inputs[0])
    if contents is not None:
        return [contents.tolist()]
    rank = known.shape(node.inputs[0])
    return [[None] * rank[0]] if rank is not None and isinstance(rank[0], int) else None


def _range(node: ir.Node, known: Known) -> Sequence[Dims | None]:
    bounds = [known.contents(value) for value in node.inputs]
    if any(bound is None for bound in bounds):
        return [[None]]
    start, limit, step = (bound.reshape(-1)[0] for bound in bounds if bound is not None)
    length = limit - start
    if step != 1 or (isinstance(length, Size) and (length.least is None or length.least < 0)):
        known_numbers = all(isinstance(bound, int) for bound in (start, limit, step))
        return [[len(range(start, limit, step)) if known_numbers else None]]
    return [[max(length, 0) if isinstance(length, int) else length]]


def _tile(node: ir.Node, known: Known) -> Sequence[Dims | None] | None:
    shape, repeats = known.shape(node.inputs[0]), known.contents(node.inputs[1])
    return None if shape is None or repeats is None else [[a * b for a, b in zip(shape, repeats, strict=True)]]


def _like_indices(node: ir.Node, known: Known) -> Sequence[Dims | None]:
    return [known.shape(node.inputs[1])]


SHAPE_RULES: dict[str, Rule] = {
    **dict.fromkeys(LIKE_FIRST, _like_first),
    **dict.fromkeys(ELEMENTWISE, _broadcast),
    **dict.fromkeys(REDUCE, _reduce),
    **dict.fromkeys(("ArgMax", "ArgMin"), _arg),
    **SPATIAL_RULES,
    "Attention": _attention,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": _like_indices,
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Range": _range,
    "Reshape": _reshape,
    "Shape": _shape,
    "Size": lambda _node, _known: [[]],
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
