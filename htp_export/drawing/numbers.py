"""Numbers as people read them."""

from __future__ import annotations

import math

from htp_export.results.columns import si

__all__ = ["number_text"]


def number_text(value: float, unit: str = "") -> str:
    """A number with its unit.

    Examples:
        >>> number_text(109482240), number_text(0.01234567, "ms"), number_text(3e-7), number_text(437598208, "B")
        ('109,482,240', '0.01235 ms', '3e-07', '437.6 MB')
    """
    if unit == "B":
        return si(value, "B")
    is_whole = math.isfinite(value) and float(value).is_integer()
    text = f"{int(value):,}" if is_whole else f"{value:.4g}"
    return f"{text} {unit}".rstrip()
