"""One input of a model as the file declares it, and arrays for it: given ones, checked, or random ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.files.npz_file import ArrayHeader
from htp_export.format.bounds import MOST_DIMENSIONS
from htp_export.runtime.arrays import Array, from_torch
from htp_export.shapes.operator_kinds import is_standard

_MOST_ELEMENTS = 1 << 30
"""Elements of an input that is made up: 4 GiB of float32, and more than any video has."""

Shape = tuple[int | str | None, ...]


@dataclass(frozen=True)
class Input:
    """An input of a model.

    The type is None if it is unknown, or the input is not a tensor. The shape has for each
    dimension a size, a name, or None for an open dimension without a name; it is None if the rank
    is unknown. ``rows`` are those of the smallest table in which it is looked up; None if there is
    no table.
    """

    name: str
    type: ir.DataType | None
    shape: Shape | None
    tensor: bool = True
    rows: int | None = None

    @classmethod
    def of(cls, value: ir.Value) -> Input:
        """Create one from a value of a graph."""
        tensor = isinstance(value.type, ir.TensorType)
        known = tensor and value.dtype != ir.DataType.UNDEFINED
        shape = None
        if value.shape is not None:
            shape = tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)
        return cls(
            str(value.name),
            value.dtype if known else None,
            shape,
            tensor,
            min(_rows(value), default=None),
        )

    def __str__(self) -> str:
        shape = (
            "any shape"
            if self.shape is None
            else f"[{', '.join('?' if d is None else str(d) for d in self.shape)}]"
        )
        return f"{self.type.name.lower() if self.type is not None else 'no tensor'} {shape}"


def _rows(value: ir.Value) -> Iterator[int]:
    """The rows of each table in which a value is looked up."""
    for node, place in value.uses():
        table = node.inputs[0] if is_standard(node, "Gather") and place == 1 else None
        if table is not None and table.shape:
            rows = table.shape[node.attributes.get_int("axis", 0)]
            if isinstance(rows, int) and rows > 0:
                yield rows


def is_float(array: Array) -> bool:
    """Return whether an array has a floating-point type, also one that numpy does not have itself."""
    return str(array.dtype).startswith(("float", "bfloat"))


def array_for(wanted: Input, value: Any) -> Array:
    """Convert a given value to an array for an input; an `InputError` if that is not possible."""
    if wanted.type is None:
        raise InputError(f"input {wanted.name!r}: is no tensor in the model, which cannot be fed")
    if hasattr(value, "detach"):  # a torch tensor; torch itself need not be imported for it
        return from_torch(value)
    if wanted.type == ir.DataType.STRING:
        return _text_for(wanted, np.asarray(value))
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    try:
        return np.asarray(value, dtype=wanted.type.numpy())
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"input {wanted.name!r}: cannot be made {wanted}: {error}") from error


def _text_for(wanted: Input, array: Array) -> Array:
    """An array of text as ONNX Runtime returns one, of Python's strings; other arrays as they are."""
    if array.dtype.kind not in "OUS":
        return array
    found = np.empty(array.shape, object)
    for place, each in np.ndenumerate(array):
        if not isinstance(each, str | bytes):
            raise InputError(
                f"input {wanted.name!r}: has an element of type {type(each).__name__}, and takes strings"
            )
        try:
            found[place] = str(each, "utf-8") if isinstance(each, bytes) else str(each)
        except UnicodeDecodeError as error:
            raise InputError(
                f"input {wanted.name!r}: has bytes that are no text in UTF-8: {each!r}"
            ) from error
    return found


def in_precision_of(wanted: Input, array: Array) -> Array:
    """An array of floats in the precision of an input; other arrays as they are."""
    kind = wanted.type
    if (
        kind is None
        or not kind.is_floating_point()
        or not is_float(array)
        or array.dtype == kind.numpy()
    ):
        return array
    return array.astype(kind.numpy())


def check_array(wanted: Input, array: Array | ArrayHeader) -> None:
    """Refuse an array, or the header of one, with another type or shape than an input has."""
    expected = (
        wanted.type.numpy()
        if wanted.type is not None and wanted.type != ir.DataType.STRING
        else None
    )
    fits = array.dtype == expected if expected is not None else array.dtype.kind in "OUS"
    if fits and wanted.shape is not None:
        fits = len(array.shape) == len(wanted.shape) and all(
            not isinstance(dim, int) or dim == size
            for dim, size in zip(wanted.shape, array.shape, strict=True)
        )
    if not fits:
        actual = f"{_type_name(array)} {list(array.shape)}"
        raise InputError(f"input {wanted.name!r}: is {actual}, and the model wants {wanted}")


def _type_name(array: Array | ArrayHeader) -> str:
    try:
        return ir.DataType.from_numpy(array.dtype).name.lower()
    except TypeError:
        return str(array.dtype)


def check_elements(name: str, shape: Sequence[int]) -> None:
    """Refuse the shape of an input for which no array is made (`InputError`): a file may state any."""
    if len(shape) > MOST_DIMENSIONS:
        raise InputError(
            f"input {name!r}: has {len(shape)} dimensions, and numpy at most {MOST_DIMENSIONS}"
        )
    # numpy has no other shape of an empty array either
    elements = math.prod(max(int(size), 1) for size in shape)
    if elements > _MOST_ELEMENTS or max(shape, default=0) > _MOST_ELEMENTS:
        raise InputError(
            f"input {name!r}: {list(shape)} are more than {_MOST_ELEMENTS:,} elements, which are not made up; "
            "give smaller sizes, or data"
        )


def random_array(
    wanted: Input, shape: Sequence[int], generator: np.random.Generator, true: float
) -> Array:
    """Create a random array for an input, see `Inputs.random`; an `InputError` if it is not a tensor of numbers."""
    kind = wanted.type
    if kind is None or kind == ir.DataType.STRING:
        raise InputError(
            f"input {wanted.name!r}: no random value can be made of {wanted}; give data"
        )
    check_elements(wanted.name, shape)
    if kind == ir.DataType.BOOL:
        return np.asarray(generator.random(shape) < true)
    if kind.is_floating_point():
        if math.prod(shape) == 0:
            return np.zeros(shape, dtype=kind.numpy())
        return np.asarray(generator.standard_normal(shape, dtype=np.float32)).astype(kind.numpy())
    return np.asarray(generator.integers(0, min(2, wanted.rows or 2), shape)).astype(kind.numpy())
