"""Operators that a model computes in single steps: softmax, GELU and normalizations.

Each is found by its computation, not by the order of its nodes: products and polynomials are
compared as such, so that `0.5 * x * (1 + t)` and `x * (t + 1) / 2` are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import onnx_ir as ir

from htp_export.capabilities.optimize.polynomials import (
    Polynomial,
    cone,
    is_close,
    number_of,
    polynomial,
)
from htp_export.editing.editing import is_boundary, is_constant
from htp_export.model.neighbours import only_consumer, producer_of, reached
from htp_export.shapes.known import Shape, axes_of, normalized
from htp_export.shapes.operator_kinds import RESHAPING, is_standard
from htp_export.shapes.symbolic import Symbolic

_Attributes: TypeAlias = Mapping[str, int | float | str]


@dataclass(frozen=True)
class Steps:
    """The nodes that together compute one operator.

    Attributes:
        kind: ``"softmax"``, ``"log_softmax"``, ``"gelu_erf"``, ``"gelu_tanh"``, ``"layer_norm"`` or
            ``"rms_norm"``.
        nodes: The nodes, the last of which computes the result.
        source: The tensor that the operator reads.
        operator: ONNX's operator.
        attributes: Its attributes.
        scale: The weight of a normalization; None without one.
        bias: The bias of a normalization; None without one.
        why: Why these steps are not the operator; empty if they are.
    """

    kind: str
    nodes: tuple[ir.Node, ...]
    source: ir.Value
    operator: str
    attributes: _Attributes = field(default_factory=dict)
    scale: ir.Value | None = None
    bias: ir.Value | None = None
    why: str = ""


VISITED = ("Div", "Erf", "Log", "Mul", "Sub", "Tanh")
"""Operators of the nodes at which steps are found."""


def steps_at(node: ir.Node, known: Symbolic) -> Steps | None:
    """The steps that a node belongs to; None if there are none.

    For a GELU, it is the node of the function; for others, the last node, without weights.

    Examples:
        >>> x = ir.val("x", ir.DataType.FLOAT, [2, 3])
        >>> largest = ir.node("ReduceMax", [x], {"axes": [1]})
        >>> less = ir.node("Sub", [x, *largest.outputs])
        >>> exp = ir.node("Exp", less.outputs)
        >>> total = ir.node("ReduceSum", exp.outputs, {"axes": [1]})
        >>> result = ir.node("Div", [*exp.outputs, *total.outputs])
        >>> nodes = [largest, less, exp, total, result]
        >>> graph = ir.Graph([x], result.outputs, nodes=nodes, opset_imports={"": 12})
        >>> found = steps_at(result, Symbolic(graph))
        >>> found.operator, found.source.name, [node.op_type for node in found.nodes]
        ('Softmax', 'x', ['ReduceMax', 'Sub', 'Exp', 'ReduceSum', 'Div'])
    """
    if is_standard(node, "Erf", "Tanh"):
        return _gelu(node, known)
    if is_standard(node, "Sub", "Log"):
        return _log_softmax(node, known)
    if is_standard(node, "Div", "Mul"):
        return _softmax(node, known) or _norm(node, known)
    return None


def held_by(steps: Steps) -> str:
    """Why a tensor between the steps cannot be removed; empty if all can."""
    inside = set(steps.nodes)
    for node in steps.nodes[:-1]:
        for value in node.outputs:
            if value.is_graph_output():
                return f"{value.name!r} between the steps is an output of the model"
            if any(use.node not in inside for use in value.uses()):
                return f"other nodes read {value.name!r} between the steps"
            if is_boundary(value):
                return f"{value.name!r} between the steps is an input or output of a module"
    return ""


class _Reduced(NamedTuple):
    """A reduction whose result broadcasts along the reduced axes."""

    source: ir.Value
    axes: tuple[int, ...]
    factor: float  # by which the result is multiplied


def _reduced(
    value: ir.Value | None, operator: str, known: Symbolic, function: str = ""
) -> _Reduced | None:
    """The reduction of a value, also behind reshapes that restore the rank, and factors.

    Without the restored rank, ``x / x.sum(1)`` of a square matrix divides each column by the sum of
    a row. ``function``: an operator of single elements that is applied to the result, once.
    """
    factor, current = 1.0, value
    for _ in range(4):
        node = producer_of(current)
        if node is None or is_standard(node, operator):
            break
        if is_standard(node, *RESHAPING):
            current = node.inputs[0]
            continue
        if function and is_standard(node, function):
            current, function = node.inputs[0], ""
            continue
        scaled = _scaled(node, known)
        if scaled is None:
            return None
        current, number = scaled
        factor *= number
    node = producer_of(current, operator)
    source = None if node is None else node.inputs[0]
    shape, reduced_shape = known.shape(source), known.shape(value)
    if node is None or source is None or shape is None or reduced_shape is None or function:
        return None
    axes = axes_of(node, known)
    if not axes:
        return None
    positive = {normalized(axis, len(shape)) for axis in axes}
    wanted = tuple(1 if axis in positive else size for axis, size in enumerate(shape))
    # a missing leading axis broadcasts, too
    if (1,) * (len(shape) - len(reduced_shape)) + reduced_shape != wanted:
        return None
    return _Reduced(source, tuple(sorted(positive)), factor)


def _scaled(node: ir.Node, known: Symbolic) -> tuple[ir.Value, float] | None:
    """The value that a ``Mul`` or ``Div`` multiplies by a number, and the number."""
    if not is_standard(node, "Mul", "Div"):
        return None
    for place in (1, 0) if node.op_type == "Mul" else (1,):
        number, value = number_of(node.inputs[place], known), node.inputs[1 - place]
        if value is not None and number:
            return value, number if node.op_type == "Mul" else 1 / number
    return None


def _nodes(last: ir.Node, leaves: Iterable[ir.Value | None]) -> tuple[ir.Node, ...]:
    """The nodes from some tensors to a node, the last one at the end."""
    stops = set(leaves)

    def producers(node: ir.Node) -> Iterator[ir.Node]:
        # further inputs of these are axes and shapes
        inputs = node.inputs[:1] if _has_one_tensor(node) else node.inputs
        for value in inputs:
            producer = producer_of(value)
            if producer is not None and value not in stops and producer.op_type != "Constant":
                yield producer

    found = [node for node in reached([last], producers) if node is not last]
    return (*reversed(found), last)


def _has_one_tensor(node: ir.Node) -> bool:
    return is_standard(node, *RESHAPING) or node.op_type.startswith("Reduce")


# --- softmax ---


def _softmax(node: ir.Node, known: Symbolic) -> Steps | None:
    """``exp(x) / sum(exp(x))``, with or without the largest element subtracted first."""
    for numerator, denominator in _quotients(node, known):
        exp = producer_of(numerator, "Exp")
        if exp is None or exp.inputs[0] is None:
            continue
        total, added = _less_number(denominator, known)
        reduced = _reduced(total, "ReduceSum", known)
        if reduced is None or reduced.source is not numerator:
            continue
        source = _unshifted(exp.inputs[0], reduced.axes, known)
        steps = _over_axis("softmax", "Softmax", node, source, reduced.axes, known)
        if added or reduced.factor != 1:
            return replace(steps, why="the sum is changed before the division")
        return steps
    return None


def _quotients(node: ir.Node, known: Symbolic) -> Iterator[tuple[ir.Value, ir.Value]]:
    """A dividend and its divisor, also of a product with a reciprocal."""
    first, second = node.inputs
    if first is None or second is None:
        return
    if node.op_type == "Div":
        yield first, second
        return
    for dividend, value in ((first, second), (second, first)):
        inverse = producer_of(value, "Reciprocal", "Div", "Pow")
        if inverse is None:
            continue
        divisor = inverse.inputs[-1] if inverse.op_type == "Div" else inverse.inputs[0]
        number = 1.0
        if inverse.op_type == "Div":
            number = number_of(inverse.inputs[0], known) or 0.0
        if inverse.op_type == "Pow":
            number = -(number_of(inverse.inputs[1], known) or 0.0)
        if number == 1 and divisor is not None:
            yield dividend, divisor


def _less_number(value: ir.Value, known: Symbolic) -> tuple[ir.Value, float]:
    """The tensor to which a number is added, and the number; 0 if none is."""
    node = producer_of(value, "Add")
    for place in (1, 0) if node is not None else ():
        assert node is not None
        number, other = number_of(node.inputs[place], known), node.inputs[1 - place]
        if number is not None and other is not None:
            return other, number
    return value, 0.0


def _unshifted(value: ir.Value, axes: Sequence[int], known: Symbolic) -> ir.Value:
    """The tensor from which the largest element along some axes was subtracted, or the value.

    A softmax does not change if one number is subtracted from all elements of a row, so that the
    maximum may be that of more axes.
    """
    node = producer_of(value, "Sub")
    if node is None or node.inputs[0] is None:
        return value
    largest = _reduced(node.inputs[1], "ReduceMax", known)
    if largest is None or largest.source is not node.inputs[0] or largest.factor != 1:
        return value
    return largest.source if set(axes) <= set(largest.axes) else value


def _over_axis(
    kind: str,
    operator: str,
    last: ir.Node,
    source: ir.Value,
    axes: Sequence[int],
    known: Symbolic,
) -> Steps:
    nodes = _nodes(last, [source])
    rank = known.rank(source) or 0
    # before opset 13, the operator joins all axes from this one on
    is_last = tuple(axes) == (rank - 1,)
    why = "" if len(axes) == 1 else f"{operator} has one axis, and these steps sum over {len(axes)}"
    attributes = {"axis": rank - 1 if is_last else axes[0]}
    return Steps(kind, nodes, source, operator, attributes, why=why)


def _log_softmax(node: ir.Node, known: Symbolic) -> Steps | None:
    """``x - log(sum(exp(x)))`` in each form, and the logarithm of a softmax."""
    if node.op_type == "Log":
        softmax = producer_of(node.inputs[0], "Softmax")
        source = None if softmax is None else softmax.inputs[0]
        rank = known.rank(source)
        # the default depends on the opset
        if softmax is None or source is None or rank is None or "axis" not in softmax.attributes:
            return None
        axis = normalized(softmax.attributes.get_int("axis", -1), rank)
        return _over_axis("log_softmax", "LogSoftmax", node, source, (axis,), known)
    value, taken = node.inputs
    if value is None or taken is None:
        return None
    found = _log_sum(taken, value, known)
    if found is None:
        return None
    source, axes = found
    return _over_axis("log_softmax", "LogSoftmax", node, source, axes, known)


def _log_sum(
    taken: ir.Value, value: ir.Value, known: Symbolic
) -> tuple[ir.Value, tuple[int, ...]] | None:
    """The source and axes of ``log(sum(exp(value)))``, which is subtracted from the value."""
    reduced = _reduced(taken, "ReduceLogSumExp", known)
    if reduced is not None and reduced.source is value and reduced.factor == 1:
        return _unshifted(value, reduced.axes, known), reduced.axes
    total = producer_of(taken, "Add")
    log_sum: ir.Value | None = taken
    # with the maximum added again: x - (m + log(sum(exp(x - m))))
    for place, largest in enumerate(total.inputs if total is not None else ()):
        maximum = _reduced(largest, "ReduceMax", known)
        if total is not None and maximum is not None and maximum.source is value:
            log_sum = total.inputs[1 - place]
    summed = _reduced(log_sum, "ReduceSum", known, function="Log")
    exp = producer_of(summed.source, "Exp") if summed is not None else None
    exponent = exp.inputs[0] if exp is not None else None
    if summed is None or exponent is None or summed.factor != 1:
        return None
    source = _unshifted(exponent, summed.axes, known)
    is_same = exponent is value if log_sum is taken else source is value
    return (source, summed.axes) if is_same else None


# --- GELU ---

_SQRT_2_PI = math.sqrt(2 / math.pi)
_INNER: Mapping[str, Polynomial] = {
    "Erf": {(1, 0): math.sqrt(0.5)},
    "Tanh": {(1, 0): _SQRT_2_PI, (3, 0): _SQRT_2_PI * 0.044715},
}
"""Function → its argument, as a polynomial of ``x``: exponents of ``x`` and of the function."""

_GELU: Polynomial = {(1, 0): 0.5, (1, 1): 0.5}
_LATER = 6
"""The longest path from the function to the result; the usual forms have two to four nodes."""


def _gelu(node: ir.Node, known: Symbolic) -> Steps | None:
    """``0.5 x (1 + erf(x / sqrt(2)))``, or by tanh, with products and sums in any order."""
    argument = node.inputs[0]
    if argument is None:
        return None
    kind = f"gelu_{node.op_type.lower()}"
    approximate = "tanh" if node.op_type == "Tanh" else "none"
    for source in cone(argument, known):
        inner = polynomial(argument, {source: (1, 0)}, known)
        if inner is None or not is_close(inner, _INNER[node.op_type]):
            continue
        variables = {source: (1, 0), node.outputs[0]: (0, 1)}
        for value in _behind(node.outputs[0]):
            outer = polynomial(value, variables, known)
            last = producer_of(value)
            if outer is None or last is None or not is_close(outer, _GELU):
                continue
            if known.shape(value) != known.shape(source):
                return None
            nodes = _nodes(last, [source])
            return Steps(kind, nodes, source, "Gelu", {"approximate": approximate})
    return None


def _behind(value: ir.Value) -> Iterator[ir.Value]:
    """The sums and products that depend on a value, the nearest first."""
    edge = [value]
    for _ in range(_LATER):
        following: dict[ir.Value, None] = {}
        for each in edge:
            for use in each.uses():
                if is_standard(use.node, "Add", "Sub", "Mul", "Div"):
                    following[use.node.outputs[0]] = None
        edge = list(following)
        yield from edge


# --- normalizations ---


class _Root(NamedTuple):
    """The square root of a variance, by which a normalization divides."""

    centred: ir.Value  # what is squared: x, or x without its mean
    axes: tuple[int, ...]
    epsilon: float
    why: str


def _norm(node: ir.Node, known: Symbolic) -> Steps | None:
    """``x / sqrt(mean(x²) + epsilon)``, with or without the mean subtracted, and its weights."""
    for value, sign in _factors(node.outputs[0], ()):
        root = _root(value, sign, known)
        if root is None:
            continue
        source = _uncentred(root.centred, root.axes, known)
        base = root.centred if source is None else source
        shape = known.shape(base)
        rest = _other_factors(node, value, base, root, known)
        if rest is None or len(rest) > 1 or shape is None:
            continue
        if rest and not _is_weight(rest[0], shape, root.axes, known):
            continue
        scale = rest[0] if rest else None
        return _with_weights(node, base, root, scale, is_centred=source is not None, known=known)
    return None


def _other_factors(
    node: ir.Node, inverse: ir.Value, source: ir.Value, root: _Root, known: Symbolic
) -> list[ir.Value] | None:
    """The factors of a normalization besides its source and the inverse root.

    None if the source is not a factor, or if anything else divides.
    """
    rest: list[ir.Value] = []
    sources = 0
    for factor, sign in _factors(node.outputs[0], (source, root.centred)):
        if factor is inverse:
            continue
        if sign < 0:
            return None
        if factor is root.centred or _is_centred(factor, source, root, known):
            sources += 1
        elif number_of(factor, known) != 1:  # as in 1 / root
            rest.append(factor)
    return rest if sources == 1 else None


def _factors(
    value: ir.Value, stops: Sequence[ir.Value], sign: int = 1, depth: int = 3
) -> Iterator[tuple[ir.Value, int]]:
    """The factors of a product, each with 1, or -1 if it is divided by."""
    node = producer_of(value, "Mul", "Div", "Reciprocal")
    if node is None or not depth or value in stops:
        yield value, sign
        return
    signs = {"Mul": (sign, sign), "Div": (sign, -sign), "Reciprocal": (-sign,)}[node.op_type]
    for operand, of_operand in zip(node.inputs, signs, strict=True):
        if operand is not None:
            yield from _factors(operand, stops, of_operand, depth - 1)


def _root(value: ir.Value, sign: int, known: Symbolic) -> _Root | None:
    """The variance of a factor that divides by its square root."""
    why = ""
    if sign < 0:
        inner, added = _less_number(value, known)
        if added:
            value, why = inner, "the epsilon is added after the square root"
    node = producer_of(value, "Sqrt", "Pow")
    if node is None:
        return None
    exponent = 0.5 if node.op_type == "Sqrt" else number_of(node.inputs[1], known)
    if exponent is None or exponent * sign != -0.5 or node.inputs[0] is None:
        return None
    mean, epsilon = _less_number(node.inputs[0], known)
    reduced = _reduced(mean, "ReduceMean", known)
    square = None if reduced is None else producer_of(reduced.source, "Mul", "Pow")
    centred = None if square is None else square.inputs[0]
    if reduced is None or square is None or centred is None or epsilon < 0:
        return None
    is_square = square.inputs[1] is centred
    if square.op_type == "Pow":
        is_square = number_of(square.inputs[1], known) == 2
    if not is_square:
        return None
    if reduced.factor != 1:
        why = (
            f"the mean of squares is multiplied by {reduced.factor:.6g}, as an unbiased variance is"
        )
    return _Root(centred, reduced.axes, epsilon, why)


def _uncentred(value: ir.Value, axes: Sequence[int], known: Symbolic) -> ir.Value | None:
    """The tensor from which its mean was subtracted; None for any other value."""
    node = producer_of(value, "Sub")
    mean = None if node is None else _reduced(node.inputs[1], "ReduceMean", known)
    if node is None or mean is None or mean.source is not node.inputs[0] or mean.factor != 1:
        return None
    return mean.source if mean.axes == tuple(axes) else None


def _is_centred(factor: ir.Value, source: ir.Value, root: _Root, known: Symbolic) -> bool:
    """Whether a factor is the source without its mean; exporters may compute that twice."""
    return root.centred is not source and _uncentred(factor, root.axes, known) is source


def _is_weight(value: ir.Value, shape: Shape, axes: Sequence[int], known: Symbolic) -> bool:
    """Whether a constant has a number for each normalized element."""
    wanted = tuple(shape[axis] for axis in axes)
    return is_constant(value) and known.shape(value) == wanted


def _with_weights(
    node: ir.Node,
    source: ir.Value,
    root: _Root,
    scale: ir.Value | None,
    *,
    is_centred: bool,
    known: Symbolic,
) -> Steps:
    """The steps of a normalization, with the weights after it."""
    shape = known.shape(source) or ()
    last, bias = node, None
    if scale is None:
        last, scale = _with_weight(last, "Mul", shape, root.axes, known)
    if is_centred:
        last, bias = _with_weight(last, "Add", shape, root.axes, known)
    first_axis, rank = root.axes[0], len(shape)
    why = root.why or _why_not_normalized(root.axes, shape, has_scale=scale is not None)
    return Steps(
        kind="layer_norm" if is_centred else "rms_norm",
        nodes=_nodes(last, [source, scale, bias]),
        source=source,
        operator="LayerNormalization" if is_centred else "RMSNormalization",
        attributes={"axis": first_axis - rank, "epsilon": root.epsilon},
        scale=scale,
        bias=bias,
        why=why,
    )


def _with_weight(
    node: ir.Node, operator: str, shape: Shape, axes: Sequence[int], known: Symbolic
) -> tuple[ir.Node, ir.Value | None]:
    """The node that applies a weight to the result of a node, and the weight; the node itself without one."""
    value = node.outputs[0]
    reader = None if is_boundary(value) else only_consumer(value, operator)
    if reader is None:
        return node, None
    (other,) = [each for each in reader.inputs if each is not value]
    if other is None or not _is_weight(other, shape, axes, known):
        return node, None
    return reader, other


def _why_not_normalized(axes: Sequence[int], shape: Shape, *, has_scale: bool) -> str:
    """Why no operator normalizes these axes; empty if one does."""
    if axes != tuple(range(axes[0], len(shape))):
        return "it normalizes other axes than the last ones"
    sizes = shape[axes[0] :]
    if not has_scale and not all(isinstance(size, int) for size in sizes):
        return "the size of the normalized axis is open"
    return ""
