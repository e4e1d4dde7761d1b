"""Sizes that a file writes as expressions of open dimensions: ``past + 2*sequence``.

They are computed here, with bounds, and not by SymPy, which computes any power and simplifies
whatever it reads: a file would have it work on ``n**n**n`` for ever. The syntax is that of
`onnx_ir.SymbolicDim`.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from itertools import pairwise

from htp_export.format.bounds import LARGEST

_LONGEST = 500
"""Characters of an expression; what is longer is the name of a dimension."""

_MOST_BITS = 4096
"""Of numbers between the steps: 64 factors of 64 bits."""

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]+)|(?P<name>[^\W\d][\w.]*)|(?P<sign>\*\*|//|[-+*/%(),]))"
)


def names_in(text: str) -> frozenset[str]:
    """The open dimensions in an expression; none, if the text is no expression.

    Examples:
        >>> sorted(names_in("past + 2*sequence")), names_in("past +")
        (['past', 'sequence'], frozenset())
    """
    try:
        reader = _Reader(text, lambda name: 1)
        with contextlib.suppress(ArithmeticError):  # it is one, but not of these sizes
            reader.result()
    except (ValueError, RecursionError):
        return frozenset()
    return reader.names


def evaluate(text: str, sizes: Mapping[str, int]) -> int | None:
    """A size that a file writes as a name or as an expression; None if not all sizes in it are known, or it is no size.

    Examples:
        >>> evaluate("past + sequence", {"past": 3, "sequence": 4}), evaluate("past + sequence", {"past": 3})
        (7, None)
    """
    if text in sizes or text.isidentifier():
        return sizes.get(text)
    try:
        size = _Reader(text, sizes.__getitem__).result()
    except (ArithmeticError, KeyError, ValueError, RecursionError):
        return None
    return int(size) if size.denominator == 1 and 0 <= size <= LARGEST else None


class _Reader:
    """Computes an expression while it is read. ``size`` returns that of a name.

    Raises:
        ValueError: The text is no expression.
        ArithmeticError: A step has no result, or a very large one.
    """

    def __init__(self, text: str, size: Callable[[str], int]) -> None:
        if len(text) > _LONGEST:
            raise ValueError("it is too long")
        self._tokens, self._size = list(_tokens(text)), size
        self._place = 0

    @property
    def names(self) -> frozenset[str]:
        """The names that are no functions."""
        following = pairwise([*self._tokens, ("", "")])
        return frozenset(
            token for (kind, token), (_, after) in following if kind == "name" and after != "("
        )

    def result(self) -> Fraction:
        value = self._sum()
        if self._place < len(self._tokens):
            raise ValueError("something follows")
        return value

    def _next(self, *signs: str) -> str:
        """Return and skip the next token if it is one of some signs; else an empty text."""
        kind, token = self._tokens[self._place] if self._place < len(self._tokens) else ("", "")
        if kind != "sign" or token not in signs:
            return ""
        self._place += 1
        return token

    def _sum(self) -> Fraction:
        value = self._term()
        while sign := self._next("+", "-"):
            value = _bounded(value + self._term() if sign == "+" else value - self._term())
        return value

    def _term(self) -> Fraction:
        value = self._signed()
        while sign := self._next("*", "/", "//", "%"):
            value = _bounded(_OPERATIONS[sign](value, self._signed()))
        return value

    def _signed(self) -> Fraction:
        return -self._signed() if self._next("-") else self._power()

    def _power(self) -> Fraction:
        base = self._single()
        if not self._next("**"):
            return base
        exponent = self._signed()
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if exponent.denominator != 1 or not 0 <= exponent * bits <= _MOST_BITS:
            raise ArithmeticError("a power is no number or a very large one")
        return Fraction(base ** int(exponent))

    def _single(self) -> Fraction:
        if self._next("("):
            return self._inside()[0]
        if self._place >= len(self._tokens):
            raise ValueError("it ends")
        kind, token = self._tokens[self._place]
        self._place += 1
        if kind == "number":
            return Fraction(int(token))
        if kind != "name":
            raise ValueError(f"there is {token!r}")
        if not self._next("("):
            return Fraction(self._size(token))
        if token not in _FUNCTIONS:
            raise ValueError(f"there is no function {token!r}")
        values = self._inside(several=True)
        if len(values) not in _ARGUMENTS.get(token, (len(values),)):
            raise ValueError(f"{token!r} has {len(values)} arguments")
        return _bounded(_FUNCTIONS[token](*values))

    def _inside(self, *, several: bool = False) -> list[Fraction]:
        """What is in parentheses of which the first one is read."""
        values = [self._sum()]
        while several and self._next(","):
            values.append(self._sum())
        if not self._next(")"):
            raise ValueError("a parenthesis is not closed")
        return values


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    place, end = 0, len(text.rstrip())
    while place < end:
        match = _TOKEN.match(text, place)
        if match is None or match.lastgroup is None:
            raise ValueError(f"there is {text[place]!r}")
        yield match.lastgroup, match[match.lastgroup]
        place = match.end()


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MOST_BITS:
        raise ArithmeticError("a number is very large")
    return value


def _floor(value: Fraction) -> Fraction:
    return Fraction(math.floor(value))


def _root(value: Fraction) -> Fraction:
    root = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
    if root * root != value:
        raise ArithmeticError("a root is no number")
    return root


def _largest(*values: Fraction) -> Fraction:
    return max(values)


def _smallest(*values: Fraction) -> Fraction:
    return min(values)


def _rest(value: Fraction, divisor: Fraction) -> Fraction:
    return value % divisor


_OPERATIONS: Mapping[str, Callable[[Fraction, Fraction], Fraction]] = {
    "*": lambda one, other: one * other,
    "/": lambda one, other: one / other,
    "//": lambda one, other: Fraction(one // other),
    "%": _rest,
}

_FUNCTIONS: Mapping[str, Callable[..., Fraction]] = {
    **dict.fromkeys(("max", "Max"), _largest),
    **dict.fromkeys(("min", "Min"), _smallest),
    **dict.fromkeys(("mod", "Mod"), _rest),
    "floor": _floor,
    "sqrt": _root,
}

_ARGUMENTS: Mapping[str, tuple[int, ...]] = {"floor": (1,), "sqrt": (1,), "mod": (2,), "Mod": (2,)}
"""Function → the numbers of arguments that it takes; the others take any."""
