"""What the rules for single operators may ask of the walk over the graph that calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import onnx_ir as ir

from htp_export.shapes.sizes import LARGEST, Dim

__all__ = [
    "LARGEST_CONTENTS",
    "MOST_ELEMENTS",
    "Array",
    "ContentRule",
    "Contents",
    "Dims",
    "Known",
    "Operation",
    "Rule",
    "Shape",
    "TypeRule",
    "axes_of",
    "normalized",
    "objects",
    "small_contents",
    "unknown_dims",
]

LARGEST_CONTENTS = 64
"""Tensors of more elements than this are not looked into element by element."""

MOST_ELEMENTS = 8192
"""Numbers of larger tensors are not kept: they are data, not shapes."""

_MOST_DIMENSIONS = 64  # of a tensor whose sizes are not known; numpy has no more, and a file may claim any number

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
    def name(self) -> str | None: ...
    @property
    def inputs(self) -> Sequence[ir.Value | None]: ...
    @property
    def outputs(self) -> Sequence[ir.Value]: ...
    @property
    def attributes(self) -> Any: ...


class Known(Protocol):
    """What is known of the tensors that a node reads."""

    def shape(self, value: ir.Value | None) -> Shape | None:
        """The shape of a tensor, or None where not even its rank is known."""

    def rank(self, value: ir.Value | None) -> int | None:
        """The number of its dimensions."""

    def contents(self, value: ir.Value | None) -> Contents | None:
        """What a small tensor of integers or booleans holds, or None where it is not known."""

    def constant(self, value: ir.Value | None) -> list[int] | None:
        """The contents of a tensor of integers as a flat list, if they are the same in every run."""

    def array(self, value: ir.Value | None) -> Array | None:
        """The numbers in a small tensor of any type, if they are the same in every run."""

    def dtype(self, value: ir.Value | None) -> ir.DataType | None:
        """The element type of a tensor, also where the file does not say it; None where it is not known."""


def normalized(axis: int, rank: int) -> int:
    """An axis counted from the front."""
    return axis + rank if axis < 0 else axis


def axes_of(node: Operation, known: Known, name: str = "axes", place: int = 1) -> list[int] | None:
    """Axes as an attribute, or as an input of newer opsets; None where there are none or they are not constant."""
    if name in node.attributes:
        return list(node.attributes[name].as_ints())
    return known.constant(node.inputs[place]) if place < len(node.inputs) else None


def unknown_dims(rank: Dim) -> list[Dim | None] | None:
    """A shape of which only the rank is known; None where that is not known, or no tensor has so many dimensions."""
    return [None] * rank if isinstance(rank, int) and 0 <= rank <= _MOST_DIMENSIONS else None


def objects(nested: Any, shape: Sequence[int] | None = None) -> Contents:
    """Nested lists as an array of objects."""
    array = np.array(nested, dtype=object)
    return array if shape is None else array.reshape(shape)


def small_contents(contents: Contents) -> bool:
    """Whether there are few elements, and numbers among them are such as ONNX's integers can hold."""
    few = contents.size <= LARGEST_CONTENTS
    return few and all(not isinstance(n, int) or -LARGEST - 1 <= n <= LARGEST for n in contents.reshape(-1))


Rule: TypeAlias = Callable[[Operation, Known], Sequence[Dims | None] | None]
"""What the shapes of a node's results are; None, as a whole or for one of them, where that is not known."""
ContentRule: TypeAlias = Callable[[Operation, Known], Contents | None]
"""What the first result holds."""
TypeRule: TypeAlias = Callable[[Operation, Known], ir.DataType | None]
"""What the element type of the first result is."""
