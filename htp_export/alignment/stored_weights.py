"""The numbers of stored weights in any format, and recipes of the weights of a tool's result."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

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
from htp_export.model.folded_recipes import merged
from htp_export.model.hashes import array_hash, is_filled, same_numbers
from htp_export.model.module_facts import stored_tensor
from htp_export.model.recipes import (
    default_recipe,
    known_beginning,
    recipe_of,
    recipes_of_computed,
    recorded,
)
from htp_export.runtime.arrays import Array
from htp_export.shapes.operator_kinds import is_standard
from htp_export.weights.rebuilding import remade

_SMALLEST = 4
"""Elements of a weight, at least; tensors with fewer are constants of the graph, such as axes."""

_BLOCKS = {"MatMulNBits": (1, 2, 3), "GatherBlockQuantized": (0, 2, 3)}
"""ONNX Runtime's operators with packed weights → inputs for levels, scales and zero points."""


@dataclass(frozen=True)
class WeightNumbers:
    """A weight of a file."""

    # an initializer and, if a node only dequantizes it, the output of that node
    values: Sequence[ir.Value]
    load: Callable[[], Array]  # returns its numbers, dequantized
    plain: bool = False  # whether the initializer itself holds these numbers, as floats


def weight_numbers(graph: ir.Graph) -> Iterator[WeightNumbers]:
    """The weights of a graph: floats, integers of at most eight bits, and quantized blocks."""
    quantized = set[ir.Value]()
    for node in graph:
        weight = _quantized(node)
        if weight is not None:
            quantized.add(weight.values[0])
            yield weight
    for value in graph.initializers.values():
        tensor = value.const_value
        if value in quantized or tensor is None or tensor.size < _SMALLEST:
            continue
        if holds_numbers(tensor.dtype):
            load, plain = functools.partial(_plain, tensor), tensor.dtype.is_floating_point()
            yield WeightNumbers([value], load, plain)


def holds_numbers(dtype: ir.DataType) -> bool:
    """Whether a type can be that of weights; integers of more bits are positions and sizes."""
    return dtype.is_floating_point() or (dtype.is_integer() and dtype.bitwidth <= 8)


def _plain(tensor: ir.TensorProtocol) -> Array:
    array = np.asarray(tensor.numpy())
    # ml_dtypes such as bfloat16 have no arithmetic in numpy
    return array if array.dtype.kind in "fiu" else array.astype(np.float32)


def _quantized(node: ir.Node) -> WeightNumbers | None:
    """The weight that a node dequantizes; None for any other node."""
    places = _BLOCKS.get(node.op_type) if node.domain == "com.microsoft" else None
    if places is None and not is_standard(node, "DequantizeLinear"):
        return None
    inputs = [_input_at(node, place) for place in places or (0, 1, 2)]
    weight = inputs[0]
    levels, scales, zeros = (None if value is None else value.const_value for value in inputs)
    if weight is None or levels is None or scales is None or levels.size < _SMALLEST:
        return None
    if places is not None:
        return _packed(node, weight, levels, scales, zeros)
    axis = node.attributes.get_int("axis", 1)
    block = node.attributes.get_int("block_size", 0)
    load = functools.partial(_of_axis, levels, scales, zeros, axis, block)
    return WeightNumbers([weight, *node.outputs], load)


def _input_at(node: ir.Node, place: int) -> ir.Value | None:
    return node.inputs[place] if place < len(node.inputs) else None


def _reshaped(recipe: Recipe, shape: Sequence[int], wanted: Sequence[int]) -> Recipe:
    """The recipe of a tensor of a shape, in another shape."""
    return recipe if shape == wanted else step("reshape", recipe, [*wanted])


def _packed(
    node: ir.Node,
    value: ir.Value,
    levels: ir.TensorProtocol,
    scales: ir.TensorProtocol,
    zeros: ir.TensorProtocol | None,
) -> WeightNumbers | None:
    """The weight of an operator with packed blocks; None if its attributes are not valid."""
    number = node.attributes.get_int
    # 4 bits are the operators' default; without K, a row ends with its last block
    bits, block, columns = number("bits", 4), number("block_size", 0), number("K", 0)
    rows = levels.shape.numpy()[0]
    if bits not in (2, 4, 8) or block < 1 or scales.size * block < rows * columns:
        return None
    load = functools.partial(_of_packed_blocks, levels, scales, zeros, bits, block, columns or None)
    return WeightNumbers([value], load)


def _of_axis(
    levels: ir.TensorProtocol,
    scales: ir.TensorProtocol,
    zeros: ir.TensorProtocol | None,
    axis: int,
    block: int,
) -> Array:
    """The weight of a ``DequantizeLinear``, with scales for the tensor, an axis, or its blocks."""
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
    """A weight of ONNX Runtime's operators: rows of blocks, each with a scale and a zero point.

    The last block of a row is padded. A byte holds several levels, or several zero points. Without
    zero points, packed levels are centred in their range.
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
    """Dequantize levels; ``block``: the number of levels along the axis that share a scale."""
    if block:
        places = np.arange(numbers.shape[axis]) // block
        factors, middle = np.take(factors, places, axis=axis), np.take(middle, places, axis=axis)
    return np.asarray((numbers - middle) * factors)


def _unpacked(tensor: ir.TensorProtocol, bits: int, rows: int) -> Array:
    """Unpack rows of numbers from bytes, the lowest bits first."""
    packed = tensor.numpy().reshape(rows, -1)
    if packed.dtype != np.uint8:
        return packed.astype(np.float32)
    parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(rows, -1).astype(np.float32)


_BY_A_TOOL = "another tool"

_OPERANDS = 2  # of arithmetic; a file of others may have other numbers

_ByHash: TypeAlias = dict[bytes, list[tuple[tuple[int, ...], Recipe]]]
"""Hash of contents → shapes and recipes of the weights that have them."""


def carry_recipes(before: ir.Model | None, after: ir.Model) -> None:
    """Record the recipe of each weight of a tool's result, by contents: tools keep names."""
    originals = _Originals(before)
    for graph in after.graphs():
        for name, value in graph.initializers.items():
            tensor = value.const_value
            if tensor is None or originals.has_new_recipe(name, tensor):
                continue
            if originals.may_be_weight(name, tensor):
                recipe = originals.recipe(name, tensor)
            else:
                recipe = originals.recipe_of_positions(name, tensor)
            if recipe != default_recipe(name, tensor.dtype) or tags.RECIPE in tensor.metadata_props:
                value.const_value = recorded(tensor, recipe)


@dataclass(frozen=True)
class _Product:
    """The product of a layer's weight or bias and a factor, with its recipe; ``shape`` broadcasts the factor."""

    weight: ir.TensorProtocol
    factor: ir.TensorProtocol
    shape: tuple[int, ...]
    recipe: Recipe

    def recipe_for(self, tensor: ir.TensorProtocol) -> Recipe | None:
        """The recipe of a tensor with the numbers of the product, bit for bit, also transposed; None for others."""
        if self.weight.dtype != tensor.dtype or not is_exact(self.recipe):
            return None
        factor = np.asarray(self.factor.numpy()).reshape(self.shape)
        try:
            product = np.asarray(self.weight.numpy()) * factor
        except ValueError:  # the factor is of another axis
            return None
        shape, numbers = tensor.shape.numpy(), tensor.tobytes()
        if product.shape == shape and product.tobytes() == numbers:
            return self.recipe
        if product.ndim == 2 and product.shape[::-1] == shape and product.T.tobytes() == numbers:
            return step("transpose", self.recipe, [1, 0])
        return None


class _Originals:
    """The weights of the original, by name and by contents."""

    def __init__(self, model: ir.Model | None) -> None:
        # type and size → hash of the contents → shapes and recipes of the weights that have them
        self._hashed: dict[tuple[ir.DataType, int], _ByHash] = {}
        # name → the stored tensor and its recipe
        self._named: dict[str, tuple[ir.TensorProtocol, Recipe]] = {}
        graphs = () if model is None else (model.graph, *model.graph.subgraphs())
        for graph in graphs:
            for value in graph.initializers.values():
                self._add(value)
        for graph in graphs:
            for node in graph:
                if is_standard(node, "Constant"):
                    self._add(node.outputs[0])
        # entry of the state_dict → the tensor that stores it as it is
        self._entries = {
            recipe: tensor for tensor, recipe in self._named.values() if isinstance(recipe, str)
        }
        # name → recipe, of tensors that nodes compute from stored ones
        self._computed: dict[str, Recipe] = {}
        for graph in graphs:
            self._computed |= recipes_of_computed(graph)
        # number of elements → products that a tool may have computed
        self._products: defaultdict[int, list[_Product]] = defaultdict(list)
        for graph in graphs:
            self._add_products(graph)

    def _add(self, value: ir.Value) -> None:
        tensor = stored_tensor(value)
        if tensor is None:
            return
        recipe = recipe_of(value)
        if holds_numbers(tensor.dtype) or recipe != CONSTANT:
            self._named[str(value.name)] = tensor, recipe

    def _add_products(self, graph: ir.Graph) -> None:
        """Add the products of a layer's weight and bias with a factor after it: tools move it into the layer."""
        for node in graph:
            if not is_standard(node, "Mul") or len(node.inputs) != _OPERANDS:
                continue
            for value, factor in (node.inputs, node.inputs[::-1]):
                stored = None if factor is None else stored_tensor(factor)
                if value is None or factor is None or stored is None:
                    continue
                for layer, place in _layer_before(value):
                    self._add_product(layer, place, factor, stored)

    def _add_product(
        self, layer: ir.Node, place: int, factor: ir.Value, stored: ir.TensorProtocol
    ) -> None:
        weight = layer.inputs[place]
        tensor = None if weight is None else stored_tensor(weight)
        if weight is None or tensor is None:
            return
        # outputs are the last axis, except of a Gemm that transposes its weight
        is_first = place == 1 and layer.attributes.get_int("transB", 0) == 1
        recipe = recipe_of(factor) if factor.producer() is None else CONSTANT
        shape = [stored.size, 1] if is_first else [stored.size]
        if stored.size == 1:
            shape = []
        if recipe == CONSTANT and stored.size == 1:
            recipe = float(np.asarray(stored.numpy()).item())
        elif stored.shape.numpy() != tuple(shape):
            recipe = step("reshape", recipe, shape)
        product = _Product(tensor, stored, tuple(shape), step("mul", recipe_of(weight), recipe))
        self._products[tensor.size].append(product)

    def may_be_weight(self, name: str, tensor: ir.TensorProtocol) -> bool:
        """Whether a tensor may be a weight; 32-bit integers may be a quantized bias, by their name."""
        if holds_numbers(tensor.dtype):
            return True
        return tensor.dtype == ir.DataType.INT32 and bool(self._recipes_named(name))

    def has_new_recipe(self, name: str, tensor: ir.TensorProtocol) -> bool:
        """Whether the tool itself recorded a recipe: one that the original tensor does not have."""
        original = self._named.get(name)
        before = {} if original is None else original[0].metadata_props
        recorded_text = tensor.metadata_props.get(tags.RECIPE)
        if recorded_text == recipe_to_text(CONSTANT):
            return True
        return recorded_text not in (None, before.get(tags.RECIPE))

    def recipe(self, name: str, tensor: ir.TensorProtocol) -> Recipe:
        """The recipe of a tensor of the result; contents are searched only if name and contents differ."""
        original = self._named.get(name)
        computed = self._computed.get(name)
        if computed == CONSTANT:
            return CONSTANT
        named = self._recipes_named(name) or ([] if computed is None else [computed])
        vague = step("computed", *named, _BY_A_TOOL)
        with contextlib.suppress(FileError, OSError):  # a data file is gone
            if original is not None and same_numbers(original[0], tensor):
                before, recipe = original
                if before.dtype == tensor.dtype:
                    return recipe
                return step("cast", recipe, tensor.dtype.name.lower())
        try:
            # Tensors of one repeated number, such as zeros, equal each other by chance.
            if tensor.size > 1 and is_filled(tensor):
                return vague
            known = self._by_contents(tensor) or self._as_computed(computed, tensor)
            return known or self._as_product(tensor) or vague
        except (FileError, OSError):
            return ["computed", _BY_A_TOOL]

    def recipe_of_positions(self, name: str, tensor: ir.TensorProtocol) -> Recipe:
        """The recipe of integers or conditions of the result: a constant, unless entries determine them.

        Equal numbers under another name may be equal by chance, such as positions that are counted
        from 0.
        """
        computed = self._computed.get(name, CONSTANT)
        equal: list[Recipe] = []
        with contextlib.suppress(FileError, OSError):  # a data file is gone
            original = self._named.get(name)
            if original is not None and same_numbers(original[0], tensor):
                return original[1]
            made = self._as_computed(computed, tensor)
            if made is not None:
                return made
            same = self._by_hash(tensor.dtype, tensor.size)
            if same:
                found = same.get(array_hash(np.asarray(tensor.numpy())), ())
                equal = [recipe for _, recipe in found]
        by_tool = step("computed", computed, *equal, _BY_A_TOOL)
        return CONSTANT if next(parameters_in(by_tool), None) is None else by_tool

    def _as_computed(self, recipe: Recipe | None, tensor: ir.TensorProtocol) -> Recipe | None:
        """The recipe of the nodes that computed a tensor of this name, if it gives these numbers."""
        if recipe is None or not is_exact(recipe):
            return None
        if any(name not in self._entries for name in parameters_in(recipe)):
            return None
        try:
            made = remade(tensor, recipe, self._entries)
            return recipe if same_numbers(made, tensor) else None
        except InputError:
            return None

    def _as_product(self, tensor: ir.TensorProtocol) -> Recipe | None:
        """The recipe of a product that gives these numbers."""
        for product in self._products.get(tensor.size, ()):
            recipe = product.recipe_for(tensor)
            if recipe is not None:
                return recipe
        return None

    def _recipes_named(self, name: str) -> list[Recipe]:
        """The recipe of the weight of a name, or of the name to which a tool added a suffix."""
        original = known_beginning(name, self._named)
        return [] if original is None else [self._named[original][1]]

    def _by_contents(self, tensor: ir.TensorProtocol) -> Recipe | None:
        """The recipe of a weight with the numbers of a tensor, in the same order or transposed."""
        originals = self._by_hash(tensor.dtype, tensor.size)
        if not originals:
            return None
        array = np.asarray(tensor.numpy())
        same = originals.get(array_hash(array))
        if same:
            return merged(_reshaped(recipe, shape, array.shape) for shape, recipe in same)
        dimensions = sorted(array.shape)
        shapes = {shape for entries in originals.values() for shape, _ in entries}
        if any(sorted(shape) == dimensions for shape in shapes):
            return _transposed_recipe(array, originals, shapes)
        return None

    def _by_hash(self, dtype: ir.DataType, size: int) -> _ByHash:
        """The weights of one type and number of elements, by the hash of their contents."""
        if (dtype, size) not in self._hashed:
            by_hash = self._hashed.setdefault((dtype, size), {})
            for tensor, recipe in self._named.values():
                if (tensor.dtype, tensor.size) != (dtype, size):
                    continue
                with contextlib.suppress(FileError, OSError):
                    array = np.asarray(tensor.numpy())
                    by_hash.setdefault(array_hash(array), []).append((array.shape, recipe))
        return self._hashed[dtype, size]


def _layer_before(value: ir.Value) -> Iterator[tuple[ir.Node, int]]:
    """Yield the nodes that compute a value as a linear layer, each with the place of its weight or bias."""
    node = value.producer()
    if node is not None and is_standard(node, "Add") and len(node.inputs) == _OPERANDS:
        for place, term in enumerate(node.inputs):
            other = None if term is None else term.producer()
            if other is not None and is_standard(other, "MatMul"):
                yield node, 1 - place
                yield other, 1
    elif node is not None and is_standard(node, "MatMul", "Gemm"):
        yield from ((node, place) for place in (1, 2) if place < len(node.inputs))


def _transposed_recipe(
    array: Array, originals: _ByHash, shapes: Collection[tuple[int, ...]]
) -> Recipe | None:
    """The recipe of the weight of which an array is a transpose; None without one.

    ``shapes``: The shapes of the originals.
    """
    orders = itertools.permutations(range(array.ndim))
    for axes in itertools.islice(orders, 1, None):  # the first order is the array's own
        shape = tuple(array.shape[axis] for axis in axes)
        if shape not in shapes:
            continue
        same = originals.get(array_hash(array.transpose(axes)), ())
        if same and all(original == shape for original, _ in same):
            back = [*map(axes.index, range(array.ndim))]
            return merged(step("transpose", recipe, back) for _, recipe in same)
    return None
