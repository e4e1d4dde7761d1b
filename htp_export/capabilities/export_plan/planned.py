"""A plan as tools other than htp_export see it: names of nodes and tensors, each with its precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.model.tagged import TaggedModel
from htp_export.weights.products import Product, products_of

if TYPE_CHECKING:
    from htp_export.capabilities.quantize.precisions import Method, Precision

__all__ = ["Encoding", "PlannedModel", "TargetFile", "is_float", "weight_encodings"]

Range = tuple[float, float]


@dataclass(frozen=True)
class TargetFile:
    """What a tool reads.

    Attributes:
        content: Plain data, written as JSON; or the text of the file.
        notes: What the user does with it, and what the tool cannot be told, a line each.
    """

    content: dict[str, object] | str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedModel:
    """A model whose nodes have precisions.

    Attributes:
        tagged: The model, without functions.
        precisions: Node → its precision, for the nodes that the plan names.
        rules: Selector → precision, as the plan has them.
        ranges: Name of a tensor → the smallest and the largest value in the data; empty without data.
    """

    tagged: TaggedModel
    precisions: Mapping[ir.Node, Precision]
    rules: Mapping[str, Precision]
    ranges: Mapping[str, Range] = field(default_factory=dict)

    @cached_property
    def nodes(self) -> tuple[ir.Node, ...]:
        """The nodes of the main graph; tools do not look into the graphs of branches and loops."""
        return tuple(self.tagged.model.graph)

    def of(self, *methods: Method) -> dict[Precision, list[ir.Node]]:
        """Precision → its nodes, for the precisions with one of these methods."""
        found: dict[Precision, list[ir.Node]] = {}
        for node in self.nodes:
            precision = self.precisions.get(node)
            if precision is not None and precision.method in methods:
                found.setdefault(precision, []).append(node)
        return found

    def weighted(self, nodes: Iterable[ir.Node]) -> list[Product]:
        """The weights that nodes multiply with or look up."""
        return list(products_of(self.tagged, nodes))

    def check_methods(self, target: str, methods: Sequence[Method]) -> None:
        """Refuse a plan with a precision that a tool does not have.

        Raises:
            InputError: If there is one; the message names the rule.
        """
        for selector, precision in self.rules.items():
            if precision.method not in methods:
                known = ", ".join(sorted(methods))
                raise InputError(f"{target} has no {precision} (rule {selector!r}); it takes the methods {known}")

    def check_names(self) -> None:
        """Refuse nodes that cannot be named: tools know a node by its name.

        Raises:
            InputError: If a node that the plan names has no name, or several nodes have its name.
        """
        counts = Counter(node.name for node in self.nodes)
        for node in self.nodes:
            if node in self.precisions and (not node.name or counts[node.name] > 1):
                owner = next(iter(self.tagged.owners_of(node)), "")
                problem = "has no name" if not node.name else f"shares the name {node.name!r} with another node"
                raise InputError(
                    f"a {node.op_type} of module {owner or '(root)'!r} {problem}; tools know nodes by their names"
                )

    @cached_property
    def float_outputs(self) -> Mapping[ir.Node, tuple[bool, ...]]:
        """Node → for each output, whether it is known to be a tensor of floats."""
        typed = self.tagged.typed
        return {node: tuple(is_float(typed.get(str(value.name))) for value in node.outputs) for node in self.nodes}

    @property
    def inside_subgraphs(self) -> int:
        """Nodes that the plan names in graphs of branches and loops."""
        main = set(self.nodes)
        return sum(node not in main for node in self.precisions)

    def subgraph_notes(self) -> tuple[str, ...]:
        """A line about nodes that the tool cannot be told of."""
        count = self.inside_subgraphs
        return (f"{count} nodes in branches or loops are left out: the file names nodes of the main graph",) * bool(
            count
        )


def is_float(value: ir.Value | None) -> bool:
    """Whether a tensor is known to have elements of floating point."""
    return value is not None and value.dtype is not None and value.dtype.is_floating_point()


def names(nodes: Iterable[ir.Node]) -> list[str]:
    """The names of nodes."""
    return [str(node.name) for node in nodes]


@dataclass(frozen=True)
class Encoding:
    """How a tensor is quantized: ``real = (quantized + offset) * scale``, with quantized values from 0.

    Attributes:
        bits: Bits of an element.
        symmetric: Whether zero is the middle of the range.
        scales: One number, or one for each channel.
        offsets: The same.
    """

    bits: int
    symmetric: bool
    scales: tuple[float, ...]
    offsets: tuple[int, ...]

    @classmethod
    def of_range(cls, low: float, high: float, bits: int, symmetric: bool) -> Encoding:
        """The encoding that covers a range, and zero.

        Examples:
            >>> Encoding.of_range(-1.0, 254.0, 8, symmetric=False)
            Encoding(bits=8, symmetric=False, scales=(1.0,), offsets=(-1,))
            >>> Encoding.of_range(-254.0, 1.0, 8, symmetric=True)
            Encoding(bits=8, symmetric=True, scales=(2.0,), offsets=(-128,))
        """
        low, high = min(low, 0.0), max(high, 0.0)
        if symmetric:
            scale = max(-low, high) / (2 ** (bits - 1) - 1) or 1.0
            return cls(bits, True, (scale,), (-(2 ** (bits - 1)),))
        scale = (high - low) / (2**bits - 1) or 1.0
        return cls(bits, False, (scale,), (round(low / scale),))

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The smallest and the largest value of each channel."""
        largest = 2**self.bits - 1
        pairs = zip(self.scales, self.offsets, strict=True)
        return tuple((offset * scale, (largest + offset) * scale) for scale, offset in pairs)


def weight_encodings(planned: PlannedModel, methods: Sequence[Method]) -> dict[str, Encoding]:
    """Name of each weight that the plan quantizes → how: symmetric, a scale for each channel of the results.

    A weight that nodes of several precisions read is left out.
    """
    from htp_export.capabilities.quantize.precisions import Method

    wanted: dict[ir.Value, set[Precision]] = {}
    used: dict[ir.Value, Product] = {}
    for precision, nodes in planned.of(*Method).items():
        for use in planned.weighted(nodes):
            wanted.setdefault(use.value, set()).add(precision)
            used.setdefault(use.value, use)
    found = {}
    for value, precisions in wanted.items():
        [precision, *others] = precisions
        if not others and precision.method in methods:
            found[str(value.name)] = _weight_encoding(used[value], precision)
    return found


def _weight_encoding(use: Product, precision: Precision) -> Encoding:
    assert use.value.const_value is not None
    values = np.asarray(use.value.const_value.numpy(), np.float64)
    if use.node.op_type == "Gather":  # a table has one scale: its rows are looked up, and summed over by nothing
        largest = np.array([np.abs(values).max(initial=0.0)])
    else:
        axes = tuple(axis for axis in range(values.ndim) if axis != use.channels % values.ndim)
        largest = np.abs(values).max(axis=axes, initial=0.0)
    half = 2 ** (precision.bits - 1)
    scales = np.where(largest > 0, largest / (half - 1), 1.0)
    return Encoding(precision.bits, True, tuple(map(float, scales)), (-half,) * len(scales))
