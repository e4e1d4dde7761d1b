"""What an ONNX Runtime session is fed: inputs as given, checked, or random ones made from the model's input types."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.runtime.arrays import Array, from_torch

__all__ = ["Feed", "Input", "feed_again", "feed_from", "inputs_of", "random_feed"]


@dataclass(frozen=True)
class Input:
    """An input of a model.

    Attributes:
        name: Its name.
        type: Its element type; None where it is no tensor.
        shape: Sizes, names of sizes, or None for sizes without a name; None where even their number is not known.
    """

    name: str
    type: ir.DataType | None
    shape: tuple[int | str | None, ...] | None

    def __str__(self) -> str:
        shape = (
            "any shape" if self.shape is None else f"[{', '.join('?' if d is None else str(d) for d in self.shape)}]"
        )
        return f"{self.type.name.lower() if self.type is not None else 'no tensor'} {shape}"


@dataclass(frozen=True)
class Feed:
    """Arrays for every input, and what was assumed to make them.

    Attributes:
        arrays: Input name → array.
        types: Input name → ONNX element type, which numpy cannot always tell.
        notes: What was assumed.
    """

    arrays: Mapping[str, Array]
    types: Mapping[str, ir.DataType]
    notes: tuple[str, ...] = ()


def inputs_of(model: ir.Model) -> list[Input]:
    """The inputs that a model must be given: those that have no value of their own.

    Example:
        >>> x = ir.val("x", ir.DataType.FLOAT, ["batch", 4])
        >>> [str(each) for each in inputs_of(ir.Model(ir.Graph([x], [], nodes=[]), ir_version=10))]
        ['float [batch, 4]']
    """
    found = []
    for value in model.graph.inputs:
        if value.name in model.graph.initializers:
            continue
        tensor = isinstance(value.type, ir.TensorType) and value.type.dtype != ir.DataType.UNDEFINED
        shape = None
        if value.shape is not None:
            shape = tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)
        found.append(Input(str(value.name), value.dtype if tensor else None, shape))
    return found


def feed_from(inputs: Sequence[Input], given: Mapping[str, Any]) -> Feed:
    """The given inputs as arrays.

    Args:
        inputs: The inputs of the model.
        given: Input name → numpy array, torch tensor, or nested lists of numbers.

    Raises:
        InputError: If one is missing or unknown, or its type or shape is not the model's; it says which, and what the
            model wants.

    Example:
        >>> x = Input("x", ir.DataType.FLOAT, ("batch", 4))
        >>> feed_from([x], {"x": np.ones((2, 3), np.float32)})
        Traceback (most recent call last):
        ...
        htp_export.errors.InputError: input 'x': is float [2, 3], and the model wants float [batch, 4]
    """
    if not isinstance(given, Mapping):
        raise InputError(f"inputs are a dict of name → array, not {type(given).__name__}")
    known = {each.name: each for each in inputs}
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; do you mean {near[0]!r}?" if near else ""
            raise InputError(f"the model has no input {name!r}, only {', '.join(map(repr, known))}{hint}")
    missing = [f"{name!r} ({each})" for name, each in known.items() if name not in given]
    if missing:
        raise InputError(f"no value for input {', '.join(missing)}")
    arrays = {name: _array(each, given[name]) for name, each in known.items()}
    for name, each in known.items():
        _check(each, arrays[name])
    return Feed(arrays, _types(inputs))


def feed_again(inputs: Sequence[Input], given: Mapping[str, Array]) -> Feed:
    """What another file of a model is fed: the same arrays, in the width that its own floats have.

    Args:
        inputs: The inputs of the other file.
        given: Input name → array. Inputs of other names have those at their places, if there are as many.

    Raises:
        InputError: If there is no array for an input, or not of its type or shape.

    Example:
        >>> x = Input("x_half", ir.DataType.FLOAT16, ("batch", 4))
        >>> feed_again([x], {"x": np.ones((2, 4), np.float32)}).arrays["x_half"].dtype
        dtype('float16')
    """
    places = list(given.values()) if len(given) == len(inputs) else []
    found = {}
    for place, each in enumerate(inputs):
        array = given.get(each.name, places[place] if places else None)
        if array is None:
            raise InputError(f"takes an input {each.name!r}, and the other file has none of that name")
        wanted = each.type.numpy() if each.type is not None and each.type.is_floating_point() else array.dtype
        found[each.name] = array.astype(wanted) if array.dtype != wanted and _is_float(array) else array
    return feed_from(inputs, found)


def _is_float(array: Array) -> bool:
    return str(array.dtype).startswith(("float", "bfloat"))


def random_feed(
    inputs: Sequence[Input],
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    seed: int = 0,
) -> Feed:
    """Random inputs: floats are normal, integers 0 or 1, which every vocabulary has, booleans true.

    Args:
        inputs: The inputs of the model.
        dims: Name of a size that the model leaves open → size. Those that are not given are 1, and a note says so.
        shapes: Input name → its whole shape.
        seed: Of the values.

    Raises:
        InputError: If an input is no tensor of numbers or its number of dimensions is unknown, or if ``dims`` or
            ``shapes`` do not fit the model.

    Example:
        >>> x = Input("x", ir.DataType.FLOAT, ("batch", 4))
        >>> feed = random_feed([x], {"batch": 2})
        >>> feed.arrays["x"].shape, random_feed([x]).notes
        ((2, 4), ("size 'batch' is 1",))
    """
    dims, shapes = dict(dims or {}), dict(shapes or {})
    open_sizes = {dim for each in inputs for dim in each.shape or () if isinstance(dim, str)}
    for name, size in dims.items():
        if name not in open_sizes:
            known = ", ".join(map(repr, sorted(open_sizes))) or "none"
            raise InputError(f"the model leaves no size {name!r} open; there is {known}")
        if not isinstance(size, int) or size < 0:
            raise InputError(f"size {name!r} is a whole number, not {size!r}")
    for name in shapes.keys() - {each.name for each in inputs}:
        raise InputError(f"the model has no input {name!r}, only {', '.join(repr(each.name) for each in inputs)}")
    generator = np.random.default_rng(seed)
    arrays: dict[str, Array] = {}
    notes: list[str] = []
    for each in inputs:
        shape, assumed = _shape(each, dims, shapes.get(each.name))
        notes += assumed
        arrays[each.name] = _random(each, shape, generator)
        _check(each, arrays[each.name])
    return Feed(arrays, _types(inputs), tuple(dict.fromkeys(notes)))


def _types(inputs: Sequence[Input]) -> dict[str, ir.DataType]:
    return {each.name: each.type for each in inputs if each.type is not None}


def _array(wanted: Input, value: Any) -> Array:
    if wanted.type is None:
        raise InputError(f"input {wanted.name!r}: is no tensor in the model, which cannot be fed")
    if hasattr(value, "detach"):  # a torch tensor; torch itself need not be imported for it
        return from_torch(value)
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    try:
        return np.asarray(value, dtype=wanted.type.numpy())
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"input {wanted.name!r}: cannot be made {wanted}: {error}") from error


def _check(wanted: Input, array: Array) -> None:
    expected = wanted.type.numpy() if wanted.type is not None and wanted.type != ir.DataType.STRING else None
    fits = array.dtype == expected if expected is not None else array.dtype.kind in "OUS"
    if fits and wanted.shape is not None:
        fits = len(array.shape) == len(wanted.shape) and all(
            not isinstance(dim, int) or dim == size for dim, size in zip(wanted.shape, array.shape, strict=True)
        )
    if not fits:
        found = f"{_type_name(array)} {list(array.shape)}"
        raise InputError(f"input {wanted.name!r}: is {found}, and the model wants {wanted}")


def _type_name(array: Array) -> str:
    try:
        return ir.DataType.from_numpy(array.dtype).name.lower()
    except TypeError:
        return str(array.dtype)


def _shape(wanted: Input, dims: Mapping[str, int], given: Sequence[int] | None) -> tuple[list[int], list[str]]:
    if given is not None:
        if not isinstance(given, Sequence) or not all(isinstance(size, int) and size >= 0 for size in given):
            raise InputError(f"input {wanted.name!r}: a shape is a list of whole numbers, not {given!r}")
        return list(given), []
    if wanted.shape is None:
        raise InputError(f"input {wanted.name!r}: the model does not tell its shape; give inputs, or its shape")
    shape, notes = [], []
    for position, dim in enumerate(wanted.shape):
        if isinstance(dim, int):
            shape.append(dim)
        elif dim is not None and dim in dims:
            shape.append(dims[dim])
        else:
            shape.append(1)
            notes.append(f"size {dim!r} is 1" if dim else f"size {position} of input {wanted.name!r} is 1")
    return shape, notes


def _random(wanted: Input, shape: Sequence[int], generator: np.random.Generator) -> Array:
    kind = wanted.type
    if kind is None or kind == ir.DataType.STRING:
        raise InputError(f"input {wanted.name!r}: no random value can be made of {wanted}; give inputs")
    if kind == ir.DataType.BOOL:
        return np.ones(shape, dtype=bool)
    if kind.is_floating_point():
        if math.prod(shape) == 0:
            return np.zeros(shape, dtype=kind.numpy())
        return np.asarray(generator.standard_normal(shape, dtype=np.float32)).astype(kind.numpy())
    return generator.integers(0, 2, shape).astype(kind.numpy())
