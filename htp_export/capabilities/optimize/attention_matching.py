"""Attention in single nodes: product of queries and keys, scale, cap, mask, and split heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.passes.eliminate_redundant_transposes import permutation
from htp_export.editing.editing import constant_array, multiple
from htp_export.model.neighbours import only_consumer, producer_of
from htp_export.shapes.sizes import Dim
from htp_export.shapes.symbolic import Symbolic

HEADS_FIRST = [0, 2, 1, 3]
"""From batch, length, heads, features to batch, heads, length, features; and back."""

Step: TypeAlias = Callable[..., ir.Node | None]
"""The producer of a value, if it is one of some operators, as `producer_of`; None ends a match."""


class Placed(NamedTuple):
    """A tensor of an attention.

    Its axes are batch, heads, length and features; without ``heads_first``: batch, length, heads
    and features.
    """

    value: ir.Value
    heads_first: bool = True

    def before_transpose(self, known: Symbolic, step: Step = producer_of) -> Placed:
        """The input of the ``Transpose`` that moves the heads first; itself if there is none."""
        transpose = step(self.value, "Transpose") if self.heads_first else None
        if transpose is None or permutation(transpose, known) != HEADS_FIRST:
            return self
        source = transpose.inputs[0]
        return self if source is None else Placed(source, heads_first=False)

    def merged(self, known: Symbolic, step: Step = producer_of) -> ir.Value | None:
        """The tensor of batch, length and features that a ``Reshape`` splits into heads."""
        if self.heads_first:
            return None
        split, shape = step(self.value, "Reshape"), known.shape(self.value)
        merged = split.inputs[0] if split is not None else None
        if merged is None or shape is None or len(shape) != 4:
            return None
        return merged if known.shape(merged) == (*shape[:2], shape[2] * shape[3]) else None


def match_head_merge(value: ir.Value, known: Symbolic) -> tuple[ir.Node | None, ir.Node | None]:
    """The ``Transpose`` that moves heads back, and the ``Reshape`` that merges them.

    Each is the only consumer of its input; None for a node that is not there.
    """
    transpose = only_consumer(value, "Transpose")
    if transpose is None or permutation(transpose, known) != HEADS_FIRST:
        return None, None
    result = transpose.outputs[0]
    merge, shape = only_consumer(result, "Reshape"), known.shape(result)
    if merge is None or shape is None:
        return transpose, None
    merged_shape = (*shape[:2], shape[2] * shape[3])
    return transpose, merge if known.shape(merge.outputs[0]) == merged_shape else None


class Scores(NamedTuple):
    """The parts of scores: a product of queries and transposed keys, scale, cap and summand."""

    product: ir.Node
    queries: ir.Value
    keys: ir.Value
    bias: ir.Value | None
    scale: float
    softcap: float


def match_scores(value: ir.Value | None, step: Step = producer_of) -> Scores | None:
    """The parts of the input of a softmax.

    None if it has another form, or a scale that is not positive.
    """
    total = step(value, "Add")
    if total is None:
        return _match_product(value, None, step)
    for product, bias in (total.inputs, reversed(total.inputs)):
        scores = _match_product(product, bias, step)
        if scores is not None:
            return scores
    return None


def _match_product(value: ir.Value | None, bias: ir.Value | None, step: Step) -> Scores | None:
    softcap = 0.0
    value, scale = _unscaled(value, step)
    capped = step(value, "Tanh")
    if capped is not None:
        value, inner = _unscaled(capped.inputs[0], step)
        softcap, scale = scale, inner * scale
    product = step(value, "MatMul")
    if product is None:
        return None
    queries, first = _unscaled(product.inputs[0], step)
    keys, second = _unscaled(product.inputs[1], step)
    scale *= first * second
    if queries is None or keys is None or not 0 < scale < np.inf or not 0 <= softcap < np.inf:
        return None
    return Scores(product, queries, keys, bias, scale, softcap)


def _unscaled(value: ir.Value | None, step: Step) -> tuple[ir.Value | None, float]:
    """The tensor that constant factors scale, and their product."""
    factor = 1.0
    while (scaling := multiple(step(value, "Mul", "Div"))) is not None:
        value, number = scaling
        factor *= float(number)
    return value, factor


def guarded(node: ir.Node | None) -> ir.Value | None:
    """The value in which a ``Where`` replaces NaN by zero; None for other nodes."""
    if node is None:
        return None
    condition, replacement, value = node.inputs
    test, zero = producer_of(condition, "IsNaN"), constant_array(replacement, 1)
    if test is None or test.inputs[0] is not value or zero is None or zero.any():
        return None
    return value


_HIDING = -1e4
"""The largest summand that hides a key: exp(-1e4) is 0, and masks have the lowest number or close
to it."""


@dataclass(frozen=True)
class Mask:
    """A mask that is added to scores."""

    visible: ir.Value  # the booleans that it is computed from
    hiding: float  # the number that is added to hidden scores
    causal: bool  # whether no query sees a key after its own
    # whether every query sees itself unless it is hidden as a key from all queries, as padding is
    by_keys: bool


def read_mask(value: ir.Value, known: Symbolic) -> Mask | None:
    """The properties of a mask of batch, heads, queries and keys.

    None if it is not made of booleans.
    """
    shape = known.shape(value)
    if shape is None or len(shape) < 2:
        return None
    parts = _additive(value, known)
    if parts is None:
        return None
    visible, hiding = parts
    causal, by_keys = _Rows(known, shape[-2], shape[-1]).read(visible)
    return Mask(visible, hiding, causal=causal or shape[-2] == 1, by_keys=by_keys)


def hides_rows(condition: ir.Value | None, visible: ir.Value, known: Symbolic) -> bool:
    """Whether a condition is true for the queries that see no key.

    It compares the sum of the booleans with 1.
    """
    less = producer_of(condition, "Less")
    total = producer_of(less.inputs[0], "ReduceSum") if less is not None else None
    cast = producer_of(total.inputs[0], "Cast") if total is not None else None
    if less is None or total is None or cast is None or cast.inputs[0] is not visible:
        return False
    limit, rank = constant_array(less.inputs[1], 1), known.rank(visible)
    if limit is None or limit.item() != 1 or rank is None or len(total.inputs) < 2:
        return False
    return known.constant(total.inputs[1]) in ([-1], [rank - 1])


def _additive(value: ir.Value | None, known: Symbolic) -> tuple[ir.Value, float] | None:
    """The booleans of a mask, true for visible keys, and the summand of hidden keys."""
    # exports have fewer nodes here; the bound ends long chains of copies
    for _ in range(8):
        node = producer_of(value, "Where", "Mul", "Expand", "Unsqueeze", "Identity", "Add", "Cast")
        if node is None:
            return None
        if node.op_type == "Where":
            condition, *choices = node.inputs
            shown, hidden = (_number(choice) for choice in choices)
            if condition is None or hidden is None or shown != 0 or not _hides(hidden):
                return None
            return condition, hidden
        if node.op_type == "Mul":
            return _scaled(node)
        if node.op_type == "Add":  # a position bias, as of ALiBi, and a mask
            parts = (_additive(summand, known) for summand in node.inputs)
            return next((part for part in parts if part is not None), None)
        value = node.inputs[0]
    return None


def _scaled(node: ir.Node) -> tuple[ir.Value, float] | None:
    """Ones for hidden keys, and zeros otherwise, times a large negative number."""
    for operand, factor in (node.inputs, reversed(node.inputs)):
        number = _number(factor)
        cast = producer_of(operand, "Cast")
        negated = producer_of(cast.inputs[0], "Not") if cast is not None else None
        visible = negated.inputs[0] if negated is not None else None
        if visible is not None and number is not None and _hides(number):
            return visible, number
    return None


def _number(value: ir.Value | None) -> float | None:
    array = constant_array(value, 1)
    return None if array is None or array.size != 1 else float(array.item())


def _hides(number: float | None) -> bool:
    return number is not None and number <= _HIDING


_COMPARISONS = {
    "LessOrEqual": (1, 0),
    "Less": (1, 1),
    "GreaterOrEqual": (-1, 0),
    "Greater": (-1, 1),
}
"""Comparison → 1 if the first operand is the smaller one, else -1; and 1 if they must differ."""

_POSITION_OPERATORS = (
    "Add",
    "Sub",
    "Unsqueeze",
    "Expand",
    "Reshape",
    "Cast",
    "Identity",
    "Range",
)
"""Operators that compute positions from a ``Range``."""


def _properties_of(nearest: int | None, farthest: int | None) -> tuple[bool, bool]:
    """Whether keys at these distances before the query are no later ones, and include its own."""
    is_causal = nearest is not None and nearest >= 0
    sees_itself = (nearest or 0) <= 0 and (farthest is None or farthest >= 0)
    return is_causal, sees_itself


@dataclass(frozen=True)
class _Rows:
    """The rows of a boolean mask of queries and keys; the queries are the last of the keys."""

    known: Symbolic
    queries: Dim
    keys: Dim

    def read(self, value: ir.Value | None, depth: int = 24) -> tuple[bool, bool]:
        """Whether no query sees a later key, and whether every query sees itself.

        Keys that are hidden from all queries do not count. ``depth`` bounds the recursion, as files
        may have any number of nodes.
        """
        contents = self.known.contents(value)
        if contents is not None and contents.size == 1:
            return False, contents.item() is True
        node = value.producer() if value is not None else None
        if node is None or node.domain or not depth:
            return False, False
        if node.op_type == "And":
            first, second = (self.read(operand, depth - 1) for operand in node.inputs)
            return first[0] or second[0], first[1] and second[1]
        if node.op_type in ("Expand", "Identity", "Unsqueeze", "Cast"):
            properties = self.read(node.inputs[0], depth - 1)
            if any(properties):
                return properties
        distances = self._distances(node)
        if distances is not None:
            return _properties_of(*distances)
        shape = self.known.shape(value)
        is_same_for_queries = shape is not None and len(shape) >= 2 and shape[-2] == 1
        return False, is_same_for_queries

    def _distances(self, node: ir.Node) -> tuple[int | None, int | None] | None:
        """The smallest and largest distance of a visible key before the query.

        None if the node does not compare positions of queries and keys.
        """
        order = _COMPARISONS.get(node.op_type)
        if order is None:
            return None
        sign, strict = order
        first, second = (self._positions(operand) for operand in node.inputs)
        if first is None or second is None or first[0] == second[0]:
            return None
        if first[0] == "query":  # query >= key is key <= query
            first, second, sign = second, first, -sign
        distance = second[1] - first[1]  # key + first <= query + second
        if not isinstance(distance, int):
            return None
        return (strict - distance, None) if sign > 0 else (None, -distance - strict)

    def _positions(self, value: ir.Value | None) -> tuple[str, Dim] | None:
        """Whether numbers are the positions of queries or of keys, and the offset added to them."""
        shape = self.known.shape(value)
        if shape is None or len(shape) < 2 or (shape[-1] != 1) == (shape[-2] != 1):
            return None
        kind = "key" if shape[-1] != 1 else "query"
        offset: Dim = 0
        # exports have fewer nodes here; the bound ends long chains of copies
        for _ in range(12):
            node = producer_of(value, *_POSITION_OPERATORS)
            if node is None:
                return None
            if node.op_type == "Range":
                start, step = self._scalar(node.inputs[0]), self._scalar(node.inputs[2])
                if start is None or step != 1:
                    return None
                first_query = 0 if kind == "key" else self.keys - self.queries
                return kind, offset + start - first_query
            if node.op_type in ("Add", "Sub"):
                shifted = self._shifted(node)
                if shifted is None:
                    return None
                value, number = shifted
                offset = offset + number
            elif node.op_type == "Reshape" and not self._is_vector(node.outputs[0]):
                return None
            else:
                value = node.inputs[0]
        return None

    def _shifted(self, node: ir.Node) -> tuple[ir.Value | None, Dim] | None:
        """The tensor to which an ``Add`` or ``Sub`` adds a number, and the number."""
        first, second = (self._scalar(operand) for operand in node.inputs)
        if second is not None:
            return node.inputs[0], second if node.op_type == "Add" else -second
        if first is not None and node.op_type == "Add":
            return node.inputs[1], first
        return None

    def _is_vector(self, value: ir.Value) -> bool:
        """Whether a tensor has one axis of another size than 1."""
        return sum(size != 1 for size in self.known.shape(value) or ()) == 1

    def _scalar(self, value: ir.Value | None) -> Dim | None:
        contents = self.known.contents(value)
        return contents.item() if contents is not None and contents.size == 1 else None
