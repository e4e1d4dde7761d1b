"""Ctrl-C and signals that ask a process to end: a command then removes its unfinished files, and ends.

Its status is 128 and the number of the signal, also where a library drops the exception or makes
another one of it.
"""

from __future__ import annotations

import contextlib
import signal
from types import FrameType
from typing import Any

_ENDINGS: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}
"""Signal → its handler when Python starts."""
if hasattr(signal, "SIGHUP"):  # the terminal was closed; not on Windows
    _ENDINGS[signal.SIGHUP] = signal.SIG_DFL


class Interrupts:
    """Notes a Ctrl-C, SIGTERM or SIGHUP while a ``with`` block runs, and raises ``KeyboardInterrupt`` as for Ctrl-C.

    A second SIGTERM or SIGHUP ends the process at once. Only the command line has these handlers,
    and only where no other program has put its own; functions in Python leave signals to the
    caller.

    The exception may get lost: in ``__del__`` and callbacks of weak references Python only reports
    it, and extension modules whose import is interrupted may drop it and fail with another one
    later: numpy's import, broken off inside that of ml_dtypes, ends in a ``RecursionError``.

    Attributes:
        seen: The number of the signal; 0 if there was none.
    """

    def __init__(self) -> None:
        self.seen = 0

    @property
    def status(self) -> int:
        """The exit status after a signal, as shells have it; that of Ctrl-C if none was noted."""
        return 128 + (self.seen or signal.SIGINT)

    @property
    def described(self) -> str:
        """The signal in a word, for the user."""
        return "interrupted" if self.status == 128 + signal.SIGINT else "terminated"

    def __enter__(self) -> Interrupts:
        # Another handler is the caller's, and only the main thread may set one.
        for number, usual in _ENDINGS.items():
            if signal.getsignal(number) is usual:
                with contextlib.suppress(ValueError):
                    signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, usual in _ENDINGS.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, usual)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = number
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
        signal.default_int_handler(number, frame)


def accept_interrupt() -> None:
    """Declare that Ctrl-C ended only the last step, such as serving a page; the command continues."""
    owner = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    if isinstance(owner, Interrupts) and owner.seen == signal.SIGINT:
        owner.seen = 0


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
