"""Bounds of numbers that a file states: whatever counts, allocates or prints them can do so."""

from __future__ import annotations

LARGEST = 2**63 - 1
"""Largest integer: those of ONNX are int64, and no tensor has more elements."""

MOST_DIMENSIONS = 64
"""Dimensions of a tensor: numpy and torch have no more. Products of that many int64 can still be printed."""

MOST_CALLS = 1 << 18
"""Calls of all modules that any file may state; a thousand steps of a network of 200 modules.

They are looked at one by one, which takes ten seconds for so many, and a file of a few bytes can
state any number.
"""

CALLS_OF_A_NODE = 4
"""Calls for each node that a larger file may state: a node is computed in a module, and in those around it."""

MOST_CHARACTERS = 1 << 28
"""Characters of all module paths of a file and of the paths above them, which are looked up.

A path of 100,000 dots has 100,000 paths above it. Those of a thousand modules inside one another
have a million.
"""

DEEPEST = 300
"""Lists and objects of JSON inside one another: ``htp.functions`` takes two for each of 100 functions in another."""


def number_in(text: str) -> int | None:
    """Parse a whole number, as of ``htp.call``; None for other text, and beyond `LARGEST`.

    Examples:
        >>> number_in("3"), number_in('{"fc":[0,2]}'), number_in("9" * 5000)
        (3, None, None)
    """
    if not (text.isascii() and text.isdecimal()) or len(text) > len(str(LARGEST)):
        return None
    number = int(text)
    return number if number <= LARGEST else None
