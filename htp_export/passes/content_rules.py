"""What small tensors of integers and booleans hold, operator by operator.

Contents are arrays of objects: numbers, truth values, and sizes. Sizes are never negative, and so are divided as
numbers that are rounded down. A rule gives None where it cannot tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.passes.known import Contents, Known
from htp_export.passes.shape_rules import axes_of, normalized
from htp_export.passes.sizes import Dim, Size, divide, equal, product

__all__ = ["CONTENT_RULES", "constant_contents", "objects"]

_INTEGERS = frozenset((ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL))
_LARGEST = 64
"""Tensors of more elements than this are not looked into."""


def constant_contents(value: ir.Value) -> Contents | None:
    """What a small constant of integers or booleans holds."""
    tensor = value.const_value
    if tensor is None or value.is_graph_input() or tensor.dtype not in _INTEGERS or tensor.size > _LARGEST:
        return None
    return objects(tensor.numpy().tolist(), tensor.shape.numpy())


def objects(nested: Any, shape: Sequence[int] | None = None) -> Contents:
    """Nested lists as an array of objects."""
    array = np.array(nested, dtype=object)
    return array if shape is None else array.reshape(shape)


def _each(operation: Callable[..., Any]) -> Callable[[ir.Node, Known], Contents | None]:
    """The rule of an element-wise operator; an element for which the operation gives None makes all unknown."""
    vectorized = np.frompyfunc(operation, operation.__code__.co_argcount, 1)

    def rule(node: ir.Node, known: Known) -> Contents | None:
        inputs = [known.contents(value) for value in node.inputs]
        if any(item is None for item in inputs):
            return None
        result = np.asarray(vectorized(*inputs), dtype=object)
        return None if any(item is None for item in result.reshape(-1)) else result

    return rule


def _quotient(a: Dim, b: Dim) -> Dim | None:
    if isinstance(a, int) and isinstance(b, int):
        return int(a / b) if b else None  # integer division of ONNX cuts towards zero
    least = a.least if isinstance(a, Size) else a
    return divide(a, b) if b != 0 and least is not None and least >= 0 and (isinstance(b, Size) or b > 0) else None


def _less(a: Dim, b: Dim) -> bool | None:
    difference = b - a
    if isinstance(difference, int):
        return difference > 0
    if difference.least is not None and difference.least > 0:
        return True
    back = -difference
    return False if isinstance(back, Size) and back.least is not None and back.least >= 0 else None


def _inverted(truth: bool | None) -> bool | None:
    return None if truth is None else not truth


def _chosen(condition: bool, a: Any, b: Any) -> Any:
    return a if condition else b


def _larger(a: Dim, b: Dim) -> Dim | None:
    less = _less(a, b)
    return None if less is None else b if less else a


def _smaller(a: Dim, b: Dim) -> Dim | None:
    less = _less(a, b)
    return None if less is None else a if less else b


def _same(node: ir.Node, known: Known) -> Contents | None:
    return known.contents(node.inputs[0])


def _cast(node: ir.Node, known: Known) -> Contents | None:
    contents = known.contents(node.inputs[0])
    target = node.attributes["to"].as_int()
    if contents is None or target not in _INTEGERS:
        return None
    if target == ir.DataType.BOOL:
        truths = [item if isinstance(item, bool) else _inverted(equal(item, 0)) for item in contents.reshape(-1)]
        return None if None in truths else objects(truths, contents.shape)
    return objects([int(item) if isinstance(item, bool) else item for item in contents.reshape(-1)], contents.shape)


def _shape(node: ir.Node, known: Known) -> Contents | None:
    shape = known.shape(node.inputs[0])
    start, end = (node.attributes.get_int(key, default) for key, default in (("start", 0), ("end", None)))
    return None if shape is None else objects(list(shape[start:end]))


def _size(node: ir.Node, known: Known) -> Contents | None:
    shape = known.shape(node.inputs[0])
    return None if shape is None else objects(product(shape))


def _gather(node: ir.Node, known: Known) -> Contents | None:
    contents, places = known.contents(node.inputs[0]), known.contents(node.inputs[1])
    if contents is None or places is None:
        return None
    return np.asarray(np.take(contents, places.astype(np.int64), node.attributes.get_int("axis", 0)), dtype=object)


def _slice(node: ir.Node, known: Known) -> Contents | None:
    contents = known.contents(node.inputs[0])
    starts, ends = known.constant(node.inputs[1]), known.constant(node.inputs[2])
    axes, steps = axes_of(node, known, place=3), axes_of(node, known, "steps", place=4)
    if contents is None or starts is None or ends is None:
        return None
    if (axes is None and len(node.inputs) > 3) or (steps is None and len(node.inputs) > 4):
        return None
    index = [slice(None)] * contents.ndim
    for k, axis in enumerate(axes if axes is not None else range(len(starts))):
        step = steps[k] if steps else 1
        end = None if step < 0 and ends[k] < -contents.shape[axis] else ends[k]
        index[axis] = slice(starts[k], end, step)
    return contents[tuple(index)]


def _concat(node: ir.Node, known: Known) -> Contents | None:
    parts = [known.contents(value) for value in node.inputs]
    if any(part is None for part in parts):
        return None
    return np.concatenate([part for part in parts if part is not None], node.attributes["axis"].as_int())


def _reshaped(node: ir.Node, known: Known) -> Contents | None:
    contents = known.contents(node.inputs[0])
    shape = known.shape(node.outputs[0])
    if contents is None or shape is None or not all(isinstance(dim, int) for dim in shape):
        return None
    return contents.reshape([int(str(dim)) for dim in shape])


def _constant_of_shape(node: ir.Node, known: Known) -> Contents | None:
    shape = known.constant(node.inputs[0])
    fill = node.attributes["value"].as_tensor() if "value" in node.attributes else None
    if shape is None or fill is None or fill.dtype not in _INTEGERS or np.prod(shape) > _LARGEST:
        return None
    return np.full(shape, fill.numpy().reshape(-1)[0].item(), dtype=object)


def _expand(node: ir.Node, known: Known) -> Contents | None:
    contents, shape = known.contents(node.inputs[0]), known.constant(node.inputs[1])
    if contents is None or shape is None:
        return None
    shape = list(np.broadcast_shapes(contents.shape, tuple(shape)))
    return np.broadcast_to(contents, shape) if np.prod(shape) <= _LARGEST else None


def _range(node: ir.Node, known: Known) -> Contents | None:
    bounds = [known.constant(value) for value in node.inputs]
    if any(bound is None for bound in bounds):
        return None
    start, limit, step = (bound[0] for bound in bounds if bound is not None)
    return objects(list(range(start, limit, step))) if abs(limit - start) <= _LARGEST * abs(step) else None


def _reduce_prod(node: ir.Node, known: Known) -> Contents | None:
    contents = known.contents(node.inputs[0])
    axes = axes_of(node, known)
    if contents is None or contents.ndim != 1 or (axes is not None and [normalized(axis, 1) for axis in axes] != [0]):
        return None
    return objects(product(contents), [1] if node.attributes.get_int("keepdims", 1) else [])


def _transpose(node: ir.Node, known: Known) -> Contents | None:
    contents = known.contents(node.inputs[0])
    perm = node.attributes.get_ints("perm")
    return None if contents is None else np.transpose(contents, None if perm is None else list(perm))


CONTENT_RULES: dict[str, Callable[[ir.Node, Known], Contents | None]] = {
    "Add": _each(lambda a, b: a + b),
    "And": _each(lambda a, b: a and b),
    "Cast": _cast,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Div": _each(_quotient),
    "Equal": _each(equal),
    "Expand": _expand,
    "Gather": _gather,
    "Greater": _each(lambda a, b: _less(b, a)),
    "GreaterOrEqual": _each(lambda a, b: _inverted(_less(a, b))),
    "Identity": _same,
    "Less": _each(_less),
    "LessOrEqual": _each(lambda a, b: _inverted(_less(b, a))),
    "Max": _each(_larger),
    "Min": _each(_smaller),
    "Mul": _each(lambda a, b: a * b),
    "Neg": _each(lambda a: -a),
    "Not": _each(lambda a: not a),
    "Or": _each(lambda a, b: a or b),
    "Range": _range,
    "ReduceProd": _reduce_prod,
    "Reshape": _reshaped,
    "Shape": _shape,
    "Size": _size,
    "Slice": _slice,
    "Squeeze": _reshaped,
    "Sub": _each(lambda a, b: a - b),
    "Transpose": _transpose,
    "Unsqueeze": _reshaped,
    "Where": _each(_chosen),
}
