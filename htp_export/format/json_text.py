"""JSON in metadata of files, which are not trusted: its numbers and its depth have bounds.

Python reads integers of any length; what is computed of them may take any time and memory, and
``str`` refuses more than 4,300 digits. A value that is read here can be written as JSON, compared
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

    ``finite`` also refuses NaN and infinite numbers, which Python reads and writes, and JSON does
    not have. Without it, what other programs write is read: a whole number beyond 64 bits is a
    float, as most of them have it.

    Examples:
        >>> parse_json('{"fc": [0, 2.5]}')
        {'fc': [0, 2.5]}
        >>> parse_json("[100000000000000000000]", finite=False)
        [1e+20]
        >>> parse_json("9" * 5000)
        Traceback (most recent call last):
        ValueError: a number has 5,000 digits
    """
    kinds: dict[str, Any] = {"parse_int": _whole_or_float}
    if finite:
        kinds = {"parse_int": _whole, "parse_float": _finite, "parse_constant": _not_finite}
    try:
        value = json.loads(text, **kinds)
    except RecursionError as error:
        raise ValueError(_too_deep()) from error
    _check_depth(value)
    return value


def _whole(text: str) -> int:
    digits = len(text.lstrip("-"))
    if digits > _MOST_DIGITS:
        raise ValueError(f"a number has {digits:,} digits")
    number = int(text)
    if not -LARGEST - 1 <= number <= LARGEST:
        raise ValueError(f"the number {number} is too large")
    return number


def _whole_or_float(text: str) -> int | float:
    if len(text.lstrip("-")) > _MOST_DIGITS_OF_A_FLOAT:
        return _whole(text)
    number = int(text)
    return number if -LARGEST - 1 <= number <= LARGEST else float(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:_MOST_DIGITS]} is too large")
    return number


def _not_finite(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _too_deep() -> str:
    return f"more than {DEEPEST} lists and objects are inside one another"


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level := list(_inside(level)):
        depth += 1
        if depth > DEEPEST:
            raise ValueError(_too_deep())


def _inside(values: list[Any]) -> Iterator[Any]:
    """The lists and objects among values are taken apart, one level."""
    for value in values:
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, list):
            yield from value
