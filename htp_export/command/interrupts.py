"""Ctrl-C ends a command, also where a library swallows the exception."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from types import FrameType, TracebackType

_PATIENCE = 0.2  # seconds between reminders: what cleans up after the exception is left in peace however long it takes


class Interrupts:
    """Raises ``KeyboardInterrupt`` on Ctrl-C as Python does, and again as long as the program goes on as if none came.

    The exception may get lost: in ``__del__`` and callbacks of weak references Python only reports it, C functions as
    ``PyObject_HasAttrString`` clear it, and extension modules whose import is interrupted may drop it and fail with
    another one later: numpy's import, broken off inside that of ml_dtypes, ends in a ``RecursionError``.

    Attributes:
        seen: Whether there was an interrupt.
    """

    def __init__(self) -> None:
        self.seen = False
        self._noted = False
        self._reminder = False  # whether the signal that comes next is one
        self._sending = threading.Lock()

    def __enter__(self) -> Interrupts:
        # Another handler is the caller's, and only the main thread may set one.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._noted = True
            try:
                signal.signal(signal.SIGINT, self._note)
            except ValueError:
                self._noted = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._noted:
            self._noted = False
            with self._sending:  # a reminder that was sent is taken before the handler is another one
                pass
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def accept(self) -> None:
        """Accept an interrupt as handled; the command continues."""
        with self._sending:
            self.seen = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        reminder, self._reminder = self._reminder, False
        if reminder and (not self._noted or not self.seen or _is_handled()):
            return
        if not self.seen:
            self.seen = True
            # No `threading.Thread`: the signal may have come while this thread holds a lock that its start needs.
            _thread.start_new_thread(self._remind, ())
        if _sets_a_handler(frame):
            return  # the handler would stay for ever; the reminder, or who asks for `seen`, knows of the interrupt
        signal.default_int_handler(number, frame)

    def _remind(self) -> None:
        while True:
            time.sleep(_PATIENCE)
            with self._sending:
                if not (self._noted and self.seen):
                    return
                self._reminder = True
                _thread.interrupt_main()


_SETS = (Interrupts.__enter__.__code__, Interrupts.__exit__.__code__)


def _sets_a_handler(frame: FrameType | None) -> bool:
    """Whether the signal came while its handler was set or put back."""
    while frame is not None and frame.f_code not in _SETS:
        frame = frame.f_back
    return frame is not None


def accept_interrupt() -> None:
    """Declare that Ctrl-C ended only the last step, such as serving a page; the command continues."""
    owner = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    if isinstance(owner, Interrupts):
        owner.accept()


def _is_handled() -> bool:
    """Whether a ``KeyboardInterrupt`` is on its way: something cleans up after it, or makes another error of it."""
    return stems_from_interrupt(sys.exception())


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
