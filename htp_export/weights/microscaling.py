"""Microscaling (MX): blocks of 32 numbers with a shared scale, a power of two.

The rules are those of the OCP Microscaling Formats (MX) Specification 1.0, section 6.3: the shared
exponent is that of the largest magnitude minus the largest exponent of the element type; elements
are rounded half to even, and saturate
(https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

BLOCK = 32
"""Elements that share a scale."""

_LARGEST_EXPONENT = 127
"""Exponents of E8M0, the type of scales, are from -127 to 127."""

_INT8_FRACTION = 6
"""Fractional bits of an element of MXINT8."""


@dataclass(frozen=True)
class MXElement:
    """The type of the elements of blocks.

    Attributes:
        bits: Bits of an element.
        exponent: The largest exponent of an element.
        largest: The largest finite element.
        kind: The type of its numbers: the name of a type of ``ml_dtypes``; empty for integers.
        stored: The type in which ONNX Runtime's CPU dequantizes all elements exactly.
        standard: The type of ONNX with these numbers; ``stored`` if there is none.
    """

    bits: int
    exponent: int
    largest: float
    kind: str
    stored: ir.DataType
    standard: ir.DataType

    @property
    def fraction(self) -> int:
        """Fractional bits of an integer element, which are part of stored scales."""
        return 0 if self.kind else _INT8_FRACTION

    def rounded(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The nearest elements, half to even, as numbers that are exact in the stored types."""
        clipped = np.clip(array, -self.largest, self.largest)
        if not self.kind:
            return np.asarray(np.rint(clipped * 2.0**self.fraction))
        narrow = clipped.astype(getattr(ml_dtypes, self.kind))
        return np.asarray(narrow.astype(np.float32))


_FLOAT8, _INT8 = ir.DataType.FLOAT8E4M3FN, ir.DataType.INT8
MX_ELEMENTS: Mapping[str, MXElement] = {
    "int8": MXElement(8, 0, 127 / 64, "", _INT8, _INT8),
    "e4m3": MXElement(8, 8, 448.0, "float8_e4m3fn", _FLOAT8, _FLOAT8),
    "e5m2": MXElement(
        8, 15, 57344.0, "float8_e5m2", ir.DataType.FLOAT8E5M2, ir.DataType.FLOAT8E5M2
    ),
    # ONNX has no floats of 6 bits; E4M3 has all of their numbers.
    "e3m2": MXElement(6, 4, 28.0, "float6_e3m2fn", _FLOAT8, _FLOAT8),
    "e2m3": MXElement(6, 2, 7.5, "float6_e2m3fn", _FLOAT8, _FLOAT8),
    "e2m1": MXElement(4, 2, 6.0, "float4_e2m1fn", _FLOAT8, ir.DataType.FLOAT4E2M1),
}
"""Name of an element type → its numbers."""


def blocks_of(length: int) -> int:
    """The number of blocks of an axis; the last one may be shorter."""
    return -(-length // BLOCK)


def microscaled(
    weight: npt.NDArray[Any], element: MXElement, axis: int
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Round a weight in blocks along an axis.

    Args:
        weight: The weight, in floats.
        element: The type of elements.
        axis: The axis that is cut into blocks.

    Returns:
        Elements in the shape of the weight, and scales in float32, with a block for each entry of
        the axis. The weight is their product.

    Examples:
        >>> elements, scales = microscaled(np.float32([[6.0, 1.3, -0.2]]), MX_ELEMENTS["e2m1"], 1)
        >>> elements.tolist(), scales.tolist()
        ([[6.0, 1.5, 0.0]], [[1.0]])
    """
    starts = np.arange(0, weight.shape[axis], BLOCK)
    wide = weight.astype(np.float64)
    largest = np.maximum.reduceat(np.abs(wide), starts, axis)
    # A float is m * 2**exponent with m in [0.5, 1): one more than its exponent in the specification.
    _, exponents = np.frexp(largest)
    shared = exponents.astype(int) - 1 - element.exponent
    shared = np.clip(shared, -_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    shared = np.where(largest == 0, 0, shared)
    spread = np.repeat(shared, BLOCK, axis).take(range(weight.shape[axis]), axis)
    elements = element.rounded(np.ldexp(wide, -spread))
    # -0.0 is 0.0 of the doctest and of integers alike
    return elements + 0.0, np.ldexp(1.0, shared - element.fraction).astype(np.float32)
