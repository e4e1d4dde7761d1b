"""One input of a model as the file declares it, and arrays for it: checked arrays of a user, or random ones."""

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
"""Elements of a generated input: 4 GiB of float32, which is more than a video has."""

Shape = tuple[int | str | None, ...]


@dataclass(frozen=True)
class Input:
    """An input of a model.

    The type is None if it is unknown, or if the input is not a tensor. Each dimension of the shape
    is a size, a name, or None for an open dimension without a name; the shape is None if the rank
    is unknown. ``rows`` is the number of rows of the smallest table that the input indexes; None
    without a table.
    """

    name: str
    type: ir.DataType | None
    shape: Shape | None
    tensor: bool = True
    rows: int | None = None

    @classmethod
    def of(cls, value: ir.Value) -> Input:
        """Create an input from a value of a graph."""
        is_tensor = isinstance(value.type, ir.TensorType)
        is_known = is_tensor and value.dtype != ir.DataType.UNDEFINED
        shape = None
        if value.shape is not None:
            shape = tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)
        dtype = value.dtype if is_known else None
        return cls(str(value.name), dtype, shape, is_tensor, min(_rows(value), default=None))

    def __str__(self) -> str:
        dtype = "no tensor" if self.type is None else self.type.name.lower()
        if self.shape is None:
            return f"{dtype} any shape"
        dims = ["?" if dim is None else str(dim) for dim in self.shape]
        return f"{dtype} [{', '.join(dims)}]"


def _rows(value: ir.Value) -> Iterator[int]:
    """Iterate over the number of rows of each table that a value indexes."""
    for node, position in value.uses():
        table = node.inputs[0] if is_standard(node, "Gather") and position == 1 else None
        if table is not None and table.shape:
            rows = table.shape[node.attributes.get_int("axis", 0)]
            if isinstance(rows, int) and rows > 0:
                yield rows


def is_float(array: Array) -> bool:
    """Return whether an array has a floating-point type, including those of ml_dtypes."""
    return str(array.dtype).startswith(("float", "bfloat"))


def array_for(wanted: Input, value: Any) -> Array:
    """Convert a value of a user to an array for an input; an `InputError` if that is not possible."""
    if wanted.type is None:
        raise InputError(
            f"input {wanted.name!r}: is not a tensor in the model, and cannot be given"
        )
    if hasattr(value, "detach"):  # a torch tensor; torch itself need not be imported for it
        return from_torch(value)
    if wanted.type == ir.DataType.STRING:
        return _text_for(wanted, np.asarray(value))
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    try:
        return np.asarray(value, dtype=wanted.type.numpy())
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"input {wanted.name!r}: cannot be converted to {wanted}: {error}"
        ) from error


def _text_for(wanted: Input, array: Array) -> Array:
    """Return an array of Python strings, as ONNX Runtime returns them; other arrays are returned unchanged."""
    if array.dtype.kind not in "OUS":
        return array
    strings = np.empty(array.shape, object)
    for index, element in np.ndenumerate(array):
        if not isinstance(element, str | bytes):
            raise InputError(
                f"input {wanted.name!r}: has an element of type {type(element).__name__}, but requires strings"
            )
        try:
            text = str(element, "utf-8") if isinstance(element, bytes) else str(element)
        except UnicodeDecodeError as error:
            raise InputError(
                f"input {wanted.name!r}: contains bytes that are not UTF-8: {element!r}"
            ) from error
        strings[index] = text
    return strings


def in_precision_of(wanted: Input, array: Array) -> Array:
    """Convert an array of floats to the precision of an input; other arrays are returned unchanged."""
    if wanted.type is None or not wanted.type.is_floating_point() or not is_float(array):
        return array
    dtype = wanted.type.numpy()
    return array if array.dtype == dtype else array.astype(dtype)


def check_array(wanted: Input, array: Array | ArrayHeader) -> None:
    """Refuse an array, or the header of one, whose type or shape is not that of an input."""
    if not (_has_type(wanted, array) and _has_shape(wanted, array)):
        actual = f"{_type_name(array)} {list(array.shape)}"
        raise InputError(f"input {wanted.name!r}: is {actual}, but the model requires {wanted}")


def _has_type(wanted: Input, array: Array | ArrayHeader) -> bool:
    if wanted.type is None or wanted.type == ir.DataType.STRING:
        return array.dtype.kind in "OUS"
    return bool(array.dtype == wanted.type.numpy())


def _has_shape(wanted: Input, array: Array | ArrayHeader) -> bool:
    if wanted.shape is None:
        return True
    if len(array.shape) != len(wanted.shape):
        return False
    dims = zip(wanted.shape, array.shape, strict=True)
    return all(not isinstance(dim, int) or dim == size for dim, size in dims)


def _type_name(array: Array | ArrayHeader) -> str:
    try:
        return ir.DataType.from_numpy(array.dtype).name.lower()
    except TypeError:
        return str(array.dtype)


def check_elements(name: str, shape: Sequence[int]) -> None:
    """Refuse (`InputError`) to generate an array of this shape: the sizes may come from an untrusted file."""
    if len(shape) > MOST_DIMENSIONS:
        raise InputError(
            f"input {name!r}: has {len(shape)} dimensions; numpy supports at most {MOST_DIMENSIONS}"
        )
    # numpy refuses large sizes also if another dimension is 0
    elements = math.prod(max(int(size), 1) for size in shape)
    if elements > _MOST_ELEMENTS or max(shape, default=0) > _MOST_ELEMENTS:
        raise InputError(
            f"input {name!r}: {list(shape)} has more than {_MOST_ELEMENTS:,} elements, which is too large for "
            "generated values; give smaller sizes, or data"
        )


def random_array(
    wanted: Input, shape: Sequence[int], generator: np.random.Generator, true: float
) -> Array:
    """Create a random array for an input, as in `Inputs.random`; an `InputError` if it is not a tensor of numbers."""
    dtype = wanted.type
    if dtype is None or dtype == ir.DataType.STRING:
        raise InputError(
            f"input {wanted.name!r}: random values cannot be generated for {wanted}; give data"
        )
    check_elements(wanted.name, shape)
    if dtype == ir.DataType.BOOL:
        return np.asarray(generator.random(shape) < true)
    if dtype.is_floating_point():
        if math.prod(shape) == 0:
            return np.zeros(shape, dtype=dtype.numpy())
        return np.asarray(generator.standard_normal(shape, dtype=np.float32)).astype(dtype.numpy())
    bound = min(2, wanted.rows or 2)  # 0 and 1 are valid indices in most tables
    return np.asarray(generator.integers(0, bound, shape)).astype(dtype.numpy())
