"""Size expressions in a file: sums and products of open dimensions, such as ``past + 2*sequence``.

They are evaluated here, with bounds, and not by SymPy. SymPy computes any power and simplifies any
expression, so that a file with ``n**n**n`` would keep it busy for ever. The syntax is that of
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
"""The longest expression, in characters. A longer text is treated as the name of a dimension."""

_MOST_BITS = 4096
"""The most bits of an intermediate result: 64 factors of 64 bits. It bounds time and memory."""

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]+)|(?P<name>[^\W\d][\w.]*)|(?P<sign>\*\*|//|[-+*/%(),]))"
)


def names_in(text: str) -> frozenset[str]:
    """Return the open dimensions of an expression; none if the text is not an expression.

    Examples:
        >>> sorted(names_in("past + 2*sequence")), names_in("past +")
        (['past', 'sequence'], frozenset())
    """
    try:
        reader = _Reader(text, lambda name: 1)
        # An expression that has no result for these sizes still names its dimensions.
        with contextlib.suppress(ArithmeticError):
            reader.result()
    except (ValueError, RecursionError):
        return frozenset()
    return reader.names


def evaluate(text: str, sizes: Mapping[str, int]) -> int | None:
    """Evaluate a name or an expression; None if a size is unknown or the result is not a size.

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
    if size.denominator == 1 and 0 <= size <= LARGEST:
        return int(size)
    return None


class _Reader:
    """A recursive-descent parser that evaluates an expression while parsing it.

    ``size`` returns the size of a name.

    Raises:
        ValueError: The text is not an expression.
        ArithmeticError: An operation is undefined, or its result is too large.
    """

    def __init__(self, text: str, size: Callable[[str], int]) -> None:
        if len(text) > _LONGEST:
            raise ValueError("/")
        self._tokens = list(_tokens(text))
        self._size = size
        self._place = 0

    @property
    def names(self) -> frozenset[str]:
        """The names of dimensions, without the names of functions."""
        names = set[str]()
        for (kind, token), (_, after) in pairwise([*self._tokens, ("", "")]):
            if kind == "name" and after != "(":
                names.add(token)
        return frozenset(names)

    def result(self) -> Fraction:
        value = self._sum()
        if self._place < len(self._tokens):
            raise ValueError("something follows")
        return value

    def _next(self, *signs: str) -> str:
        """Return and skip the next token if it is one of ``signs``; otherwise return ``""``."""
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
        """Parse a number, a name, a function call, or an expression in parentheses."""
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
        """Parse the arguments up to the closing parenthesis; the opening one was consumed."""
        values = [self._sum()]
        while several and self._next(","):
            values.append(self._sum())
        if not self._next(")"):
            raise ValueError("a parenthesis is not closed")
        return values


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    place = 0
    end = len(text.rstrip())
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
"""Function → accepted numbers of arguments; a function that is not listed accepts any number."""
