"""How much one node computes; the unit that the formulas of all operators give."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from htp_export.capabilities.cost.execution import RunStep

__all__ = ["NOTHING", "Formula", "Formulas", "Work", "nothing", "per_input", "per_output"]


@dataclass(frozen=True, slots=True)
class Work:
    """How much is computed.

    Attributes:
        macs: Multiply-adds of matrix products and convolutions, those inside attention and recurrent layers included.
        other: All other arithmetic, comparisons and logic, in operations on one element; ``exp``, ``tanh`` and ``erf``
            are one operation each.
    """

    macs: int = 0
    other: int = 0


NOTHING = Work()

Formula: TypeAlias = Callable[[RunStep], Work]
"""What a node computes. It raises ``UnknownShapeError`` where it needs a shape that is not known."""

Formulas: TypeAlias = Mapping[tuple[str, str], Formula]
"""``(domain, operator)`` → formula; ONNX's own domain is ``""``."""


def per_output(count: int) -> Formula:
    """So many operations for each element of the output."""
    return lambda step: Work(0, count * math.prod(step.output_shape()))


def per_input(count: int, position: int = 0) -> Formula:
    """So many operations for each element of an input."""
    return lambda step: Work(0, count * math.prod(step.shape(position)))


def nothing(_step: RunStep) -> Work:
    """No work: the operator moves, selects or converts elements."""
    return NOTHING
