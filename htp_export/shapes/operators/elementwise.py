"""Elementwise operators: the output has the shape of the first input, or the broadcast shape.

Contents are numbers, booleans and sizes. Sizes are never negative, so that integer division rounds
them down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.shapes.known import (
    WHOLE,
    Contents,
    Dims,
    Known,
    Operation,
    Shape,
    objects,
    shape_of,
)
from htp_export.shapes.operators import ContentRule, content_rule, shape_rule, type_rule
from htp_export.shapes.sizes import Dim, Size, divide, equal, is_natural, is_smaller_of

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


def broadcast(shapes: Iterable[Shape]) -> Dims:
    """The broadcast shape of the inputs of an elementwise operation."""
    result: list[Dim | None] = []
    for shape in shapes:
        result = [*[1] * (len(shape) - len(result)), *result]
        for k in range(1, len(shape) + 1):
            result[-k] = _joined(result[-k], shape[-k])
    return result


def _joined(first: Dim | None, second: Dim | None) -> Dim | None:
    """The broadcast of two dimensions; None if it depends on unknown sizes."""
    if first == 1:
        return second
    if second == 1 or first == second:
        return first
    if first is None or second is None:
        known = second if first is None else first
        return known if isinstance(known, int) else None
    # The node runs only where the limit is not reached.
    if is_smaller_of(first, second):
        return second
    if is_smaller_of(second, first):
        return first
    if isinstance(first, int):  # the other dimension is equal to it, or 1
        return first
    return second if isinstance(second, int) else None


@shape_rule(*LIKE_FIRST)
def like_first(node: Operation, known: Known) -> Sequence[Dims | None]:
    """The shape rule of operators whose output has the shape of the first input."""
    return [known.shape(node.inputs[0])]


@shape_rule(*ELEMENTWISE)
def _broadcast(node: Operation, known: Known) -> Sequence[Dims | None]:
    return [broadcast([shape_of(node, known, place) for place in range(len(node.inputs))])]


@type_rule("Cast")
def _cast_type(node: Operation, known: Known) -> ir.DataType:
    return ir.DataType(node.attributes["to"].as_int())


def _each(operation: Callable[..., Any]) -> ContentRule:
    """The content rule of an elementwise operator; it fails if the operation returns None once."""
    vectorized = np.frompyfunc(operation, operation.__code__.co_argcount, 1)

    def rule(node: Operation, known: Known) -> Contents | None:
        inputs = [known.contents(value) for value in node.inputs]
        if any(item is None for item in inputs):
            return None
        result = np.asarray(vectorized(*inputs), dtype=object)
        if any(item is None for item in result.reshape(-1)):
            return None
        return result

    return rule


def _quotient(a: Dim, b: Dim) -> Dim | None:
    """The integer quotient; None if it depends on unknown sizes, and for division by 0."""
    if b == 0:
        return None
    if isinstance(a, int) and isinstance(b, int):
        quotient = abs(a) // abs(b)
        # ONNX rounds towards zero.
        return quotient if (a < 0) == (b < 0) else -quotient
    if is_natural(a) and (isinstance(b, Size) or b > 0):
        return divide(a, b)
    return None


def _less(a: Dim, b: Dim) -> bool | None:
    if is_natural(b - a - 1):
        return True
    return False if is_natural(a - b) else None


def _inverted(truth: bool | None) -> bool | None:
    return None if truth is None else not truth


def _chosen(condition: bool | None, a: Any, b: Any) -> Any:
    if condition is None:
        return None
    return a if condition else b


@content_rule("Identity")
def _same(node: Operation, known: Known) -> Contents | None:
    return known.contents(node.inputs[0])


def _truth(item: Any) -> bool | None:
    """Whether an element is not 0; None if it is not known."""
    return item if isinstance(item, bool) else _inverted(equal(item, 0))


@content_rule("Cast")
def _cast_contents(node: Operation, known: Known) -> Contents | None:
    contents = known.contents(node.inputs[0])
    target = node.attributes["to"].as_int()
    if contents is None or target not in WHOLE:
        return None
    flat = contents.reshape(-1)
    if target == ir.DataType.BOOL:
        truths = [_truth(item) for item in flat]
        if None in truths:
            return None
        return objects(truths, contents.shape)
    numbers = [int(item) if isinstance(item, bool) else item for item in flat]
    return objects(numbers, contents.shape)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "Add": lambda a, b: a + b,
    "And": lambda a, b: a and b,
    "Div": _quotient,
    "Equal": equal,
    "Greater": lambda a, b: _less(b, a),
    "GreaterOrEqual": lambda a, b: _inverted(_less(a, b)),
    "Less": _less,
    "LessOrEqual": lambda a, b: _inverted(_less(b, a)),
    "Max": lambda a, b: _chosen(_less(a, b), b, a),
    "Min": lambda a, b: _chosen(_less(a, b), a, b),
    "Mul": lambda a, b: a * b,
    "Neg": lambda a: -a,
    "Not": lambda a: not a,
    "Or": lambda a, b: a or b,
    "Sub": lambda a, b: a - b,
    "Where": _chosen,
}
for _op, _operation in _OPERATIONS.items():
    content_rule(_op)(_each(_operation))
