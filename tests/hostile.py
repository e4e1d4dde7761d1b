"""What a file of others may have in the place of a value, and how long it may keep us."""

import contextlib
import copy
import json
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

DIGITS = "9" * 5000
JSON = (
    *(
        DIGITS,
        f"-{DIGITS}",
        str(2**63),
        str(10**18),
        "1000001",
        "-1",
        "1.5",
        "1e999",
        "NaN",
        "-Infinity",
    ),
    *(
        "true",
        "null",
        '""',
        "[]",
        "{}",
        "[[[0]]]",
        '{"": null}',
        "[" * 900 + "]" * 900,
        '{"a":' * 400 + "0" + "}" * 400,
    ),
    *(
        f'"{DIGITS}"',
        f'"{"x" * 100_000}"',
        f'"{"a." * 20_000}a"',
        '"\\u0000\\u001b[31m\\u202e"',
        '"\\ud800"',
    ),
)
"""What may stand in place of a part of a value."""


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places in a value, as the keys and positions that lead there."""
    yield here
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, each in inside:
        yield from places(each, (*here, key))


def holder(value: Any, place: Sequence[Any]) -> Any:
    """What has the last of some keys and positions."""
    for key in place[:-1]:
        value = value[key]
    return value


def replaced(value: Any, place: tuple[Any, ...], text: str) -> str:
    """A value as JSON, with a text, which need not be JSON, in one place."""
    if not place:
        return text
    changed = copy.deepcopy(value)
    holder(changed, place)[place[-1]] = mark = "\ue000here\ue001"
    return json.dumps(changed).replace(json.dumps(mark), text)


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise a ``TimeoutError`` in what takes longer, where the system can."""

    def late(*_: object) -> None:
        raise TimeoutError(f"takes more than {seconds} seconds")

    if (
        not hasattr(signal, "setitimer")
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
