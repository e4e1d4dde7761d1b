"""Sizes of tensors as polynomials of the model's free dimensions, such as ``batch * sequence + 1``.

A file can multiply sizes as often as it likes. A polynomial that gets too long to work with becomes
one new symbol: less is known of it then, and nothing that is wrong.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from htp_export.format.bounds import LARGEST

_MOST_FACTORS = 256
"""Names and factors in one polynomial."""

_LONGEST = 500
"""Characters in the name of a symbol; a longer one, as of an expression, is replaced by a digest."""

_UNNAMED = "?"
"""What the names of dimensions begin with that the file gives no name."""

_Monomial: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Size:
    """A polynomial of free dimensions, none of which is negative; what is constant is an ``int`` instead.

    Its terms are products of dimensions, by name in order, each with its factor; sorted, no factor
    is 0.
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
        for names, factor in (
            *(term for term in self.terms if term[0]),
            *(term for term in self.terms if not term[0]),
        ):
            parts = [*names] if factor == 1 and names else [str(factor), *names]
            written.append("*".join(map(_in_parentheses, parts) if len(parts) > 1 else parts))
        return " + ".join(written)

    @property
    def names(self) -> set[str]:
        """The symbols that it is made of."""
        return {name for names, _ in self.terms for name in names}

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
        ('2*batch*length + -1*length + 1', 0)
    """
    if len(name) > _LONGEST:
        name = f"{_UNNAMED}{hashlib.blake2b(name.encode(errors='replace'), digest_size=12).hexdigest()}"
    return Size((((name,), 1),))


def unnamed(name: str, place: int) -> Size:
    """A free dimension that the file gives no name: one of the tensor of this name."""
    return symbol(f"{_UNNAMED}{name}#{place}")


def is_unnamed(dim: Dim) -> bool:
    """Whether a size is, or is computed from, a dimension that the file gives no name."""
    return isinstance(dim, Size) and any(_UNNAMED in name for name in dim.names)


def product(dims: Iterable[Dim]) -> Dim:
    """The product of dimensions: the number of elements of a shape."""
    result: Dim = 1
    for dim in dims:
        result = dim * result
    return result


def equal(first: Dim, second: Dim) -> bool | None:
    """Whether two sizes are equal for all, or for no, values of the free dimensions; None where it depends.

    Examples:
        >>> n = symbol("n")
        >>> equal(n + n, 2 * n), equal(n + 1, n), equal(n, -1), equal(n, 1)
        (True, False, False, None)
    """
    difference = first - second
    if difference == 0:
        return True
    return False if is_natural(difference - 1) or is_natural(-1 - difference) else None


def divide(dividend: Dim, divisor: Dim) -> Dim:
    """The quotient, rounded down; equal divisions that do not come out even give the same new symbol.

    Raises:
        ZeroDivisionError: If the divisor is 0.

    Examples:
        >>> n, m = symbol("n"), symbol("m")
        >>> str(divide(12 * n * m, 4 * n)), str(divide(n, 2)), divide(n, 2) == divide(3 * n, 6)
        ('3*m', 'n//2', True)
    """
    if divisor == 0:
        raise ZeroDivisionError
    if isinstance(dividend, int) and isinstance(divisor, int):
        return dividend // divisor
    even = _divide_evenly(dividend, divisor)
    if even is not None:
        return even
    common = math.gcd(*(factor for dim in (dividend, divisor) for _, factor in _terms(dim)))
    above, below = (
        _in_parentheses(str(_divide_evenly(dim, common))) for dim in (dividend, divisor)
    )
    return symbol(f"{above}//{below}")


def smaller_of(limit: Dim, size: Dim) -> Dim:
    """The smaller of two sizes of which it is not known which one that is: an expression as SymPy reads it.

    Examples:
        >>> str(smaller_of(512, symbol("length")))
        'Min(512, length)'
    """
    return 0 if 0 in (limit, size) else symbol(f"Min({limit}, {size})")


def not_negative(size: Dim) -> Dim:
    """A size, and 0 where it would be negative, as an expression where that is not known.

    Examples:
        >>> not_negative(-2), str(not_negative(symbol("length") - 1)), str(not_negative(symbol("length")))
        (0, 'Max(0, length + -1)', 'length')
    """
    if isinstance(size, int):
        return max(size, 0)
    return size if is_natural(size) else symbol(f"Max(0, {size})")


def is_natural(size: Dim) -> bool:
    """Whether a size is certain not to be negative."""
    least = size.least if isinstance(size, Size) else size
    return least is not None and least >= 0


def is_smaller_of(size: Dim, limited: Dim) -> bool:
    """Whether a size is the smaller of another one and a number, as of `smaller_of`."""
    text, end = str(size), f", {limited})"
    return text.startswith("Min(") and text.endswith(end) and text[4 : -len(end)].isdecimal()


def _terms(dim: Dim) -> Iterable[tuple[_Monomial, int]]:
    return [((), dim)] if isinstance(dim, int) else dim.terms


def _divide_evenly(dividend: Dim, divisor: Dim) -> Dim | None:
    term = ((), divisor) if isinstance(divisor, int) else divisor.terms[0]
    if isinstance(divisor, Size) and len(divisor.terms) > 1:
        return 1 if dividend == divisor else None
    quotient: dict[_Monomial, int] = {}
    for names, factor in _terms(dividend):
        rest = list(names)
        for name in term[0]:
            if name not in rest:
                return None
            rest.remove(name)
        if factor % term[1]:
            return None
        quotient[tuple(rest)] = factor // term[1]
    return _made(quotient)


def _made(terms: dict[_Monomial, int]) -> Dim:
    left = {names: factor for names, factor in terms.items() if factor}
    if not left:
        return 0
    if len(left) == 1 and () in left:
        return left[()]
    size = Size(tuple(sorted(left.items())))
    long = (
        sum(len(names) + 1 for names in left) > _MOST_FACTORS
        or max(map(abs, left.values())) > LARGEST
    )
    return symbol(str(size)) if long else size


def _in_parentheses(text: str) -> str:
    return text if text.isidentifier() or text.lstrip("-").isdecimal() else f"({text})"


@lru_cache(maxsize=4096)
def _combine(first: Size, second: Dim, sign: int) -> Dim:
    terms = dict(first.terms)
    for names, factor in [((), second)] if isinstance(second, int) else second.terms:
        terms[names] = terms.get(names, 0) + sign * factor
    return _made(terms)


@lru_cache(maxsize=4096)
def _multiply(first: Size, second: Dim) -> Dim:
    terms: dict[_Monomial, int] = {}
    for names, factor in first.terms:
        for more, times in [((), second)] if isinstance(second, int) else second.terms:
            merged = tuple(sorted((*names, *more)))
            terms[merged] = terms.get(merged, 0) + factor * times
    return _made(terms)
