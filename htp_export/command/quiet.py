"""Output of libraries on stderr is dropped; what htp_export logs is shown."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import TextIO

from htp_export.command.characters import printable
from htp_export.drawing.command_words import in_commands

# Severities of ONNX Runtime's log. What was set before cannot be asked: the first is what it starts with.
_WARNING, _FATAL = 2, 4


class _Dropping(io.TextIOBase):
    """A stream that drops what is written, while libraries are to be quiet.

    Handlers of Python's logging hold the stream that was there when they were made, for the rest of the program:
    afterwards, what they write goes to whatever is stderr then.
    """

    def __init__(self, shown: TextIO) -> None:
        self.shown: TextIO | None = shown

    def write(self, text: str, /) -> int:
        now = sys.stderr
        if self.shown is None and now is not self:
            return now.write(text)
        return len(text)

    def flush(self) -> None:
        if self.shown is None and sys.stderr is not self:
            sys.stderr.flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        """No terminal: libraries then draw no progress bars and use no colours."""
        return False


class _Warnings(logging.Handler):
    """Shows what htp_export logs as lines of the command."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(logging.WARNING)
        self._stream = stream
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = f"htp-export: {record.levelname.lower()}: {printable(in_commands(record.getMessage()))}"
        if line not in self._shown:  # a command may read a file several times
            self._shown.add(line)
            print(line, file=self._stream)


def terminal_stderr() -> TextIO:
    """The stream for progress and errors, also while libraries are quiet."""
    stream = sys.stderr
    return stream.shown if isinstance(stream, _Dropping) and stream.shown is not None else stream


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Drop what libraries warn, log and print on stderr; show what htp_export itself logs.

    torch prints graphs before a failed export raises, and its loggers have handlers of their own.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    stream = sys.stderr
    dropping = _Dropping(stream)
    ours, handler = logging.getLogger("htp_export"), _Warnings(stream)
    propagate, ours.propagate = ours.propagate, False
    ours.addHandler(handler)
    sys.stderr = dropping
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        dropping.shown = None
        sys.stderr = stream
        ours.removeHandler(handler)
        ours.propagate = propagate


@contextlib.contextmanager
def quiet_runtime() -> Iterator[None]:
    """Drop what ONNX Runtime logs in sessions that other tools make, while libraries are quiet.

    It writes to the process's stderr by itself, in colours; sessions of htp_export set their own severity.
    """
    if not isinstance(sys.stderr, _Dropping):  # --debug
        yield
        return
    import onnxruntime

    onnxruntime.set_default_logger_severity(_FATAL)
    try:
        yield
    finally:
        onnxruntime.set_default_logger_severity(_WARNING)
