"""What is known of tensors: what the file says, and what the walk over the graph adds to it. Rules ask it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import onnx_ir as ir

from htp_export.errors import FileError
from htp_export.format.bounds import LARGEST, MOST_DIMENSIONS
from htp_export.shapes.expressions import evaluate
from htp_export.shapes.sizes import Dim, is_unnamed, symbol, unnamed

LARGEST_CONTENTS = 64
"""Tensors of more elements than this are not looked into element by element."""

MOST_ELEMENTS = 8192
"""Numbers of larger tensors are not kept: they are data, not shapes."""


WHOLE = frozenset((ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL))
"""The types of tensors that hold sizes, places and decisions."""
_NO_NUMBERS = frozenset((ir.DataType.STRING, ir.DataType.UNDEFINED))
_MOST_FRACTIONS = 16
"""Constants of other types than integers that have more elements are not read: they are weights."""

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Shape: TypeAlias = tuple[Dim, ...]
Dims: TypeAlias = Sequence[Dim | None]
"""A shape some of whose dimensions are not known."""
Contents: TypeAlias = np.ndarray[Any, np.dtype[Any]]
"""What a small tensor holds: an array of objects, each a `Dim` or a bool."""


class Operation(Protocol):
    """A node, or a node of a function's body with the attributes that a call gives it."""

    @property
    def domain(self) -> str: ...
    @property
    def op_type(self) -> str: ...
    @property
    def inputs(self) -> Sequence[ir.Value | None]: ...
    @property
    def outputs(self) -> Sequence[ir.Value]: ...
    @property
    def attributes(self) -> Any: ...


@dataclass(frozen=True, slots=True, eq=False)
class Fact:
    """What is known of one tensor.

    Attributes:
        type: Its type.
        shape: Its shape.
        contents: What it holds, where that are a few integers, sizes or booleans.
        array: Its numbers, where they are few and the same in every run.
    """

    type: ir.TypeProtocol | None = None
    shape: Dims | None = None
    contents: Contents | None = None
    array: Array | None = None

    def forgetting_values(self) -> Fact:
        """Of a tensor of the same type and shape that holds something else."""
        return Fact(self.type, self.shape)


class Known:
    """What is known of the tensors of a model; ``sizes`` are those of open dimensions that are to be numbers."""

    def __init__(self, sizes: Mapping[str, int] | None = None) -> None:
        self._sizes = dict(sizes or {})
        self._dims: dict[str, Dim | None] = {}
        self._in_function = False
        self._calls = 0
        self._shapes: dict[ir.Value, Shape | None] = {}
        self._contents: dict[ir.Value, Contents | None] = {}
        self._arrays: dict[ir.Value, Array | None] = {}
        self._types: dict[ir.Value, ir.DataType | ir.TypeProtocol | None] = {}

    def shape(self, value: ir.Value | None) -> Shape | None:
        """The shape of a tensor, or None where not even its rank is known."""
        if value is None:
            return None
        if value not in self._shapes:
            self._shapes[value] = self._declared(value)
        return self._shapes[value]

    def rank(self, value: ir.Value | None) -> int | None:
        """The number of dimensions of a tensor."""
        shape = self.shape(value)
        return None if shape is None else len(shape)

    def contents(self, value: ir.Value | None) -> Contents | None:
        """What a small tensor of integers or booleans holds, or None where it is not known."""
        if value is None:
            return None
        if value not in self._contents:
            array = self.array(value)
            small = (
                array is not None and array.size <= LARGEST_CONTENTS and array.dtype.kind in "biu"
            )
            self._contents[value] = (
                objects(array.tolist(), array.shape) if small and array is not None else None
            )
        return self._contents[value]

    def constant(self, value: ir.Value | None) -> list[int] | None:
        """The contents of a tensor of integers as a flat list, if they are the same in every run."""
        contents = self.contents(value)
        if contents is None:
            return None
        flat = contents.reshape(-1).tolist()
        return flat if all(isinstance(item, int) for item in flat) else None

    def array(self, value: ir.Value | None) -> Array | None:
        """The numbers in a small tensor of any type, if they are the same in every run."""
        if value is None:
            return None
        if value not in self._arrays:
            self._arrays[value] = self._read(value)
        return self._arrays[value]

    def type(self, value: ir.Value | None) -> ir.TypeProtocol | None:
        """The type of a value, also where the file does not say it; None where it is not known."""
        if value is None:
            return None
        known = self._known_type(value)
        return ir.TensorType(known) if isinstance(known, ir.DataType) else known

    def dtype(self, value: ir.Value | None) -> ir.DataType | None:
        """The element type of a tensor, also where the file does not say it; None where it is not known."""
        known = None if value is None else self._known_type(value)
        return known if known is None or isinstance(known, ir.DataType) else known.dtype

    def _known_type(self, value: ir.Value) -> ir.DataType | ir.TypeProtocol | None:
        if value.const_value is not None:
            return value.const_value.dtype
        first, second = value.type, self._types.get(value)
        # what a function's body says may be true of another call
        if self._in_function and second is not None:
            return second
        return second if first is None or first.dtype == ir.DataType.UNDEFINED else first

    def fact(self, value: ir.Value | None) -> Fact | None:
        """All of it; None for an input that is left out."""
        if value is None:
            return None
        return Fact(self.type(value), self.shape(value), self.contents(value), self.array(value))

    def state(self, value: ir.Value, fact: Fact) -> None:
        """Put what is known of a value in the place of what was known of it."""
        self._shapes[value], self._types[value] = self._completed(value, fact.shape), fact.type
        self._contents[value], self._arrays[value] = fact.contents, fact.array
        if fact.contents is None and fact.array is not None:
            del self._contents[value]  # they are those of the array

    def _settled(self, value: ir.Value, inferred: Dims | None) -> Shape | None:
        """A shape that was found, with what the file says of dimensions that were not, or that have no name there."""
        declared = self._declared(value)
        if inferred is None:
            return declared
        if declared is None or len(declared) != len(inferred):
            return self._completed(value, inferred)
        dims = (
            written if dim is None or (is_unnamed(dim) and not is_unnamed(written)) else dim
            for dim, written in zip(inferred, declared, strict=True)
        )
        return possible(tuple(dims))

    def _completed(self, value: ir.Value, inferred: Dims | None) -> Shape | None:
        if inferred is None:
            return None
        dims = (
            self._unnamed(value, place) if dim is None else dim
            for place, dim in enumerate(inferred)
        )
        return possible(tuple(dims))

    def _unnamed(self, value: ir.Value, place: int) -> Dim:
        name = value.name or str(id(value))
        return unnamed(f"{name}@{self._calls}" if self._in_function else name, place)

    def _declared(self, value: ir.Value) -> Shape | None:
        tensor = value.const_value
        # a caller may give a tensor of another shape
        is_default = value.shape is not None and value.is_graph_input()
        shape = value.shape if tensor is None or is_default else tensor.shape
        if shape is None:
            return None
        dims: list[Dim] = []
        for place, dim in enumerate(shape):
            if isinstance(dim, int):
                dims.append(dim)
            elif dim.value is None or self._in_function:
                # a name in a function is another size in each call
                dims.append(self._unnamed(value, place))
            else:
                dims.append(self._named(dim))
        return possible(tuple(dims))

    def _named(self, dim: Any) -> Dim:
        text = str(dim.value)
        if not self._sizes:
            return symbol(text)
        if text not in self._dims:
            self._dims[text] = evaluate(text, self._sizes)
        known = self._dims[text]
        return symbol(text) if known is None else known

    def _read(self, value: ir.Value) -> Array | None:
        """A small constant, or small contents that are numbers."""
        contents = self._contents.get(value)
        if contents is not None:
            dtype = self.dtype(value)
            if dtype is None or not all(isinstance(item, int) for item in contents.reshape(-1)):
                return None
            return contents.astype(dtype.numpy())
        tensor = value.const_value
        if tensor is None:
            tensor = constant_tensor(value) if value.producer() is not None else None
        return None if tensor is None or value.is_graph_input() else small_array(tensor)


def possible(shape: Shape) -> Shape | None:
    """A shape; None for one that no tensor has, which a file may state: all sizes can be multiplied and printed."""
    is_possible = (
        len(shape) <= MOST_DIMENSIONS
        and math.prod(dim for dim in shape if isinstance(dim, int)) <= LARGEST
    )
    return shape if is_possible else None


def small_array(tensor: ir.TensorProtocol) -> Array | None:
    """The numbers in a constant from which sizes may be computed: integers, and single or few other numbers."""
    dtype = tensor.dtype
    most = MOST_ELEMENTS if dtype in WHOLE else _MOST_FRACTIONS
    if tensor.size > most or dtype in _NO_NUMBERS:
        return None
    # isinstance looks at every method of it, which takes longer
    if ir.ExternalTensor not in type(tensor).__mro__:
        return np.asarray(tensor.numpy())
    if tensor.size > LARGEST_CONTENTS or dtype not in WHOLE:
        return None
    try:
        return np.asarray(tensor.numpy())
    except (FileError, OSError, ValueError):  # its file is not there, or is another one
        return None


def constant_tensor(value: ir.Value) -> ir.TensorProtocol | None:
    """What a ``Constant`` gives; None for what is made by anything else."""
    node = value.producer()
    if node is None or node.op_type != "Constant" or node.domain != "":
        return None
    written = node.attributes.get("value")
    if written is not None and written.type == ir.AttributeType.TENSOR and not written.is_ref():
        # as_tensor() looks at every method of it, which takes longer
        tensor: ir.TensorProtocol = written.value
        return tensor
    try:
        return ir.convenience.get_const_tensor(value)
    except (TypeError, ValueError):  # a node that is no valid Constant
        return None


def normalized(axis: int, rank: int) -> int:
    """An axis counted from the front."""
    return axis + rank if axis < 0 else axis


def shape_of(node: Operation, known: Known, place: int = 0) -> Shape:
    """The shape of an input that a rule cannot do without; a ValueError where it is not known."""
    shape = known.shape(node.inputs[place]) if place < len(node.inputs) else None
    if shape is None:
        raise ValueError(f"the shape of input {place} is not known")
    return shape


def axes_of(node: Operation, known: Known, name: str = "axes", place: int = 1) -> list[int] | None:
    """Axes as an attribute, or as an input of newer opsets; None where there are none or they are not constant."""
    if name in node.attributes:
        return list(node.attributes[name].as_ints())
    return known.constant(node.inputs[place]) if place < len(node.inputs) else None


def unknown_dims(rank: Dim) -> list[Dim | None] | None:
    """A shape of which only the rank is known; None where that is not known, or no tensor has so many dimensions."""
    return [None] * rank if isinstance(rank, int) and 0 <= rank <= MOST_DIMENSIONS else None


def objects(nested: Any, shape: Sequence[int] | None = None) -> Contents:
    """Nested lists as an array of objects."""
    array = np.array(nested, dtype=object)
    return array if shape is None else array.reshape(shape)


def small_contents(contents: Contents) -> bool:
    """Whether there are few elements, and numbers among them are such as ONNX's integers can hold."""
    few = contents.size <= LARGEST_CONTENTS
    return few and all(
        not isinstance(n, int) or -LARGEST - 1 <= n <= LARGEST for n in contents.reshape(-1)
    )
