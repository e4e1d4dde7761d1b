"""Text without control characters: names in files are not trusted, and terminals interpret some characters."""

from __future__ import annotations

import re

__all__ = ["printable"]

_INTERPRETED = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and line feed: ESC, and those of C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # they change the direction in which text is shown
    "\u2028\u2029"  # further ends of lines
    "\ud800-\udfff"  # halves of characters, which no encoding has
    "]"
)


def printable(text: str) -> str:
    r"""A text in which characters that a terminal interprets are escaped as in Python; lines and tabs stay.

    Examples:
        >>> print(printable("net\x1b[31m.fc\n\u202ecf"))
        net\x1b[31m.fc
        \u202ecf
    """
    return _INTERPRETED.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
