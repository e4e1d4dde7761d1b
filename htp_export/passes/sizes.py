"""Sizes of tensors as polynomials of the model's free dimensions, such as ``batch * sequence + 1``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

__all__ = ["Dim", "Size", "divide", "equal", "product", "symbol"]

_Monomial: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Size:
    """A polynomial of free dimensions, none of which is negative; what is constant is an ``int`` instead.

    Attributes:
        terms: Each product of dimensions, by name in order, with its factor; sorted, no factor is 0.
    """

    terms: tuple[tuple[_Monomial, int], ...]

    def __add__(self, other: Dim) -> Dim:
        return _combine(self, other, 1)

    __radd__ = __add__

    def __sub__(self, other: Dim) -> Dim:
        return _combine(self, other, -1)

    def __rsub__(self, other: Dim) -> Dim:
        return _combine(self * -1, other, 1)

    def __mul__(self, other: Dim) -> Dim:
        return _multiply(self, other)

    __rmul__ = __mul__

    def __neg__(self) -> Dim:
        return self * -1

    def __str__(self) -> str:
        written = []
        for names, factor in self.terms:
            parts = [*names] if factor == 1 and names else [str(factor), *names]
            written.append("*".join(parts))
        return " + ".join(written)

    @property
    def least(self) -> int | None:
        """A bound that it is never below; None where there is none."""
        if any(factor < 0 for names, factor in self.terms if names):
            return None
        return dict(self.terms).get((), 0)


Dim: TypeAlias = int | Size
"""One dimension of a shape."""


def symbol(name: str) -> Size:
    """A free dimension.

    Examples:
        >>> batch, length = symbol("batch"), symbol("length")
        >>> str(2 * batch * length + 1 - length), batch - batch
        ('1 + 2*batch*length + -1*length', 0)
    """
    return Size((((name,), 1),))


def product(dims: Iterable[Dim]) -> Dim:
    """The product of dimensions: the number of elements of a shape.

    Examples:
        >>> str(product([symbol("batch"), 3, 4]))
        '12*batch'
    """
    result: Dim = 1
    for dim in dims:
        result = dim * result
    return result


def equal(one: Dim, other: Dim) -> bool | None:
    """Whether two sizes are equal for all, or for no, values of the free dimensions; None where it depends.

    Examples:
        >>> n = symbol("n")
        >>> equal(n + n, 2 * n), equal(n + 1, n), equal(n, -1), equal(n, 1)
        (True, False, False, None)
    """
    difference = one - other
    if isinstance(difference, int):
        return difference == 0
    for signed in (difference, -difference):
        least = signed.least if isinstance(signed, Size) else None
        if least is not None and least > 0:
            return False
    return None


def divide(one: Dim, other: Dim) -> Dim:
    """The quotient, rounded down; equal divisions that do not come out even give the same new symbol.

    Raises:
        ZeroDivisionError: If the divisor is 0.

    Examples:
        >>> n, m = symbol("n"), symbol("m")
        >>> str(divide(12 * n * m, 4 * n)), str(divide(n, 2)), divide(n, 2) == divide(n, 2)
        ('3*m', '(n)//(2)', True)
    """
    if other == 0:
        raise ZeroDivisionError
    if isinstance(one, int) and isinstance(other, int):
        return one // other
    even = _divide_evenly(one, other)
    return symbol(f"({one})//({other})") if even is None else even


def _divide_evenly(one: Dim, other: Dim) -> Dim | None:
    divisor = ((), other) if isinstance(other, int) else other.terms[0]
    if isinstance(other, Size) and len(other.terms) > 1:
        return 1 if one == other else None
    found: dict[_Monomial, int] = {}
    for names, factor in [((), one)] if isinstance(one, int) else one.terms:
        rest = list(names)
        for name in divisor[0]:
            if name not in rest:
                return None
            rest.remove(name)
        if factor % divisor[1]:
            return None
        found[tuple(rest)] = factor // divisor[1]
    return _made(found)


def _made(terms: dict[_Monomial, int]) -> Dim:
    left = {names: factor for names, factor in terms.items() if factor}
    if not left:
        return 0
    if len(left) == 1 and () in left:
        return left[()]
    return Size(tuple(sorted(left.items())))


@lru_cache(maxsize=4096)
def _combine(one: Size, other: Dim, sign: int) -> Dim:
    terms = dict(one.terms)
    for names, factor in [((), other)] if isinstance(other, int) else other.terms:
        terms[names] = terms.get(names, 0) + sign * factor
    return _made(terms)


@lru_cache(maxsize=4096)
def _multiply(one: Size, other: Dim) -> Dim:
    terms: dict[_Monomial, int] = {}
    for names, factor in one.terms:
        for more, times in [((), other)] if isinstance(other, int) else other.terms:
            merged = tuple(sorted((*names, *more)))
            terms[merged] = terms.get(merged, 0) + factor * times
    return _made(terms)
