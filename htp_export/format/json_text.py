"""JSON in the metadata of untrusted files: numbers and the nesting depth are bounded.

Python parses integers of any length, but computing with them may take any time and memory, and
``str`` refuses more than 4,300 digits. A value that is parsed here can be written as JSON, compared
and printed.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from htp_export.format.bounds import DEEPEST, LARGEST

_MOST_DIGITS = len(str(LARGEST))
_MOST_DIGITS_OF_A_FLOAT = sys.float_info.max_10_exp + 1


def parse_json(text: str | bytes, *, finite: bool = True) -> Any:
    """Parse JSON; a ``ValueError`` for other text, an integer beyond 64 bits, and more than `DEEPEST` levels.

    ``finite`` also refuses NaN and infinite numbers, which Python accepts although JSON has none.
    ``finite=False`` is for files of other programs: then an integer beyond 64 bits becomes a float,
    as in most JSON parsers.

    Examples:
        >>> parse_json('{"fc": [0, 2.5]}')
        {'fc': [0, 2.5]}
        >>> parse_json("[100000000000000000000]", finite=False)
        [1e+20]
        >>> parse_json("9" * 5000)
        Traceback (most recent call last):
        ValueError: a number has 5,000 digits
    """
    parsers: dict[str, Any] = {"parse_int": _integer_or_float}
    if finite:
        parsers = {"parse_int": _integer, "parse_float": _finite, "parse_constant": _not_finite}
    try:
        value = json.loads(text, **parsers)
    except RecursionError as error:
        raise ValueError(_too_deep()) from error
    _check_depth(value)
    return value


def _integer(text: str) -> int:
    digits = len(text.lstrip("-"))
    if digits > _MOST_DIGITS:
        raise ValueError(f"a number has {digits:,} digits")
    number = int(text)
    if not -LARGEST - 1 <= number <= LARGEST:
        raise ValueError(f"the number {number} is too large")
    return number


def _integer_or_float(text: str) -> int | float:
    if len(text.lstrip("-")) > _MOST_DIGITS_OF_A_FLOAT:
        return _integer(text)
    number = int(text)
    return number if -LARGEST - 1 <= number <= LARGEST else float(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:_MOST_DIGITS]} is too large")
    return number


def _not_finite(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number in JSON")


def _too_deep() -> str:
    return f"lists and objects are nested more than {DEEPEST} levels deep"


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level := list(_items(level)):
        depth += 1
        if depth > DEEPEST:
            raise ValueError(_too_deep())


def _items(values: list[Any]) -> Iterator[Any]:
    """Yield the items of all lists and objects among ``values``."""
    for value in values:
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, list):
            yield from value
