"""Ctrl-C ends a command with status 130, also where a library drops the exception or makes another one of it."""

from __future__ import annotations

import contextlib
import signal
from types import FrameType


class Interrupts:
    """Notes whether there was a Ctrl-C while a ``with`` block runs, and raises ``KeyboardInterrupt`` as Python does.

    The exception may get lost: in ``__del__`` and callbacks of weak references Python only reports it, and extension
    modules whose import is interrupted may drop it and fail with another one later: numpy's import, broken off inside
    that of ml_dtypes, ends in a ``RecursionError``.

    Attributes:
        seen: Whether there was an interrupt.
    """

    def __init__(self) -> None:
        self.seen = False

    def __enter__(self) -> Interrupts:
        # Another handler is the caller's, and only the main thread may set one.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        signal.default_int_handler(number, frame)


def accept_interrupt() -> None:
    """Declare that Ctrl-C ended only the last step, such as serving a page; the command continues."""
    owner = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    if isinstance(owner, Interrupts):
        owner.seen = False


def stems_from_interrupt(error: BaseException | None) -> bool:
    """Whether an error is a ``KeyboardInterrupt``, or what a library made of one.

    Examples:
        >>> stems_from_interrupt(KeyboardInterrupt()), stems_from_interrupt(OSError())
        (True, False)
    """
    walked = set[int]()
    while error is not None and id(error) not in walked:  # causes may go in circles
        if isinstance(error, KeyboardInterrupt):
            return True
        walked.add(id(error))
        error = error.__cause__ or error.__context__
    return False
