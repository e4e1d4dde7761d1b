"""Ctrl-C and signals that end a process: a command then removes its unfinished files, and exits.

The exit status is 128 plus the number of the signal, even if a library drops or replaces the
exception.
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
"""Signal → its default handler in Python."""
if hasattr(signal, "SIGHUP"):  # the terminal was closed; not on Windows
    _ENDINGS[signal.SIGHUP] = signal.SIG_DFL


class Interrupts:
    """Records a Ctrl-C, SIGTERM or SIGHUP in a ``with`` block, and raises ``KeyboardInterrupt`` for each of them.

    A second SIGTERM or SIGHUP ends the process at once. Only the command line installs these
    handlers, and only in place of the default ones; functions in Python leave signals to the
    caller.

    The exception may get lost: in ``__del__`` and callbacks of weak references, Python only prints
    it. An extension module whose import is interrupted may drop it and fail later: the import of
    numpy, interrupted inside that of ml_dtypes, ends in a ``RecursionError``.

    Attributes:
        seen: The number of the signal; 0 if there was none.
    """

    def __init__(self) -> None:
        self.seen = 0

    @property
    def status(self) -> int:
        """The exit status after a signal, as in shells; that of Ctrl-C if no signal was recorded."""
        return 128 + (self.seen or signal.SIGINT)

    @property
    def described(self) -> str:
        """A description of the signal for the user."""
        return "interrupted" if self.status == 128 + signal.SIGINT else "terminated"

    def __enter__(self) -> Interrupts:
        # another handler belongs to the caller; threads other than the main one cannot set handlers
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
    """Accept a Ctrl-C that ended only one step, such as serving a page, so that the command continues."""
    owner = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    if isinstance(owner, Interrupts) and owner.seen == signal.SIGINT:
        owner.seen = 0


def stems_from_interrupt(error: BaseException | None) -> bool:
    """Return whether an error is a ``KeyboardInterrupt``, or was raised because of one.

    Examples:
        >>> stems_from_interrupt(KeyboardInterrupt()), stems_from_interrupt(OSError())
        (True, False)
    """
    walked = set[int]()
    while error is not None and id(error) not in walked:  # causes may form a cycle
        if isinstance(error, KeyboardInterrupt):
            return True
        walked.add(id(error))
        error = error.__cause__ or error.__context__
    return False
