"""Names that nothing has yet."""

from __future__ import annotations

__all__ = ["unused_name"]


def unused_name(wanted: str, used: set[str]) -> str:
    """The name, or it with the first number from 2 that makes it new; noted as used.

    Example:
        >>> used = {"input"}
        >>> unused_name("input", used), unused_name("input", used), unused_name("mask", used)
        ('input_2', 'input_3', 'mask')
    """
    name, number = wanted, 1
    while name in used:
        number += 1
        name = f"{wanted}_{number}"
    used.add(name)
    return name
