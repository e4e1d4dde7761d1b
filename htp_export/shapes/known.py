"""Facts about tensors, from the file and from the walk over the graph. Shape rules query them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import onnx_ir as ir

from htp_export.errors import FileError
from htp_export.format import tags
from htp_export.format.bounds import LARGEST, MOST_DIMENSIONS
from htp_export.format.recipes import CONSTANT, recipe_to_text
from htp_export.shapes.expressions import evaluate
from htp_export.shapes.sizes import Dim, is_unnamed, symbol, unnamed

LARGEST_CONTENTS = 64
"""The most elements of a tensor whose contents are followed element by element, as for shapes."""

MOST_ELEMENTS = 8192
"""The most elements of a constant that is kept as numbers: larger ones are data, not shapes."""


WHOLE = frozenset((ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL))
"""Types of tensors that hold sizes, positions and conditions."""
_NO_NUMBERS = frozenset((ir.DataType.STRING, ir.DataType.UNDEFINED))
_MOST_FRACTIONS = 16
"""The most elements of a non-integer constant that is loaded: larger ones are weights."""

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Shape: TypeAlias = tuple[Dim, ...]
Dims: TypeAlias = Sequence[Dim | None]
"""A shape in which some dimensions may be unknown."""
Contents: TypeAlias = np.ndarray[Any, np.dtype[Any]]
"""The contents of a small tensor: an array of objects, each a `Dim` or a bool."""


class Operation(Protocol):
    """A node; inside a function's body, with the attributes of the call."""

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
    """The type, shape and contents of one tensor, as far as they are known.

    Attributes:
        type: Its type.
        shape: Its shape.
        contents: Its elements, if they are a few integers, sizes or booleans.
        array: Its numbers, if they are few and the same in every run.
    """

    type: ir.TypeProtocol | None = None
    shape: Dims | None = None
    contents: Contents | None = None
    array: Array | None = None

    def forgetting_values(self) -> Fact:
        """The facts without contents, which hold for any tensor of this type and shape."""
        return Fact(self.type, self.shape)


class Known:
    """Facts about the tensors of a model. ``sizes`` replaces open dimensions with numbers."""

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
        """The shape of a tensor; None if its rank is unknown."""
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
        """The elements of a small tensor of integers or booleans; None if they are unknown."""
        if value is None:
            return None
        if value not in self._contents:
            array = self.array(value)
            contents = None
            if array is not None and array.size <= LARGEST_CONTENTS and array.dtype.kind in "biu":
                contents = objects(array.tolist(), array.shape)
            self._contents[value] = contents
        return self._contents[value]

    def constant(self, value: ir.Value | None) -> list[int] | None:
        """The elements of an integer tensor as a flat list, if they are the same in every run."""
        contents = self.contents(value)
        if contents is None:
            return None
        flat = contents.reshape(-1).tolist()
        if all(isinstance(item, int) for item in flat):
            return flat
        return None

    def array(self, value: ir.Value | None) -> Array | None:
        """The numbers of a small tensor of any type, if they are the same in every run."""
        if value is None:
            return None
        if value not in self._arrays:
            self._arrays[value] = self._read(value)
        return self._arrays[value]

    def type(self, value: ir.Value | None) -> ir.TypeProtocol | None:
        """The type of a value, inferred if the file does not state it; None if it is unknown."""
        if value is None:
            return None
        known = self._known_type(value)
        if isinstance(known, ir.DataType):
            return ir.TensorType(known)
        return known

    def dtype(self, value: ir.Value | None) -> ir.DataType | None:
        """The element type of a tensor, inferred if the file does not state it; None if unknown."""
        known = None if value is None else self._known_type(value)
        if known is None or isinstance(known, ir.DataType):
            return known
        return known.dtype

    def _known_type(self, value: ir.Value) -> ir.DataType | ir.TypeProtocol | None:
        """The declared type or the inferred one, whichever applies."""
        if value.const_value is not None:
            return value.const_value.dtype
        declared = value.type
        inferred = self._types.get(value)
        # The body of a function may declare a type that holds for another call only.
        if self._in_function and inferred is not None:
            return inferred
        if declared is None or declared.dtype == ir.DataType.UNDEFINED:
            return inferred
        return declared

    def fact(self, value: ir.Value | None) -> Fact | None:
        """All facts of a value; None for an optional input that is absent."""
        if value is None:
            return None
        return Fact(self.type(value), self.shape(value), self.contents(value), self.array(value))

    def state(self, value: ir.Value, fact: Fact) -> None:
        """Replace the facts of a value."""
        self._shapes[value] = self._completed(value, fact.shape)
        self._types[value] = fact.type
        self._contents[value] = fact.contents
        self._arrays[value] = fact.array
        if fact.contents is None and fact.array is not None:
            del self._contents[value]  # they are computed from the array

    def _settled(self, value: ir.Value, inferred: Dims | None) -> Shape | None:
        """Merge an inferred shape with the declared one, which completes unknown dimensions.

        A declared name replaces a dimension that has no name.
        """
        declared = self._declared(value)
        if inferred is None:
            return declared
        if declared is None or len(declared) != len(inferred):
            return self._completed(value, inferred)
        dims: list[Dim] = []
        for dim, written in zip(inferred, declared, strict=True):
            if dim is None or (is_unnamed(dim) and not is_unnamed(written)):
                dims.append(written)
            else:
                dims.append(dim)
        return possible(tuple(dims))

    def _completed(self, value: ir.Value, inferred: Dims | None) -> Shape | None:
        """An inferred shape with new symbols for unknown dimensions."""
        if inferred is None:
            return None
        dims = (
            self._unnamed(value, axis) if dim is None else dim for axis, dim in enumerate(inferred)
        )
        return possible(tuple(dims))

    def _unnamed(self, value: ir.Value, place: int) -> Dim:
        name = value.name or str(id(value))
        if self._in_function:
            name = f"{name}@{self._calls}"
        return unnamed(name, place)

    def _declared(self, value: ir.Value) -> Shape | None:
        """The shape in the file, with a symbol for each open dimension."""
        tensor = value.const_value
        # The tensor of a graph input is a default: the user may feed one of another shape.
        is_default = value.shape is not None and value.is_graph_input()
        shape = value.shape if tensor is None or is_default else tensor.shape
        if shape is None:
            return None
        dims: list[Dim] = []
        for place, dim in enumerate(shape):
            if isinstance(dim, int):
                dims.append(dim)
            elif dim.value is None or self._in_function:
                # A name inside a function is another size in each call.
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
        """The numbers of a small constant, or of contents without open sizes."""
        contents = self._contents.get(value)
        if contents is not None:
            dtype = self.dtype(value)
            if dtype is None or not all(isinstance(item, int) for item in contents.reshape(-1)):
                return None
            return contents.astype(dtype.numpy())
        tensor = value.const_value
        if tensor is None:
            tensor = constant_tensor(value) if value.producer() is not None else None
        if tensor is None or value.is_graph_input() or is_entry(tensor):
            return None
        return small_array(tensor)


def is_entry(tensor: ir.TensorProtocol) -> bool:
    """Whether integers are of the model's ``state_dict``: another checkpoint may have others."""
    recipe = tensor.metadata_props.get(tags.RECIPE)
    if recipe is None or tensor.dtype.is_floating_point():
        return False
    return recipe != recipe_to_text(CONSTANT)


def possible(shape: Shape) -> Shape | None:
    """Return a shape, or None for a shape that no tensor can have, which a file may state.

    A possible shape has a product of sizes that can be computed and printed.
    """
    elements = math.prod(dim for dim in shape if isinstance(dim, int))
    if len(shape) > MOST_DIMENSIONS or elements > LARGEST:
        return None
    return shape


def small_array(tensor: ir.TensorProtocol) -> Array | None:
    """The numbers of a constant that can describe sizes: integers, or a few other numbers."""
    dtype = tensor.dtype
    most = MOST_ELEMENTS if dtype in WHOLE else _MOST_FRACTIONS
    if tensor.size > most or dtype in _NO_NUMBERS:
        return None
    # isinstance would look at every method of the protocol, which takes longer.
    if ir.ExternalTensor not in type(tensor).__mro__:
        return np.asarray(tensor.numpy())
    if tensor.size > LARGEST_CONTENTS or dtype not in WHOLE:
        return None
    try:
        return np.asarray(tensor.numpy())
    except (FileError, OSError, ValueError):  # the data file is missing or another one
        return None


def constant_tensor(value: ir.Value) -> ir.TensorProtocol | None:
    """The tensor of a ``Constant`` node; None for the output of any other node."""
    node = value.producer()
    if node is None or node.op_type != "Constant" or node.domain != "":
        return None
    written = node.attributes.get("value")
    if written is not None and written.type == ir.AttributeType.TENSOR and not written.is_ref():
        # as_tensor() looks at every method of the protocol, which takes longer.
        tensor: ir.TensorProtocol = written.value
        return tensor
    try:
        return ir.convenience.get_const_tensor(value)
    except (TypeError, ValueError):  # not a valid Constant
        return None


def normalized(axis: int, rank: int) -> int:
    """An axis counted from the front."""
    return axis + rank if axis < 0 else axis


def shape_of(node: Operation, known: Known, place: int = 0) -> Shape:
    """The shape of an input that a rule requires.

    Raises:
        ValueError: The shape is unknown.
    """
    shape = known.shape(node.inputs[place]) if place < len(node.inputs) else None
    if shape is None:
        raise ValueError(f"the shape of input {place} is not known")
    return shape


def axes_of(node: Operation, known: Known, name: str = "axes", place: int = 1) -> list[int] | None:
    """Axes from an attribute or, in newer opsets, an input; None if absent or not constant."""
    if name in node.attributes:
        return list(node.attributes[name].as_ints())
    if place < len(node.inputs):
        return known.constant(node.inputs[place])
    return None


def unknown_dims(rank: Dim) -> list[Dim | None] | None:
    """A shape of unknown dimensions; None if the rank is unknown or larger than any tensor's."""
    if isinstance(rank, int) and 0 <= rank <= MOST_DIMENSIONS:
        return [None] * rank
    return None


def objects(nested: Any, shape: Sequence[int] | None = None) -> Contents:
    """Nested lists as an array of objects."""
    array = np.array(nested, dtype=object)
    return array if shape is None else array.reshape(shape)


def small_contents(contents: Contents) -> bool:
    """Whether contents have few elements, whose numbers fit into ONNX's integers."""
    few = contents.size <= LARGEST_CONTENTS
    return few and all(
        not isinstance(n, int) or -LARGEST - 1 <= n <= LARGEST for n in contents.reshape(-1)
    )
