"""Formats of fixed point: width and fractional bits of signed integers with a scale of a power of two."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from htp_export.errors import InputError

NARROWEST, WIDEST = 2, 16
"""Widths in bits, with the sign. ONNX has integers of 4, 8 and 16 bits to store them in."""

_PREFIX = "fixed"
_FORMAT = re.compile(rf"(?:{_PREFIX})?(\d+)\.(\d+)", re.ASCII)
_LONGEST = 16  # characters of a format: a longer number is a mistake


@dataclass(frozen=True)
class FixedFormat:
    """Numbers ``level * 2**-fraction`` with levels from ``-2**(width - 1)`` to ``2**(width - 1) - 1``.

    A float is rounded to the nearest number, half to even, and saturates at both ends: as
    ``QuantizeLinear`` of ONNX and ``torch.fake_quantize_per_tensor_affine`` do with this scale.

    Attributes:
        width: Bits of a number, with the sign.
        fraction: The bits after the binary point.

    Examples:
        >>> format = FixedFormat.of("6.2")
        >>> format.scale, format.lowest, format.highest, format.storage.name
        (0.25, -32, 31, 'INT8')
        >>> (format.levels(np.float32([0.375, 0.625, -9.0])) * format.scale).tolist()
        [0.5, 0.5, -8.0]
    """

    width: int
    fraction: int

    @classmethod
    def of(cls, value: Any) -> FixedFormat:
        """Parse a format, such as ``8.4``; an `InputError` describes the problem.

        Numbers are refused: 16.10 would be 16.1.
        """
        is_text = isinstance(value, str) and len(value) <= _LONGEST
        found = _FORMAT.fullmatch(value) if is_text else None
        if found is None:
            raise InputError(
                f"{value!r} is no fixed-point format; write width and fractional bits as a text, "
                "such as '8.4', or 'float32' for a part that stays"
            )
        width, fraction = int(found[1]), int(found[2])
        if not NARROWEST <= width <= WIDEST:
            raise InputError(
                f"{value!r} is {width} wide; choose a width from {NARROWEST} to {WIDEST} bits"
            )
        if fraction > width:
            raise InputError(
                f"{value!r} has {fraction} fractional bits, more than its width of {width}; "
                f"choose at most {width}"
            )
        return cls(width, fraction)

    @property
    def name(self) -> str:
        """The name of the type, such as ``fixed8.4``."""
        return f"{_PREFIX}{self.width}.{self.fraction}"

    @property
    def scale(self) -> float:
        """The distance of two neighbours."""
        return 2.0**-self.fraction

    @property
    def lowest(self) -> int:
        """The smallest level."""
        return -(1 << (self.width - 1))

    @property
    def highest(self) -> int:
        """The largest level."""
        return (1 << (self.width - 1)) - 1

    @property
    def storage(self) -> ir.DataType:
        """The narrowest integer of ONNX that has all levels."""
        if self.width <= 4:
            return ir.DataType.INT4
        return ir.DataType.INT8 if self.width <= 8 else ir.DataType.INT16

    def levels(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The levels of an array of floats, as integers of the storage type."""
        # A product with a power of two is exact.
        nearest = np.rint(array.astype(np.float64) / self.scale)
        clipped = np.clip(nearest, self.lowest, self.highest)
        return clipped.astype(np.int16).astype(self.storage.numpy())


_FORMATS = [
    FixedFormat(width, fraction)
    for width in range(NARROWEST, WIDEST + 1)
    for fraction in range(width + 1)
]
FIXED_BITS = {each.name: each.width for each in _FORMATS}
"""Name of each type → bits of its numbers."""
