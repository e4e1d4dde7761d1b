"""The numbers that stored weights stand for, whatever their format, and how those of another tool's file were made."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from htp_export.errors import FileError, InputError
from htp_export.format import tags
from htp_export.format.recipes import (
    CONSTANT,
    Recipe,
    is_exact,
    parameters_in,
    recipe_to_text,
    step,
)
from htp_export.model.hashes import array_hash, is_filled, same_numbers
from htp_export.model.module_facts import stored_tensor
from htp_export.model.recipes import (
    known_beginning,
    merged,
    recipe_of,
    recipes_of_computed,
    recorded,
)
from htp_export.runtime.arrays import Array
from htp_export.shapes.operator_kinds import is_standard
from htp_export.weights.rebuilding import remade

_SMALLEST = 4  # elements; smaller ones are constants of the graph
_BLOCKS = {"MatMulNBits": (1, 2, 3), "GatherBlockQuantized": (0, 2, 3)}
"""Operators of ONNX Runtime that read weights in blocks of some bits: the places of levels, scales and zero points."""


@dataclass(frozen=True)
class WeightNumbers:
    """A weight of a file."""

    # an initializer and, if a node only dequantizes it, the output of that
    values: Sequence[ir.Value]
    load: Callable[[], Array]  # reads its numbers
    plain: bool = False  # whether they are the numbers of the initializer, which are floats


def weight_numbers(graph: ir.Graph) -> Iterator[WeightNumbers]:
    """The weights of a graph: floats, integers of at most eight bits, and what is quantized block by block."""
    taken = set[ir.Value]()
    for node in graph:
        found = _quantized(node)
        if found is not None:
            taken.add(found.values[0])
            yield found
    for value in graph.initializers.values():
        tensor = value.const_value
        if (
            value not in taken
            and tensor is not None
            and tensor.size >= _SMALLEST
            and holds_numbers(tensor.dtype)
        ):
            yield WeightNumbers(
                [value], functools.partial(_plain, tensor), tensor.dtype.is_floating_point()
            )


def holds_numbers(dtype: ir.DataType) -> bool:
    """Whether tensors of a type hold the numbers of weights; longer integers are positions and sizes."""
    return dtype.is_floating_point() or (dtype.is_integer() and dtype.bitwidth <= 8)


def _plain(tensor: ir.TensorProtocol) -> Array:
    array = np.asarray(tensor.numpy())
    # types that numpy does not have
    return array if array.dtype.kind in "fiu" else array.astype(np.float32)


def _quantized(node: ir.Node) -> WeightNumbers | None:
    """The weight that a node dequantizes."""
    places = _BLOCKS.get(node.op_type) if node.domain == "com.microsoft" else None
    if places is None and not is_standard(node, "DequantizeLinear"):
        return None
    inputs = [node.inputs[k] if k < len(node.inputs) else None for k in places or (0, 1, 2)]
    levels, scales, zeros = (None if value is None else value.const_value for value in inputs)
    if inputs[0] is None or levels is None or scales is None or levels.size < _SMALLEST:
        return None
    number = node.attributes.get_int
    if places is None:
        axis, block = number("axis", 1), number("block_size", 0)
        return WeightNumbers(
            [inputs[0], *node.outputs], lambda: _of_axis(levels, scales, zeros, axis, block)
        )
    rows, bits, block = levels.shape.numpy()[0], number("bits", 4), number("block_size", 0)
    columns = number("K", 0)
    if bits not in (2, 4, 8) or block < 1 or scales.size * block < rows * columns:
        return None
    return WeightNumbers(
        [inputs[0]], lambda: _of_packed_blocks(levels, scales, zeros, bits, block, columns or None)
    )


def _of_axis(
    levels: ir.TensorProtocol,
    scales: ir.TensorProtocol,
    zeros: ir.TensorProtocol | None,
    axis: int,
    block: int,
) -> Array:
    """The weight of a ``DequantizeLinear``: scales for the whole, along one axis, or in blocks of it."""
    numbers, factors = levels.numpy().astype(np.float32), scales.numpy().astype(np.float32)
    middle = np.zeros_like(factors) if zeros is None else zeros.numpy().astype(np.float32)
    if factors.ndim == 1 and factors.size > 1:
        along = [-1 if k == axis % numbers.ndim else 1 for k in range(numbers.ndim)]
        return np.asarray((numbers - middle.reshape(along)) * factors.reshape(along))
    return _scaled(numbers, factors, middle, axis, block)


def _of_packed_blocks(
    levels: ir.TensorProtocol,
    scales: ir.TensorProtocol,
    zeros: ir.TensorProtocol | None,
    bits: int,
    block: int,
    columns: int | None,
) -> Array:
    """A weight of ONNX Runtime's operators: rows of blocks, each with a scale and a zero point; the end is filled up.

    Bytes hold several levels, and several zero points; without these, packed levels are around half
    of their range.
    """
    rows = levels.shape.numpy()[0]
    numbers = _unpacked(levels, bits, rows)[:, :columns]
    factors = scales.numpy().astype(np.float32).reshape(rows, -1)
    if zeros is not None:
        middle = _unpacked(zeros, bits, rows)[:, : factors.shape[1]]
    else:
        middle = np.full_like(factors, 1 << (bits - 1) if levels.dtype == ir.DataType.UINT8 else 0)
    return _scaled(numbers, factors, middle, 1, block)


def _scaled(numbers: Array, factors: Array, middle: Array, axis: int, block: int) -> Array:
    """Levels as numbers; with a ``block``, each scale and zero point is for so many of them along an axis."""
    if block:
        places = np.arange(numbers.shape[axis]) // block
        factors, middle = np.take(factors, places, axis=axis), np.take(middle, places, axis=axis)
    return np.asarray((numbers - middle) * factors)


def _unpacked(tensor: ir.TensorProtocol, bits: int, rows: int) -> Array:
    """Rows of numbers, of which bytes hold several, the lowest bits first."""
    packed = tensor.numpy().reshape(rows, -1)
    if packed.dtype != np.uint8:
        return packed.astype(np.float32)
    parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(rows, -1).astype(np.float32)


_BY_A_TOOL = "another tool"


def carry_recipes(before: ir.Model | None, after: ir.Model) -> None:
    """Say of each weight of a tool's result how it was made; contents are compared, because tools keep names."""
    originals = _Originals(before)
    for graph in after.graphs():
        for name, value in graph.initializers.items():
            tensor = value.const_value
            if (
                tensor is None
                or not originals.may_be_weight(name, tensor)
                or originals.is_said_anew(name, tensor)
            ):
                continue
            recipe = originals.recipe(name, tensor)
            if recipe != name or tags.RECIPE in tensor.metadata_props:
                value.const_value = recorded(tensor, recipe)


class _Originals:
    """The weights of the first file, by their names and by their numbers."""

    def __init__(self, model: ir.Model | None) -> None:
        graphs = () if model is None else (model.graph, *model.graph.subgraphs())
        values = (value for graph in graphs for value in graph.initializers.values())
        constants = (
            node.outputs[0] for graph in graphs for node in graph if is_standard(node, "Constant")
        )
        stored = ((value, stored_tensor(value)) for value in (*values, *constants))
        self._hashed: dict[
            tuple[ir.DataType, int], dict[bytes, list[tuple[tuple[int, ...], Recipe]]]
        ] = {}
        self._named = {
            str(value.name): (tensor, recipe_of(value))
            for value, tensor in stored
            if tensor is not None and holds_numbers(tensor.dtype)
        }
        self._entries = {
            recipe: tensor for tensor, recipe in self._named.values() if isinstance(recipe, str)
        }
        self._computed: dict[str, Recipe] = {}
        for graph in graphs:
            self._computed |= recipes_of_computed(graph)

    def may_be_weight(self, name: str, tensor: ir.TensorProtocol) -> bool:
        """Whether a tensor holds numbers; integers of 32 bits are a quantized bias, or positions and sizes."""
        return holds_numbers(tensor.dtype) or (
            tensor.dtype == ir.DataType.INT32 and bool(self._named_alike(name))
        )

    def is_said_anew(self, name: str, tensor: ir.TensorProtocol) -> bool:
        """Whether a tensor has a recipe that it did not have before, so that who made it has written it."""
        original = self._named.get(name)
        was = {} if original is None else original[0].metadata_props
        said = tensor.metadata_props.get(tags.RECIPE)
        return said == recipe_to_text(CONSTANT) or said not in (None, was.get(tags.RECIPE))

    def recipe(self, name: str, tensor: ir.TensorProtocol) -> Recipe:
        """How a tensor of the second file was made; one that kept its name and numbers is not looked up among all."""
        original = self._named.get(name)
        computed = self._computed.get(name)
        if computed == CONSTANT:
            return CONSTANT
        named = self._named_alike(name) or ([] if computed is None else [computed])
        vague = step("computed", *named, _BY_A_TOOL)
        with contextlib.suppress(FileError, OSError):  # the data file of one of them is gone
            if original is not None and same_numbers(original[0], tensor):
                is_cast = original[0].dtype != tensor.dtype
                return (
                    step("cast", original[1], tensor.dtype.name.lower()) if is_cast else original[1]
                )
        try:
            # zeros and ones of one origin are those of any other
            if tensor.size > 1 and is_filled(tensor):
                return vague
            return self._elsewhere(tensor) or self._as_computed(computed, tensor) or vague
        except (FileError, OSError):
            return ["computed", _BY_A_TOOL]

    def _as_computed(self, recipe: Recipe | None, tensor: ir.TensorProtocol) -> Recipe | None:
        """The recipe of a tensor that nodes of the first file computed under this name, if it gives these numbers."""
        if recipe is None or not is_exact(recipe):
            return None
        if any(name not in self._entries for name in parameters_in(recipe)):
            return None
        try:
            made = remade(tensor, recipe, self._entries)
            return recipe if same_numbers(made, tensor) else None
        except InputError:
            return None

    def _named_alike(self, name: str) -> list[Recipe]:
        """The recipe of the weight with a name, or with the beginning of it to which a tool added something."""
        known = known_beginning(name, self._named)
        return [] if known is None else [self._named[known][1]]

    def _elsewhere(self, tensor: ir.TensorProtocol) -> Recipe | None:
        """The recipe of a weight with the numbers of a tensor, as they are or transposed."""
        known = self._by_hash(tensor.dtype, tensor.size)
        if not known:
            return None
        array = np.asarray(tensor.numpy())
        if same := known.get(array_hash(array)):
            return merged(
                each if shape == array.shape else step("reshape", each, [*array.shape])
                for shape, each in same
            )
        shapes = {
            shape
            for same in known.values()
            for shape, _ in same
            if sorted(shape) == sorted(array.shape)
        }
        # the first is as they are
        orders = itertools.islice(itertools.permutations(range(array.ndim)), 1, None)
        for axes in orders if shapes else ():
            shape = tuple(array.shape[axis] for axis in axes)
            turned = known.get(array_hash(array.transpose(axes)), ()) if shape in shapes else ()
            if turned and all(each == shape for each, _ in turned):
                return merged(
                    step("transpose", each, [*map(axes.index, range(array.ndim))])
                    for _, each in turned
                )
        return None

    def _by_hash(
        self, dtype: ir.DataType, size: int
    ) -> dict[bytes, list[tuple[tuple[int, ...], Recipe]]]:
        """Hash of the numbers of a weight with so many elements → its shape, and how it was made."""
        if (dtype, size) not in self._hashed:
            found = self._hashed.setdefault((dtype, size), {})
            for tensor, recipe in self._named.values():
                if (tensor.dtype, tensor.size) == (dtype, size):
                    with contextlib.suppress(FileError, OSError):
                        array = np.asarray(tensor.numpy())
                        found.setdefault(array_hash(array), []).append((array.shape, recipe))
        return self._hashed[dtype, size]
