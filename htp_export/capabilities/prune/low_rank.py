"""Matrices of linear layers as products of two smaller ones, from their largest singular values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.prune.cut_axes import ParameterShape, change_parameters
from htp_export.capabilities.prune.sparsities import Sparsity
from htp_export.editing.edit import Edit
from htp_export.editing.editing import add_initializer, remove_unused
from htp_export.format.recipes import step
from htp_export.model.recipes import recipe_of
from htp_export.model.tagged import TaggedModel
from htp_export.process.progress import counted
from htp_export.runtime.arrays import Array
from htp_export.shapes.operator_kinds import operator_of
from htp_export.weights.parameter_places import ParameterPlaces, WeightSources
from htp_export.weights.products import Product, Weight, readers_of
from htp_export.weights.storing import numbers_of

_PRODUCTS = ("MatMul", "Gemm")
_FLAGS = ("transA", "transB")


@dataclass(frozen=True)
class Factors:
    """The two matrices that replace a weight; the first is multiplied with the input."""

    rank: int
    values: tuple[ir.Value, ...]


def factors_of(matrix: Array, rank: int) -> tuple[Array, Array]:
    """The two matrices of a rank whose product is nearest to a matrix (Eckart and Young, 1936).

    The singular values are divided evenly between both, so that both can be quantized equally well.
    They have the shapes (m, rank) and (rank, n) for a matrix of the shape (m, n), and its type.

    Examples:
        >>> first, second = factors_of(np.outer([1.0, 2.0, 3.0], [4.0, 5.0]), 1)
        >>> first.shape, second.shape, (first @ second).round(6).tolist()
        ((3, 1), (1, 2), [[4.0, 5.0], [8.0, 10.0], [12.0, 15.0]])
    """
    left, singular, right = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    roots = np.sqrt(singular[:rank])
    first, second = left[:, :rank] * roots, roots[:, None] * right[:rank]
    return first.astype(matrix.dtype), second.astype(matrix.dtype)


def factorise(
    tagged: TaggedModel, values: Mapping[Weight, Sparsity]
) -> tuple[dict[Weight, Factors], dict[Weight, str]]:
    """Replace weights by products of two smaller matrices, in place.

    And why others are not replaced.

    Each product with such a weight becomes two, both with the tags that it had; a bias stays at the
    second one.
    """
    reasons: dict[Weight, str] = {}
    for weight, value in values.items():
        reason = why_not(tagged, weight, value)
        if reason:
            reasons[weight] = reason
    edit, places = Edit(tagged), ParameterPlaces(tagged, WeightSources(tagged))
    factors, parameters = {}, {}
    replaceable = [weight for weight in values if weight not in reasons]
    for weight in counted(replaceable, "weights"):
        shape, rank = weight.shape, _rank(weight.shape, values[weight])
        factors[weight] = _replace(edit, weight, rank)
        # the axis with the size of the rank differs between the two
        shapes: dict[str, ParameterShape] = {}
        for suffix, rank_axis in (("_a", weight.uses[0].channels), ("_b", weight.reduced)):
            sizes = list(shape)
            sizes[rank_axis] = rank
            shapes[suffix] = tuple(sizes)
        parameters[weight.value] = shape, shapes
    if factors:
        change_parameters(edit, places, parameters)
        remove_unused(tagged.model)
        edit.finish()
    return factors, reasons


def _rank(shape: ParameterShape, value: Sparsity) -> int:
    return value.kept or max(1, round(value.amount * min(shape)))


def why_not(tagged: TaggedModel, weight: Weight, value: Sparsity) -> str:
    """Why a weight cannot be replaced by a product of matrices of a rank; empty if it can."""
    if len(weight.shape) != 2 or any(operator_of(use.node) not in _PRODUCTS for use in weight.uses):
        listed = ", ".join(dict.fromkeys(use.node.op_type for use in weight.uses))
        return f"{listed} does not multiply with a matrix"
    products = {use.node for use in weight.uses}
    same = {(use.value, use.reduced) for use in weight.uses} == {(weight.value, weight.reduced)}
    if weight.copies or not same or not products.issuperset(readers_of(weight.value)):
        return "it is also read in other ways"
    rank = _rank(weight.shape, value)
    bits = sum(_dtype(tagged, use).bitwidth for use in _layouts(weight).values())
    size = bits // 8 * rank * sum(weight.shape)
    if size >= weight.tensor.nbytes:
        return f"rank {rank} of a matrix of {weight.shape[0]} by {weight.shape[1]} saves no bytes"
    return ""


def _is_transposed(use: Product) -> bool:
    """Whether a product has a factor of the layout (channels, summed), not (summed, channels)."""
    return bool(use.node.attributes.get_int(_FLAGS[use.place], 0)) == (use.place == 1)


def _layouts(weight: Weight) -> dict[bool, Product]:
    """A use for each layout in which products read a weight."""
    return {_is_transposed(use): use for use in reversed(weight.uses)}


def _dtype(tagged: TaggedModel, use: Product) -> ir.DataType:
    value = use.node.inputs[use.place]
    assert value is not None
    return tagged.inferred.dtype(value) or numbers_of(use.value).dtype


def _replace(edit: Edit, weight: Weight, rank: int) -> Factors:
    """Replace each product with a weight by two products."""
    matrix = np.moveaxis(weight.tensor.numpy(), (weight.reduced, weight.uses[0].channels), (0, 1))
    factors = factors_of(matrix, rank)
    written: dict[bool, list[ir.Value]] = {}
    for is_transposed, use in _layouts(weight).items():
        dtype = _dtype(edit.tagged, use)
        written[is_transposed] = []
        for factor, suffix in zip(factors, ("_a", "_b"), strict=True):
            array = (factor.T if is_transposed else factor).astype(dtype.numpy())
            initializer = add_initializer(
                edit.graph,
                ir.Tensor(np.ascontiguousarray(array), dtype=dtype),
                edit.names.tensors.unused(f"{weight.name}{suffix}"),
                step("computed", recipe_of(weight.value), "a factor of lower rank"),
            )
            written[is_transposed].append(initializer)
    for use in weight.uses:
        first, second = written[_is_transposed(use)]
        _split(edit, use, first, second, rank)
    return Factors(rank, tuple(value for pair in written.values() for value in pair))


def _split(edit: Edit, use: Product, first: ir.Value, second: ir.Value, rank: int) -> None:
    """Insert a product with the first factor before a product, which then has the second factor."""
    node, other = use.node, 1 - use.place
    flags = {name: flag for name in _FLAGS if (flag := node.attributes.get_int(name, 0))}
    inputs = [first, node.inputs[other]] if use.place == 0 else [node.inputs[other], first]
    name = edit.names.nodes.unused(f"{node.name}_a")
    before = ir.node(node.op_type, inputs, flags, name=name)
    edit.own_as(before, node)
    [result] = before.outputs
    result.name = edit.names.tensors.unused(f"{node.outputs[0].name}_a")
    result.type = node.outputs[0].type
    shape = node.outputs[0].shape
    if shape is not None:
        sizes = list(shape)
        sizes[-1 if use.place == 1 or len(sizes) == 1 else -2] = rank
        result.shape = ir.Shape(sizes)
    assert isinstance(node.graph, ir.Graph)
    node.graph.insert_before(node, before)
    node.replace_input_with(use.place, second)
    node.replace_input_with(other, result)
    node.attributes.pop(_FLAGS[other], None)
