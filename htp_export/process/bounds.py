"""Whole numbers that a caller gives, and the range in which they mean something."""

from __future__ import annotations

import os

from htp_export.errors import InputError

MOST_SEED = 2**32 - 1
"""What all random generators take: torch's, numpy's and those of the samplers of Optuna."""

MOST_RUNS = 1_000_000
"""Of timed runs, and of trials: more take days for the smallest model, and their times are kept in memory."""

_THREADS_OF_A_CORE = 16


def most_threads() -> int:
    """The number of threads beyond which they only wait for each other, and a session takes minutes to start."""
    return _THREADS_OF_A_CORE * (os.cpu_count() or 1)


def check_seed(seed: int) -> None:
    """Refuse what is no seed."""
    check_whole("seed", seed, 0, MOST_SEED)


def check_whole(name: str, value: int, least: int, most: int) -> int:
    """Refuse a number that is not whole, or out of its range.

    Examples:
        >>> check_whole("seed", -1, 0, 9)
        Traceback (most recent call last):
        ...
        htp_export.errors.InputError: seed -1: it is a whole number from 0 to 9
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or not least <= value <= most:
        raise InputError(f"{name} {value!r}: it is a whole number from {least} to {most}")
    return int(value)
