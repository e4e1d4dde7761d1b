"""Sizes of tensors as polynomials of the model's free dimensions, such as ``batch * sequence + 1``.

A file can multiply sizes without limit. A polynomial that grows too long is replaced with one new
symbol: less is known of the size then, but nothing wrong.
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
"""The most names and factors of one polynomial; a longer one becomes a symbol."""

_LONGEST = 500
"""The most characters of a symbol's name; a longer one, as of an expression, becomes a digest."""

_UNNAMED = "?"
"""Prefix of the symbol of a dimension that has no name in the file."""

_Monomial: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Size:
    """A polynomial of non-negative open dimensions; a constant size is an ``int`` instead.

    Its terms are sorted. Each is a product of dimensions, by name in order, and its factor, which
    is not 0.
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
        # The constant term comes last.
        for names, factor in sorted(self.terms, key=lambda term: not term[0]):
            parts = [*names] if factor == 1 and names else [str(factor), *names]
            if len(parts) > 1:
                parts = [_in_parentheses(part) for part in parts]
            written.append("*".join(parts))
        return " + ".join(written)

    @property
    def names(self) -> set[str]:
        """The symbols of the polynomial."""
        return {name for names, _ in self.terms for name in names}

    @property
    def least(self) -> int | None:
        """A lower bound of the size; None if there is none."""
        if any(factor < 0 for names, factor in self.terms if names):
            return None
        return dict(self.terms).get((), 0)


Dim: TypeAlias = int | Size
"""One dimension of a shape."""


def symbol(name: str) -> Size:
    """An open dimension.

    Examples:
        >>> batch, length = symbol("batch"), symbol("length")
        >>> str(2 * batch * length + 1 - length), batch - batch
        ('2*batch*length + -1*length + 1', 0)
    """
    if len(name) > _LONGEST:
        name = f"{_UNNAMED}{hashlib.blake2b(name.encode(errors='replace'), digest_size=12).hexdigest()}"
    return Size((((name,), 1),))


def unnamed(name: str, place: int) -> Size:
    """An open dimension without a name in the file: axis ``place`` of the tensor ``name``."""
    return symbol(f"{_UNNAMED}{name}#{place}")


def is_unnamed(dim: Dim) -> bool:
    """Whether a size is, or is computed from, a dimension without a name in the file."""
    return isinstance(dim, Size) and any(_UNNAMED in name for name in dim.names)


def product(dims: Iterable[Dim]) -> Dim:
    """The product of dimensions, such as the number of elements of a shape."""
    result: Dim = 1
    for dim in dims:
        result = dim * result
    return result


def equal(first: Dim, second: Dim) -> bool | None:
    """Whether two sizes are equal for all, or for no, open dimensions; None if it depends on them.

    Examples:
        >>> n = symbol("n")
        >>> equal(n + n, 2 * n), equal(n + 1, n), equal(n, -1), equal(n, 1)
        (True, False, False, None)
    """
    difference = first - second
    if difference == 0:
        return True
    if is_natural(difference - 1) or is_natural(-1 - difference):
        return False
    return None


def divide(dividend: Dim, divisor: Dim) -> Dim:
    """The quotient, rounded down; an uneven quotient is a symbol, the same for equal divisions.

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
    factors = [factor for dim in (dividend, divisor) for _, factor in _terms(dim)]
    common = math.gcd(*factors)
    above, below = (
        _in_parentheses(str(_divide_evenly(dim, common))) for dim in (dividend, divisor)
    )
    return symbol(f"{above}//{below}")


def smaller_of(limit: Dim, size: Dim) -> Dim:
    """The smaller of two sizes, as an expression in SymPy's syntax, because it is not known which.

    Examples:
        >>> str(smaller_of(512, symbol("length")))
        'Min(512, length)'
    """
    if 0 in (limit, size):
        return 0
    return symbol(f"Min({limit}, {size})")


def not_negative(size: Dim) -> Dim:
    """The larger of a size and 0, as an expression if it is not known whether it is negative.

    Examples:
        >>> not_negative(-2), str(not_negative(symbol("length") - 1)), str(not_negative(symbol("length")))
        (0, 'Max(0, length + -1)', 'length')
    """
    if isinstance(size, int):
        return max(size, 0)
    return size if is_natural(size) else symbol(f"Max(0, {size})")


def is_natural(size: Dim) -> bool:
    """Whether a size is certainly not negative."""
    least = size.least if isinstance(size, Size) else size
    return least is not None and least >= 0


def is_smaller_of(size: Dim, limited: Dim) -> bool:
    """Whether a size is ``smaller_of(number, limited)``."""
    text = str(size)
    end = f", {limited})"
    return text.startswith("Min(") and text.endswith(end) and text[4 : -len(end)].isdecimal()


def _terms(dim: Dim) -> Iterable[tuple[_Monomial, int]]:
    if not isinstance(dim, int):
        return dim.terms
    return [((), dim)]


def _divide_evenly(dividend: Dim, divisor: Dim) -> Dim | None:
    """The quotient of a division without a remainder; None if there is one."""
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
    return _simplified(quotient)


def _simplified(terms: dict[_Monomial, int]) -> Dim:
    """A polynomial without zero terms; a number if it is constant, a symbol if it is long."""
    left = {names: factor for names, factor in terms.items() if factor}
    if not left:
        return 0
    if len(left) == 1 and () in left:
        return left[()]
    size = Size(tuple(sorted(left.items())))
    count = sum(len(names) + 1 for names in left)
    largest = max(map(abs, left.values()))
    if count > _MOST_FACTORS or largest > LARGEST:
        return symbol(str(size))
    return size


def _in_parentheses(text: str) -> str:
    if text.isidentifier() or text.lstrip("-").isdecimal():
        return text
    return f"({text})"


@lru_cache(maxsize=4096)
def _combine(first: Size, second: Dim, sign: int) -> Dim:
    terms = dict(first.terms)
    for names, factor in _terms(second):
        terms[names] = terms.get(names, 0) + sign * factor
    return _simplified(terms)


@lru_cache(maxsize=4096)
def _multiply(first: Size, second: Dim) -> Dim:
    terms: dict[_Monomial, int] = {}
    for names, factor in first.terms:
        for more, times in _terms(second):
            merged = tuple(sorted((*names, *more)))
            terms[merged] = terms.get(merged, 0) + factor * times
    return _simplified(terms)
