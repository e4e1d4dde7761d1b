"""Numbers of tokens with and without the key-value cache, computed from other inputs.

A buffer that past and present share is as long as the longest text; the mask input tells how much
of it is used. Other computations that use the length of the cache use these numbers, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from htp_export.editing.editing import Array, add_constant, replace_with
from htp_export.shapes.expressions import evaluate, names_in
from htp_export.shapes.operator_kinds import is_standard
from htp_export.shapes.sizes import Dim
from htp_export.shapes.symbolic import Symbolic


@dataclass(frozen=True)
class Lengths:
    """Rows of the batch, new tokens and all tokens, each as a tensor of one int64 and as a size."""

    batch: ir.Value
    new: ir.Value
    total: ir.Value
    dims: tuple[Dim, Dim, Dim]
    is_from_cache: bool


class CacheLengths:
    """Lengths of one graph; their nodes are created once, and precede all others."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._last: ir.Node | None = None
        self._made: dict[object, ir.Value] = {}
        self._past: dict[ir.Value, Lengths] = {}

    def find(self, dims: tuple[Dim, Dim, Dim], past: ir.Value, known: Symbolic) -> Lengths | None:
        """The lengths of these sizes; None if no input has the batch and the new tokens."""
        batch, new, total = (self._size(dim, known) for dim in dims)
        if batch is None or new is None:
            return None
        is_from_cache = total is None
        if total is None:
            total = self._add("Add", [self._add("Shape", [past], start=2, end=3), new])
        return Lengths(batch, new, total, dims, is_from_cache)

    def of_rows(self, lengths: Lengths) -> tuple[ir.Value, ir.Value, ir.Value]:
        """All tokens.

        And for each row of the batch, its last position and its new tokens, as int32.
        """
        total = self._add("Cast", [lengths.total], to=ir.DataType.INT32)
        new = self._add("Cast", [lengths.new], to=ir.DataType.INT32)
        one = self._constant(np.array([1], np.int32))
        last = self._add("Sub", [total, one])
        last_of_rows = self._add("Expand", [last, lengths.batch])
        return total, last_of_rows, self._add("Expand", [new, lengths.batch])

    def missing(self, lengths: Lengths, *, one: bool) -> tuple[ir.Value, ir.Value]:
        """The pads of a table with a row for each new token, to a row for every token.

        And the row of each.

        ``one``: the table is the same for all rows of the batch.
        """
        zero, step = (self._constant(np.array(number, np.int64)) for number in (0, 1))
        count = lengths.new if one else self._add("Mul", [lengths.batch, lengths.new])
        nothing = self._constant(np.array([0], np.int64))
        lacking = self._add("Max", [self._add("Sub", [lengths.total, count]), nothing])
        pads = self._add("Concat", [nothing, nothing, lacking, nothing], axis=0)
        numbers = self._add("Range", [zero, self._add("Squeeze", [count]), step])
        shape = self._add("Concat", [lengths.batch, lengths.new], axis=0)
        return pads, self._add("Expand" if one else "Reshape", [numbers, shape])

    def add_past(self, lengths: Lengths, past: Iterable[ir.Value]) -> None:
        """Record the lengths of a cache that is an input of the model."""
        if not lengths.is_from_cache:
            self._past |= dict.fromkeys(past, lengths)

    def replace_past_lengths(self, known: Symbolic) -> None:
        """Replace the lengths of recorded caches by the number of tokens before the new ones."""
        for value, lengths in self._past.items():
            past = self._add("Sub", [lengths.total, lengths.new])
            self.replace_shape(value, lengths, past, known)

    def replace_shape(
        self, value: ir.Value, lengths: Lengths, length: ir.Value, known: Symbolic
    ) -> None:
        """Replace the ``Shape`` of a cache of this length by the lengths and constants."""
        shape, computed = known.shape(value), {0: lengths.batch, 2: length}
        for node in [use.node for use in value.uses() if is_standard(use.node, "Shape")]:
            start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", 4)
            axes = range(4)[start:end]
            if shape is None or len(shape) != 4 or node.graph is not self._graph or not axes:
                continue
            parts: list[ir.Value] = []
            for axis in axes:
                part = computed.get(axis)
                parts.append(part or self._constant(np.array([shape[axis]], np.int64)))
            result = parts[0] if len(parts) == 1 else self._add("Concat", parts, axis=0)
            replace_with(node.outputs[0], result)

    def _size(self, dim: Dim, known: Symbolic) -> ir.Value | None:
        """A size as a tensor: a constant, or the size of an input that is no cache."""
        if isinstance(dim, int):
            return self._constant(np.array([dim], np.int64))
        for value in self._graph.inputs:
            shape = known.shape(value)
            if shape is None or len(shape) > 3 or value.is_initializer():
                continue
            for axis, size in enumerate(shape):
                if size == dim or _equals(str(size), dim):
                    return self._add("Shape", [value], start=axis, end=axis + 1)
        return None

    def _has(self, key: object) -> bool:
        """Whether a value was created, and is still in the graph."""
        return key in self._made and self._made[key].graph is self._graph

    def _constant(self, array: Array) -> ir.Value:
        key = (array.dtype.str, array.tobytes(), array.ndim)
        if not self._has(key):
            self._made[key] = add_constant(self._graph, array, f"length_{array.ravel()[0]}")
        return self._made[key]

    def _add(self, operator: str, inputs: Sequence[ir.Value], **attributes: int) -> ir.Value:
        """The result of a node of the main graph, which is created once."""
        key = (operator, *inputs, *attributes.items())
        if not self._has(key):
            node = ir.node(operator, inputs, attributes)
            if self._last is None or self._last.graph is None:
                self._graph.insert_before(self._graph[0], node)
            else:
                self._graph.insert_after(self._last, node)
            self._last = node
            self._made[key] = node.outputs[0]
        return self._made[key]


def _equals(text: str, dim: Dim) -> bool:
    """Whether an expression of dimensions is equal to a size, by its values at two points."""
    names = sorted(names_in(text))
    if text.isidentifier() or not names or set(names) != names_in(str(dim)):
        return False
    for start, step in ((5, 2), (11, 30)):  # two points tell apart sums, products and minima
        sizes = {name: start + step * position for position, name in enumerate(names)}
        number = evaluate(str(dim), sizes)
        if number is None or evaluate(text, sizes) != number:
            return False
    return True
