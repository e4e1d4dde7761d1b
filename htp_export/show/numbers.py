"""Numbers as people read them."""

from __future__ import annotations

import math

__all__ = ["bytes_text", "number_text"]


def number_text(value: float, unit: str = "") -> str:
    """A number with its unit.

    Examples:
        >>> number_text(109482240), number_text(0.01234567, "ms"), number_text(3e-7), number_text(2048, "B")
        ('109,482,240', '0.01235 ms', '3e-07', '2 KiB')
    """
    if unit == "B":
        return bytes_text(value)
    whole = math.isfinite(value) and float(value).is_integer()
    text = f"{int(value):,}" if whole else f"{value:.4g}"
    return f"{text} {unit}".rstrip()


def bytes_text(value: float) -> str:
    """A number of bytes.

    Examples:
        >>> bytes_text(437598208), bytes_text(100)
        ('417.3 MiB', '100 B')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.4g} {units[0]}"
