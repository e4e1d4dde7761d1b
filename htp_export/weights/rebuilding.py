"""Stored tensors computed again from other parameters, by their recipes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.extras import required
from htp_export.files.data_files import DataTensor
from htp_export.format.recipes import (
    CONSTANT,
    Recipe,
    is_listed_whole,
    parameters_in,
    recipe_to_text,
    steps_in,
    why_not_exact,
)
from htp_export.model.graph_facts import Array
from htp_export.model.recipes import recipe_of
from htp_export.model.strips import in_strips, strips
from htp_export.model.tagged import TaggedModel
from htp_export.shapes.operator_kinds import graphs_in
from htp_export.weights.rounding import Rounding, Roundings, rounded_bias, rounding

_GROWTH = 16
"""Limit of intermediate results, as a factor on the larger of stored tensor and parameters.

A broadcast repeats a factor or a mask; an untrusted recipe could repeat it without end.
"""


@dataclass(frozen=True)
class Rebuilt:
    """The stored tensors of a model, computed from a ``state_dict``.

    Attributes:
        tensors: Initializer → its new contents, if parameters determine them.
        unknown: Initializer → the reason why parameters do not determine it. Constants are in
            neither, nor are tensors that cannot be computed again and whose entries are unchanged.
    """

    tensors: Mapping[ir.Value, ir.TensorProtocol]
    unknown: Mapping[ir.Value, str]


def recipes_of_stored(model: ir.Model) -> dict[ir.Value, Recipe]:
    """Return initializer → recipe, of all graphs; without constants and initializers without contents."""
    recipes: dict[ir.Value, Recipe] = {}
    for graph in graphs_in(model.graph):
        for value in graph.initializers.values():
            recipe = recipe_of(value)
            if recipe != CONSTANT and value.const_value is not None:
                recipes[value] = recipe
    return recipes


def rebuilt(
    tagged: TaggedModel,
    state_dict: Mapping[str, Any],
    unfit: Mapping[str, str] | None = None,
    unchanged: Set[str] = frozenset(),
) -> Rebuilt:
    """Compute the stored tensors of a model from other parameters, each when it is read.

    Args:
        tagged: The model.
        state_dict: Name → tensor or array.
        unfit: Entry that is not in ``state_dict`` → the reason, a verb and its object.
        unchanged: Entries that are equal to those of the export.

    Raises:
        InputError: If the recipe of an initializer is not valid, or does not fit the parameters.
    """
    tensors: dict[ir.Value, ir.TensorProtocol] = {}
    unknown: dict[ir.Value, str] = {}
    roundings = Roundings()
    for value, recipe in recipes_of_stored(tagged.model).items():
        assert value.const_value is not None
        if is_listed_whole(recipe) and unchanged >= set(parameters_in(recipe)):
            continue
        why = _why_not(value, recipe, state_dict, unfit or {})
        if why:
            unknown[value] = why
        else:
            tensors[value] = remade(value.const_value, recipe, state_dict, roundings)
    return Rebuilt(tensors, unknown)


def _why_not(
    value: ir.Value, recipe: Recipe, state_dict: Mapping[str, Any], unfit: Mapping[str, str]
) -> str:
    """Return the reason why a stored tensor cannot be computed; empty if it can."""
    reason = why_not_exact(recipe)
    if reason:
        return f"initializer {value.name!r} was computed in a way that cannot be repeated: {reason}"
    for name in parameters_in(recipe):
        if name in unfit:
            return f"{name!r} {unfit[name]}"
        if name not in state_dict:
            return f"the weights have no {name!r}"
    return _differing(value, recipe, state_dict)


def _differing(value: ir.Value, recipe: Recipe, state_dict: Mapping[str, Any]) -> str:
    """Return the reason if entries that share one stored tensor differ in the new weights; otherwise empty."""
    assert value.const_value is not None
    compute = _Rebuilding(str(value.name), recipe, state_dict, value.const_value, Roundings())
    for made in steps_in(recipe):
        if made[0] == "equal" and not compute.are_equal(made[1:]):
            listed = " and ".join(map(repr, dict.fromkeys(parameters_in(made))))
            return (
                f"{listed} were equal at the export and share one tensor of the file; they differ now: "
                "export the model again, with weights that differ"
            )
    return ""


def remade(
    stored: ir.TensorProtocol,
    recipe: Recipe,
    state_dict: Mapping[str, Any],
    roundings: Roundings | None = None,
) -> ir.TensorProtocol:
    """Compute a stored tensor from parameters by an exact recipe, when it is read.

    ``roundings``: Weights that were rounded for other tensors of the model.

    Examples:
        >>> stored = ir.tensor(np.zeros((1, 2), np.float32))
        >>> remade(stored, ["transpose", "w", []], {"w": np.float32([[1], [2]])}).numpy()
        array([[1., 2.]], dtype=float32)
    """
    compute = _Rebuilding(str(stored.name), recipe, state_dict, stored, roundings or Roundings())
    shape, props = ir.Shape(stored.shape.numpy()), {**stored.metadata_props}
    return ir.LazyTensor(compute, stored.dtype, shape, name=stored.name, metadata_props=props)


_MISFITS = (ValueError, TypeError, IndexError, KeyError)
"""Errors of numpy for a recipe that does not fit the parameters: both are from files of others."""


@dataclass(frozen=True)
class _Rebuilding:
    """The computation of one stored tensor."""

    name: str
    recipe: Recipe
    parameters: Mapping[str, Any]
    stored: ir.TensorProtocol
    roundings: Roundings

    def __call__(self) -> ir.TensorProtocol:
        try:
            with np.errstate(all="ignore"):
                array = np.asarray(self._evaluate(self.recipe))
        except _MISFITS as error:
            raise InputError(
                f"initializer {self.name!r}: its recipe does not fit: {error}"
            ) from error
        shape, dtype = tuple(self.stored.shape.numpy()), self.stored.dtype.numpy()
        if array.shape != shape or array.dtype != dtype:
            is_made = (
                f"of {array.dtype} {list(array.shape)}, and the file has {dtype} {list(shape)}"
            )
            raise InputError(f"initializer {self.name!r}: the parameters make a tensor {is_made}")
        # it may be a view of the parameter: who writes it makes it contiguous
        return ir.Tensor(array, dtype=self.stored.dtype, name=self.stored.name)

    def _evaluate(self, recipe: Recipe) -> Any:
        """The array of a recipe, or the number of a constant."""
        if isinstance(recipe, str):
            return _array(self.parameters[recipe])
        if not isinstance(recipe, list):
            return recipe
        word, *parts = recipe
        if word == "masked":
            before = np.asarray(self.stored.numpy())
            return np.where(before == 0, before, self._evaluate(parts[0]))
        if word == "equal":
            if not self.are_equal(parts):
                raise ValueError(
                    "parameters that the file has once, because they were equal, differ now"
                )
            return self._evaluate(parts[0])
        if word in _ROUNDINGS:
            return self._bounded(self._rounded(word, parts[0], parts[-1]))
        if word == "round_bias":
            bias, weight, (part, scale, *scheme) = parts
            scales = self._rounded("round", weight, ["scales", *scheme])
            return rounded_bias(self._evaluate(bias), scales, part, scale)
        # The last part is an operand of arithmetic, or the setting of another step.
        last = self._evaluate(parts[-1]) if word in _ARITHMETIC else parts[-1]
        operands = [self._evaluate(part) for part in parts[:-1]]
        return self._bounded(_STEPS[word](*operands, last))

    def are_equal(self, recipes: Sequence[Recipe]) -> bool:
        """Whether the arrays of some recipes are equal, bit for bit."""
        try:
            first, *others = (np.asarray(self._evaluate(recipe)) for recipe in recipes)
        except _MISFITS:
            return False
        return all(_is_same(first, other) for other in others)

    def _rounded(self, word: str, weight: Recipe, setting: list[Any]) -> Array:
        """One part of a rounded weight."""
        part, *scheme = setting
        key = recipe_to_text([word, weight, scheme])
        return self.roundings.part(
            key, part, lambda: _ROUNDINGS[word](self._evaluate(weight), scheme)
        )

    def _bounded(self, result: Any) -> Any:
        """The result of a step; a ValueError if it is too large."""
        sizes = [math.prod(self.parameters[name].shape) for name in parameters_in(self.recipe)]
        largest = max(sizes, default=1)
        if result.size > _GROWTH * max(largest, self.stored.size):
            raise ValueError(f"a step makes {result.size:,} elements")
        return result


def _is_same(one: Array, other: Array) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    places = [(each.__array_interface__["data"], each.strides) for each in (one, other)]
    # tied parameters are often one tensor in memory
    return places[0] == places[1] or one.tobytes() == other.tobytes()


def _array(parameter: Any) -> Array:
    if isinstance(parameter, np.ndarray):
        return parameter
    if isinstance(parameter, DataTensor):
        array = np.asarray(parameter.numpy())
        parameter.release()  # the pages of its file, once nobody reads the array
        return array
    if isinstance(parameter, ir.TensorProtocol):  # asks for each attribute of the protocol: last
        return np.asarray(parameter.numpy())
    from onnx_ir.tensor_adapters import TorchTensor

    return TorchTensor(parameter.detach().cpu()).numpy()


def _slice(array: Array, cut: list[int]) -> Array:
    axis, start, end, by = cut
    where = [slice(None)] * array.ndim
    where[axis] = slice(start, end, by)
    return array[tuple(where)]


def _quantized(array: Array, blocks: list[Any]) -> Rounding:
    """Round a matrix in blocks of its columns, as ONNX Runtime does for ``MatMulNBits``.

    ``blocks``: Bits, elements of a block, and whether it is symmetric.
    """
    kernels = required("onnxruntime.capi._pybind_state", "rounding in blocks")

    bits, block, symmetric = blocks
    rows, columns = array.shape
    count, pack = -(-rows // block), 8 // bits
    levels = np.zeros((columns, count, -(-block // pack)), np.uint8)
    scales = np.zeros((columns, count), array.dtype)
    zero_points = np.zeros((columns, -(-count // pack)), np.uint8)
    kernel = getattr(kernels, f"quantize_matmul_{bits}bits")
    missing = (0, count * block - rows)
    for chosen in strips(array.T):
        part = np.ascontiguousarray(np.pad(array[:, chosen], (missing, (0, 0))))
        made = levels[chosen], scales[chosen], zero_points[chosen]
        kernel(made[0], part, *made[1:], block, part.shape[1], rows, bool(symmetric))
    return Rounding(scales, zero_points, lambda: levels)


def unpacked(array: Array, count: int, bits: int, kind: ir.DataType) -> Array:
    """The first integers of each row of bytes, the low bits of a byte first.

    Signed integers are stored with half of their range added.

    Examples:
        >>> unpacked(np.array([[0x98, 0x0F]], np.uint8), 3, 4, ir.DataType.INT4)
        array([[0, 1, 7]], dtype=int4)
    """
    packed = array.reshape(len(array), -1)
    middle = 1 << (bits - 1) if kind.is_signed() else 0
    made: Array = np.empty((len(packed), count), kind.numpy())
    for chosen in strips(packed):
        rows = packed[chosen]
        if bits == 4:
            rows = np.stack([rows & 15, rows >> 4], -1).reshape(len(rows), -1)
        made[chosen] = (rows[:, :count].astype(np.int16) - middle).astype(kind.numpy())
    return made


def _type(name: str) -> ir.DataType:
    return ir.DataType[name.upper()]


def narrowed(array: Array, to: ir.DataType) -> Array:
    """Numbers in a narrower float type.

    Finite numbers stay finite: masks contain the largest float, and infinity minus infinity is not
    a number. Numbers other than 0 do not become 0: they may prevent a division by 0.

    Examples:
        >>> narrowed(np.array([-3.4e38, 1e-12, 0.0, np.inf], np.float32), ir.DataType.FLOAT16)
        array([-6.55e+04,  5.96e-08,  0.00e+00,       inf], dtype=float16)
    """
    import ml_dtypes

    kind = to.numpy()
    limits = ml_dtypes.finfo(kind)  # type: ignore[no-untyped-call]
    largest, smallest = np.float32(limits.max), np.float32(limits.smallest_subnormal)

    def narrow(rows: Array) -> Array:
        finite = np.isfinite(rows)
        bounded = np.where(finite, np.clip(rows, -largest, largest), rows)
        is_tiny = (bounded != 0) & (np.abs(bounded) < smallest)
        kept = np.where(is_tiny, np.copysign(smallest, bounded), bounded)
        return np.asarray(kept).astype(kind)

    return in_strips(narrow, kind, array)


def _torch_sqrt(array: Array) -> Array:
    import torch

    return torch.from_numpy(np.ascontiguousarray(array)).sqrt().numpy()


_ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "exp": np.exp,
    "sqrt": np.sqrt,
    "torch_sqrt": _torch_sqrt,
}

_STEPS: Mapping[str, Callable[..., Any]] = {
    **_ARITHMETIC,
    "transpose": lambda array, perm: array.transpose(perm or None),
    "reshape": lambda array, sizes: array.reshape(sizes),
    "squeeze": lambda array, axes: array.squeeze(tuple(axes) or None),
    "unsqueeze": lambda array, axes: np.expand_dims(array, tuple(axes)),
    # a view
    "expand": lambda array, sizes: np.broadcast_to(array, np.broadcast_shapes(array.shape, sizes)),
    "cast": lambda array, to: array.astype(_type(to).numpy()),
    "narrow": lambda array, to: narrowed(array, _type(to)),
    "slice": _slice,
    "concat": lambda *parts: np.concatenate(parts[:-1], axis=parts[-1]),
    "unpack": lambda array, held: unpacked(array, held[0], held[1], _type(held[2])),
    "gather": lambda array, rows, axis: np.take(array, rows, axis),
    "take": lambda array, rows: np.take(array, np.array(rows[1], np.int64), rows[0]),
}

_ROUNDINGS: Mapping[str, Callable[[Array, list[Any]], Rounding]] = {
    "quantize": _quantized,
    "round": rounding,
}
"""Steps of which a recipe names one part: levels, scales or zero points."""
