"""Bounds of numbers in untrusted files: within them, numbers can be counted, allocated and printed."""

from __future__ import annotations

LARGEST = 2**63 - 1
"""Largest integer: ONNX uses int64, also for the number of elements of a tensor."""

MOST_DIMENSIONS = 64
"""Dimensions of a tensor: numpy and torch support no more. A product of that many int64 can still be printed."""

MOST_CALLS = 1 << 18
"""Calls of all modules in any file: enough for a thousand steps of a network of 200 modules.

Each call is visited, which takes ten seconds for so many, and a file of a few bytes can contain any
number.
"""

CALLS_OF_A_NODE = 4
"""Calls for each node in a larger file: a node is computed in a call of a module, and in a few calls around it."""

MOST_CHARACTERS = 1 << 28
"""Characters of all module paths of a file and of their ancestors, which are looked up.

A path of 100,000 dots has 100,000 ancestors. The ancestors of a thousand nested modules have about
a million characters.
"""

DEEPEST = 300
"""Nesting depth of lists and objects in JSON: ``htp.functions`` needs two levels for each of 100 nested functions."""


def number_in(text: str) -> int | None:
    """Parse a non-negative integer, such as ``htp.call``; None for other text, and above `LARGEST`.

    Examples:
        >>> number_in("3"), number_in('{"fc":[0,2]}'), number_in("9" * 5000)
        (3, None, None)
    """
    if not (text.isascii() and text.isdecimal()) or len(text) > len(str(LARGEST)):
        return None
    number = int(text)
    if number > LARGEST:
        return None
    return number
