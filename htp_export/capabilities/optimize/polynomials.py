"""Values of a graph as polynomials of others: sums and products in any order are the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import onnx_ir as ir

from htp_export.model.neighbours import producer_of
from htp_export.shapes.symbolic import Symbolic

Exponents: TypeAlias = tuple[int, int]
"""The exponents of two variables."""

Polynomial: TypeAlias = Mapping[Exponents, float]
"""Exponents → the coefficient."""

_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Neg", "Pow")
_DEPTH = 8
"""The longest path of nodes; the usual forms of GELU have six."""
_LARGEST_EXPONENT = 4
"""The sum of exponents in a term: a GELU has 3; without a limit, products of products have any."""
_TOLERANCE = 1e-6
"""The largest relative difference of coefficients: in float32, they differ by 1e-7."""


def is_close(one: Polynomial, other: Polynomial) -> bool:
    """Whether two polynomials have the same terms, up to rounding in float32.

    Examples:
        >>> is_close({(1, 0): 0.5}, {(1, 0): 0.50000001}), is_close({(1, 0): 0.5}, {(2, 0): 0.5})
        (True, False)
    """
    if one.keys() != other.keys():
        return False
    return all(
        abs(one[term] - number) <= _TOLERANCE * abs(number) for term, number in other.items()
    )


def polynomial(
    value: ir.Value | None, variables: Mapping[ir.Value, Exponents], known: Symbolic
) -> Polynomial | None:
    """A value as a polynomial of variables; None if it depends on anything else.

    Args:
        value: The value.
        variables: Variable → its exponents: ``(1, 0)`` or ``(0, 1)``.
        known: The constants of the graph.

    Examples:
        >>> x = ir.val("x", ir.DataType.FLOAT, [2])
        >>> square = ir.node("Mul", [x, x])
        >>> total = ir.node("Add", [*square.outputs, x])
        >>> graph = ir.Graph([x], total.outputs, nodes=[square, total], opset_imports={"": 20})
        >>> polynomial(total.outputs[0], {x: (1, 0)}, Symbolic(graph))
        {(2, 0): 1.0, (1, 0): 1.0}
    """
    return _Reader(variables, known).read(value, _DEPTH)


def cone(value: ir.Value, known: Symbolic) -> Iterator[ir.Value]:
    """The values that a value is computed from by arithmetic, itself first, without constants."""
    edge = {value: None}
    seen = set[ir.Value]()
    for _ in range(_DEPTH):
        following: dict[ir.Value, None] = {}
        for each in edge:
            if each in seen:
                continue
            seen.add(each)
            yield each
            node = producer_of(each, *_ARITHMETIC)
            for operand in () if node is None else node.inputs:
                if operand is not None and number_of(operand, known) is None:
                    following[operand] = None
        edge = following


def number_of(value: ir.Value | None, known: Symbolic) -> float | None:
    """The number of a constant of one element; None for other tensors."""
    array = known.array(value)
    if array is None or array.size != 1 or array.dtype.kind not in "fiu":
        return None
    return float(array.item())


class _Reader:
    """Reads values, each once: a value may be reached on many paths."""

    def __init__(self, variables: Mapping[ir.Value, Exponents], known: Symbolic) -> None:
        self._variables = variables
        self._known = known
        self._read: dict[ir.Value, Polynomial | None] = {}

    def read(self, value: ir.Value | None, depth: int) -> Polynomial | None:
        if value is None:
            return None
        if value in self._variables:
            return {self._variables[value]: 1.0}
        number = number_of(value, self._known)
        if number is not None:
            return {(0, 0): number}
        node = producer_of(value, *_ARITHMETIC)
        if node is None or not depth:
            return None
        if value not in self._read:
            self._read[value] = self._of(node, depth - 1)
        return self._read[value]

    def _of(self, node: ir.Node, depth: int) -> Polynomial | None:
        first = self.read(node.inputs[0], depth)
        if first is None:
            return None
        if node.op_type == "Neg":
            return _scaled(first, -1)
        second = self.read(node.inputs[1], depth)
        if second is None:
            return None
        if node.op_type == "Add":
            return _sum(first, second)
        if node.op_type == "Sub":
            return _sum(first, _scaled(second, -1))
        if node.op_type == "Mul":
            return _product(first, second)
        number = second.get((0, 0), 0.0) if len(second) == 1 else 0.0
        if not number:
            return None
        return _scaled(first, 1 / number) if node.op_type == "Div" else _power(first, number)


def _scaled(terms: Polynomial, factor: float) -> Polynomial:
    return {exponents: number * factor for exponents, number in terms.items()}


def _sum(one: Polynomial, other: Polynomial) -> Polynomial:
    total = dict(one)
    for exponents, number in other.items():
        total[exponents] = total.get(exponents, 0.0) + number
    return total


def _product(one: Polynomial, other: Polynomial) -> Polynomial | None:
    total: dict[Exponents, float] = {}
    for (x, y), first in one.items():
        for (u, v), second in other.items():
            if x + u + y + v > _LARGEST_EXPONENT:
                return None
            exponents = (x + u, y + v)
            total[exponents] = total.get(exponents, 0.0) + first * second
    return total


def _power(terms: Polynomial, exponent: float) -> Polynomial | None:
    if exponent not in range(1, _LARGEST_EXPONENT + 1):
        return None
    result: Polynomial | None = terms
    for _ in range(int(exponent) - 1):
        result = None if result is None else _product(result, terms)
    return result
