"""The recipe of a tensor that an operator computes from tensors with recipes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.format.recipes import CONSTANT, MOST_OPERANDS, Recipe, recipe_to_text, step
from htp_export.shapes.operator_kinds import RESHAPING, SIZES_ONLY

ARITHMETIC = {"Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "Neg": "neg", "Sqrt": "sqrt"}
"""Operators whose rounding IEEE 754 defines, so that every runtime computes the same bits."""

_ARRANGING = RESHAPING | {"Expand", "Tile", "Gather", "GatherND", "Slice", "Split"}
"""Operators whose inputs after the first one are positions, axes or sizes."""


def merged(recipes: Iterable[Recipe]) -> Recipe:
    """The recipe of a tensor that replaces several equal ones."""
    # by their texts: many tensors may be equal, and lists cannot be hashed
    different: dict[str, Recipe] = {}
    for recipe in recipes:
        different.setdefault(recipe_to_text(recipe), recipe)
    if len(different) == 1:
        return next(iter(different.values()))
    return step("equal", *different.values())


def folded(
    op_type: str,
    attributes: Mapping[str, Any],
    operands: Sequence[Recipe],
    constant: Callable[[int], Any],
    sizes: Callable[[], Sequence[int] | None],
    output: int = 0,
) -> Recipe:
    """The recipe of an output of an operator on constants.

    Args:
        op_type: The operator, with its domain if that is not ONNX's.
        attributes: The values of its attributes.
        operands: The recipes of its inputs.
        constant: Returns the elements of a small input by its position, or None.
        sizes: Returns the shape of the output, or None.
        output: The position of the output.
    """
    if op_type in SIZES_ONLY:
        return CONSTANT
    if op_type == "Identity":
        return operands[0]
    if op_type == "Transpose":
        return step("transpose", operands[0], [int(axis) for axis in attributes.get("perm") or ()])
    if op_type == "Cast":
        return step("cast", operands[0], ir.DataType(int(attributes["to"])).name.lower())
    if op_type == "Concat":
        return step("concat", *operands, int(attributes["axis"]))
    recipe = None
    if op_type in _ARRANGING and any(operand != CONSTANT for operand in operands[1:]):
        # its positions, axes or sizes depend on entries, too
        recipe = _looked_up(op_type, attributes, *operands[:2])
    elif op_type in RESHAPING or op_type in ("Squeeze", "Unsqueeze", "Expand"):
        recipe = _reshaped(op_type, operands[0], constant, sizes)
    elif op_type in ("Gather", "GatherND", "Slice", "Split"):
        recipe = _selected(op_type, attributes, operands[0], constant, sizes, output)
    elif op_type == "Tile":
        recipe = _tiled(operands[0], constant(1))
    elif op_type in ARITHMETIC:
        recipe = _arithmetic(op_type, operands, constant)
    if recipe is not None:
        return recipe
    if all(operand == CONSTANT for operand in operands):
        return CONSTANT
    return step("computed", *operands, op_type)


def _reshaped(
    op_type: str,
    operand: Recipe,
    constant: Callable[[int], Any],
    sizes: Callable[[], Sequence[int] | None],
) -> Recipe | None:
    """The recipe of an operator that changes only the shape; None if its arguments are unknown."""
    axes = constant(1) if op_type in ("Squeeze", "Unsqueeze") else None
    if axes is not None:
        return step(op_type.lower(), operand, [int(axis) for axis in axes.reshape(-1)])
    shape = sizes()
    if shape is None:
        return None
    name = "expand" if op_type == "Expand" else "reshape"
    return step(name, operand, [int(size) for size in shape])


def _selected(
    op_type: str,
    attributes: Mapping[str, Any],
    operand: Recipe,
    constant: Callable[[int], Any],
    sizes: Callable[[], Sequence[int] | None],
    output: int,
) -> Recipe | None:
    """The recipe of an operator that selects elements; None if its arguments are unknown."""
    if op_type == "Slice":
        cuts = _cuts(attributes, constant)
        if cuts is None:
            return None
        for cut in cuts:
            operand = step("slice", operand, cut)
        return operand
    positions = constant(1)
    if positions is None:
        return None
    if op_type == "GatherND":
        if attributes.get("batch_dims", 0) or positions.shape[-1:] != (1,):
            return None
        return _gathered(operand, 0, positions[..., 0], sizes())
    axis = int(attributes.get("axis", 0))
    if op_type == "Split":
        start = int(positions[:output].sum())
        return step("slice", operand, [axis, start, start + int(positions[output]), 1])
    return _gathered(operand, axis, positions, sizes())


def _looked_up(
    op_type: str, attributes: Mapping[str, Any], table: Recipe, rows: Recipe
) -> Recipe | None:
    """The recipe of the rows of a table that another tensor selects; None for other operators."""
    if op_type == "Gather":
        return step("gather", table, rows, int(attributes.get("axis", 0)))
    is_gather = op_type == "GatherND" and not attributes.get("batch_dims", 0)
    # torch's dynamo exporter adds the last axis, of one element
    match rows if is_gather else None:
        case ["unsqueeze", positions, [-1]] | ["concat", ["unsqueeze", positions, [-1]], -1]:
            return step("gather", table, positions, 0)
    return None


def _tiled(operand: Recipe, repeats: Any) -> Recipe | None:
    """The recipe of a tensor that is repeated along its axes; None if the numbers are unknown or large."""
    if repeats is None or repeats.ndim != 1:
        return None
    for axis, times in enumerate(repeats.tolist()):
        if not 1 <= times <= MOST_OPERANDS:
            return None
        if times > 1:
            operand = step("concat", *[operand] * times, axis)
    return operand


def _arithmetic(op_type: str, operands: Sequence[Recipe], constant: Callable[[int], Any]) -> Recipe:
    """The recipe of an arithmetic operator; constant operands are numbers if these are known."""
    known: list[Recipe] = []
    for place, operand in enumerate(operands):
        array = constant(place) if operand == CONSTANT else None
        known.append(operand if array is None else _number(array))
    return step(ARITHMETIC[op_type], *known)


def _gathered(operand: Recipe, axis: int, rows: Any, shape: Sequence[int] | None) -> Recipe:
    """The recipe of a ``Gather``: a slice of adjacent rows, one row that is repeated, or any rows."""
    first = int(rows.reshape(-1)[0]) if rows.size else -1
    if shape is not None and first >= 0:  # negative rows are counted from the end
        end = first + rows.size
        if (rows.reshape(-1) == np.arange(first, end)).all():
            return step("reshape", step("slice", operand, [axis, first, end, 1]), list(shape))
        if axis == 0 and (rows == first).all():
            return step("expand", step("slice", operand, [0, first, first + 1, 1]), list(shape))
    return step("take", operand, [axis, rows.tolist()])


def _number(array: Any) -> Recipe:
    """A constant operand: the number itself if it is a finite float scalar."""
    if array.ndim == 0 and array.dtype.kind == "f" and np.isfinite(array):
        return float(array)
    return CONSTANT


def _cuts(attributes: Mapping[str, Any], constant: Callable[[int], Any]) -> list[list[int]] | None:
    """The axis, start, end and step of each axis that a ``Slice`` cuts; None if they are unknown."""
    starts, ends, axes, steps = [constant(place) for place in (1, 2, 3, 4)]
    if starts is None:  # before opset 10, they are attributes
        starts, ends, axes = (attributes.get(name) for name in ("starts", "ends", "axes"))
        steps = None
    if starts is None or ends is None:
        return None
    axes = range(len(starts)) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    cuts = [list(map(int, cut)) for cut in zip(axes, starts, ends, steps, strict=True)]
    return cuts if all(cut[3] > 0 for cut in cuts) else None


def batchnorm_folded(
    weight: Recipe,
    bias: Recipe | None,
    norm: Sequence[Recipe],
    epsilon: float,
    column: Sequence[int],
    root: str = "sqrt",
) -> tuple[Recipe, Recipe]:
    """The recipes of weight and bias of a layer after a batch normalization was folded into it.

    Args:
        weight: The recipe of the layer's weight.
        bias: The recipe of its bias, if it has one.
        norm: The recipes of the normalization's scale, bias, mean and variance.
        epsilon: The normalization's epsilon.
        column: The shape of the factors for the weight.
        root: The step for the square root: PyTorch does not round it as IEEE 754 requires.
    """
    gamma, beta, mean, variance = norm
    scale = step("div", gamma, step(root, step("add", variance, float(np.float32(epsilon)))))
    before = step("neg", mean) if bias is None else step("sub", bias, mean)
    return (
        step("mul", weight, step("reshape", scale, list(column))),
        step("add", step("mul", before, scale), beta),
    )
