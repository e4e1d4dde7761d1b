"""Attention as files write it: a product of queries and keys, scaled, capped and masked, and heads set apart."""

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
"""From a value to the node of given operators that makes it, as `producer_of`; None where a match may not go on."""


class Placed(NamedTuple):
    """A tensor of batch, heads, length and features; or, if it is not turned yet, of batch, length, heads, features."""

    value: ir.Value
    is_turned: bool = True

    def before_turning(self, known: Symbolic, step: Step = producer_of) -> Placed:
        """What a ``Transpose`` put the heads first of; itself where none did."""
        turn = step(self.value, "Transpose") if self.is_turned else None
        source = (
            turn.inputs[0] if turn is not None and permutation(turn, known) == HEADS_FIRST else None
        )
        return self if source is None else Placed(source, is_turned=False)

    def joint(self, known: Symbolic, step: Step = producer_of) -> ir.Value | None:
        """The tensor of batch, length and features whose features a ``Reshape`` set apart by heads."""
        apart, shape = (
            None if self.is_turned else step(self.value, "Reshape"),
            known.shape(self.value),
        )
        joint = apart.inputs[0] if apart is not None else None
        if joint is None or shape is None or len(shape) != 4:
            return None
        return joint if known.shape(joint) == (*shape[:2], shape[2] * shape[3]) else None


def turned_back(value: ir.Value, known: Symbolic) -> tuple[ir.Node | None, ir.Node | None]:
    """The only consumer of a result, if it puts the length before the heads; and the one that joins the heads then."""
    turn = only_consumer(value, "Transpose")
    if turn is None or permutation(turn, known) != HEADS_FIRST:
        return None, None
    join, shape = only_consumer(turn.outputs[0], "Reshape"), known.shape(turn.outputs[0])
    if (
        join is None
        or shape is None
        or known.shape(join.outputs[0]) != (*shape[:2], shape[2] * shape[3])
    ):
        return turn, None
    return turn, join


class Scores(NamedTuple):
    """The parts of scores: a product of queries and turned keys, scaled, capped, and with a summand."""

    product: ir.Node
    queries: ir.Value
    keys: ir.Value
    bias: ir.Value | None
    scale: float
    softcap: float


def match_scores(value: ir.Value | None, step: Step = producer_of) -> Scores | None:
    """The parts of what a softmax reads; None if it is anything else, or if its scale is not positive."""
    total = step(value, "Add")
    if total is None:
        return _match_product(value, None, step)
    sides = (_match_product(total.inputs[place], total.inputs[1 - place], step) for place in (0, 1))
    return next((side for side in sides if side is not None), None)


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
    """The tensor that a tensor is a multiple of, and the factor."""
    factor = 1.0
    while (found := multiple(step(value, "Mul", "Div"))) is not None:
        value, factor = found[0], factor * float(found[1])
    return value, factor


def guarded(node: ir.Node | None) -> ir.Value | None:
    """The value in which a ``Where`` replaces NaN by zero; None for other nodes."""
    if node is None:
        return None
    test, zero, value = (
        producer_of(node.inputs[0], "IsNaN"),
        constant_array(node.inputs[1], 1),
        node.inputs[2],
    )
    if test is None or test.inputs[0] is not value or zero is None or zero.any():
        return None
    return value


_HIDING = -1e4
"""A summand that makes a share of a softmax zero; what hides is the lowest number of the type, or close to it."""


@dataclass(frozen=True)
class Mask:
    """A mask that is added to scores."""

    visible: ir.Value  # the booleans that it is made of
    hiding: float  # the number that is added for what is not visible
    causal: bool  # whether no query sees a key after its own
    # whether every query sees itself unless it is hidden as a key from all queries, as padding is
    by_keys: bool


def read_mask(value: ir.Value, known: Symbolic) -> Mask | None:
    """What is known of a mask of batch, heads, queries and keys; None where it is not made of booleans."""
    shape = known.shape(value)
    if shape is None or len(shape) < 2:
        return None
    found = _additive(value, known)
    if found is None:
        return None
    causal, by_keys = _Rows(known, shape[-2], shape[-1]).read(found[0])
    return Mask(*found, causal=causal or shape[-2] == 1, by_keys=by_keys)


def hides_rows(condition: ir.Value | None, visible: ir.Value, known: Symbolic) -> bool:
    """Whether a condition is true for the queries that see no key: fewer than one of the booleans is true."""
    less = producer_of(condition, "Less")
    total = producer_of(less.inputs[0], "ReduceSum") if less is not None else None
    cast = producer_of(total.inputs[0], "Cast") if total is not None else None
    if less is None or total is None or cast is None or cast.inputs[0] is not visible:
        return False
    limit, axes = (
        constant_array(less.inputs[1], 1),
        known.constant(total.inputs[1]) if len(total.inputs) > 1 else None,
    )
    rank = known.rank(visible)
    return (
        limit is not None and limit.item() == 1 and rank is not None and axes in ([-1], [rank - 1])
    )


def _additive(value: ir.Value | None, known: Symbolic) -> tuple[ir.Value, float] | None:
    """The booleans of a mask, true for what is visible, and the number for what is not."""
    for _ in range(8):
        node = producer_of(value, "Where", "Mul", "Expand", "Unsqueeze", "Identity", "Add", "Cast")
        if node is None:
            return None
        if node.op_type == "Where":
            condition, *choices = node.inputs
            there, hidden = (_number(choice) for choice in choices)
            if condition is None or hidden is None or there != 0 or not _hides(hidden):
                return None
            return condition, hidden
        if node.op_type == "Mul":
            return _scaled(node)
        if node.op_type == "Add":  # positions that count, as of ALiBi, and a mask
            parts = (_additive(each, known) for each in node.inputs)
            return next((part for part in parts if part is not None), None)
        value = node.inputs[0]
    return None


def _scaled(node: ir.Node) -> tuple[ir.Value, float] | None:
    """Zeros and ones, the ones for what is hidden, times a large negative number."""
    for place in (0, 1):
        number = _number(node.inputs[1 - place])
        cast = producer_of(node.inputs[place], "Cast")
        negated = producer_of(cast.inputs[0], "Not") if cast is not None else None
        if (
            negated is not None
            and negated.inputs[0] is not None
            and number is not None
            and _hides(number)
        ):
            return negated.inputs[0], number
    return None


def _number(value: ir.Value | None) -> float | None:
    array = constant_array(value, 1)
    return None if array is None or array.size != 1 else float(array.item())


def _hides(number: float | None) -> bool:
    return number is not None and number <= _HIDING


@dataclass(frozen=True)
class _Rows:
    """Reads booleans of queries and keys; the queries are the last ones of the keys."""

    known: Symbolic
    queries: Dim
    keys: Dim

    def read(self, value: ir.Value | None, depth: int = 24) -> tuple[bool, bool]:
        """Whether no query sees a later key, and whether each sees itself, but for keys that all queries miss."""
        contents = self.known.contents(value)
        if contents is not None and contents.size == 1:
            return False, contents.item() is True
        node, shape = value.producer() if value is not None else None, self.known.shape(value)
        if node is None or node.domain or not depth:
            return False, False
        if node.op_type == "And":
            (one, own), (other, its) = (self.read(each, depth - 1) for each in node.inputs)
            return one or other, own and its
        if node.op_type in ("Expand", "Identity", "Unsqueeze", "Cast"):
            found = self.read(node.inputs[0], depth - 1)
            if any(found):
                return found
        compared = self._compared(node)
        if compared is not None:
            nearest, farthest = compared
            return nearest is not None and nearest >= 0, (nearest or 0) <= 0 and (
                farthest is None or farthest >= 0
            )
        return False, shape is not None and len(shape) >= 2 and shape[-2] == 1

    def _compared(self, node: ir.Node) -> tuple[int | None, int | None] | None:
        """How far behind the query a visible key is at least and at most, of a comparison of places."""
        order = {
            "LessOrEqual": (1, 0),
            "Less": (1, 1),
            "GreaterOrEqual": (-1, 0),
            "Greater": (-1, 1),
        }.get(node.op_type)
        if order is None:
            return None
        sign, strict = order
        first, second = (self._place(each) for each in node.inputs)
        if first is None or second is None or first[0] == second[0]:
            return None
        if first[0] == "query":  # query >= key is key <= query
            first, second, sign = second, first, -sign
        distance = second[1] - first[1]  # key + first <= query + second
        if not isinstance(distance, int):
            return None
        return (strict - distance, None) if sign > 0 else (None, -distance - strict)

    def _place(self, value: ir.Value | None) -> tuple[str, Dim] | None:
        """Whether numbers are the places of queries or of keys, and how much is added to them."""
        shape = self.known.shape(value)
        if shape is None or len(shape) < 2 or (shape[-1] != 1) == (shape[-2] != 1):
            return None
        kind: str = "key" if shape[-1] != 1 else "query"
        shift: Dim = 0
        for _ in range(12):
            node = producer_of(
                value, "Add", "Sub", "Unsqueeze", "Expand", "Reshape", "Cast", "Identity", "Range"
            )
            if node is None:
                return None
            if node.op_type == "Range":
                start, step = self._scalar(node.inputs[0]), self._scalar(node.inputs[2])
                if start is None or step != 1:
                    return None
                return kind, shift + start - (0 if kind == "key" else self.keys - self.queries)
            if node.op_type in ("Add", "Sub"):
                numbers = [self._scalar(each) for each in node.inputs]
                if numbers[1] is not None:
                    value, shift = (
                        node.inputs[0],
                        shift + (numbers[1] if node.op_type == "Add" else -numbers[1]),
                    )
                elif numbers[0] is not None and node.op_type == "Add":
                    value, shift = node.inputs[1], shift + numbers[0]
                else:
                    return None
            elif (
                node.op_type == "Reshape"
                and sum(size != 1 for size in self.known.shape(node.outputs[0]) or ()) != 1
            ):
                return None
            else:
                value = node.inputs[0]
        return None

    def _scalar(self, value: ir.Value | None) -> Dim | None:
        contents = self.known.contents(value)
        return contents.item() if contents is not None and contents.size == 1 else None
