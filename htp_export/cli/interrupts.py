"""Whether the user pressed Ctrl-C, also where a library swallowed the exception."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

__all__ = ["Interrupts"]


class Interrupts:
    """Notes that the process was interrupted, while it is entered, and raises ``KeyboardInterrupt`` as Python does.

    An extension module whose import is interrupted may drop that exception, and fail with another one later: numpy's
    import, broken off inside that of ml_dtypes, ends in a ``RecursionError``.

    Attributes:
        seen: Whether there was an interrupt.
    """

    def __init__(self) -> None:
        self.seen = False
        self._noted = False

    def __enter__(self) -> Interrupts:
        # Another handler is the caller's, and only the main thread may set one.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            try:
                signal.signal(signal.SIGINT, self._note)
            except ValueError:
                return self
            self._noted = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._noted:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._noted = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        signal.default_int_handler(number, frame)
