"""What the rules for single operators may ask of the walk over the graph that calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import onnx_ir as ir

from htp_export.passes.sizes import Dim

__all__ = ["Contents", "Dims", "Known", "Rule", "Shape"]

Shape: TypeAlias = tuple[Dim, ...]
Dims: TypeAlias = Sequence[Dim | None]
"""A shape some of whose dimensions are not known."""
Contents: TypeAlias = np.ndarray[Any, np.dtype[Any]]
"""What a small tensor holds: an array of objects, each a `Dim` or a bool."""


class Known(Protocol):
    """What is known of the tensors that a node reads.

    Attributes:
        opset: Version of ONNX's own operators.
    """

    opset: int

    def shape(self, value: ir.Value | None) -> Shape | None:
        """The shape of a tensor, or None where not even its rank is known."""

    def rank(self, value: ir.Value | None) -> int | None:
        """The number of its dimensions."""

    def contents(self, value: ir.Value | None) -> Contents | None:
        """What a small tensor of integers or booleans holds, or None where it is not known."""

    def constant(self, value: ir.Value | None) -> list[int] | None:
        """The contents of a tensor of integers as a flat list, if they are the same in every run."""

    def dtype(self, value: ir.Value | None) -> ir.DataType | None:
        """The element type of a tensor, also where the file does not say it; None where it is not known."""


Rule: TypeAlias = Callable[[ir.Node, Known], Sequence[Dims | None] | None]
"""What the shapes of a node's results are; None, as a whole or for one of them, where that is not known."""
