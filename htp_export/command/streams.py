"""stdout and stderr of a command: only characters that they can encode, and no output of libraries.

A redirected stdout on Windows has the encoding cp1252, with ``LC_ALL=C`` it has ASCII: symbols of
htp_export, rich and typer are replaced by similar ones, and other characters are escaped as in
Python. Control characters are always escaped: terminals interpret them, and names in files are not
trusted.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import logging
import os
import re
import select
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TextIO

from htp_export.errors import shortened
from htp_export.extras import is_installed, required
from htp_export.reporting.command_words import in_commands

_HANDLER = "htp_export.ascii"
_SIGNS = str.maketrans(
    {"→": "->", "←": "<-", "…": "...", "×": "x", "•": "*"}  # noqa: RUF001 - they look alike
    | dict.fromkeys("·−–—─━╸╺", "-")  # noqa: RUF001
    | dict.fromkeys("│┃", "|")
    | dict.fromkeys("┌┐└┘├┤┬┴┼╭╮╰╯", "+")
    | dict.fromkeys(map(chr, range(0x2580, 0x25A0)), "#")  # blocks
    | dict.fromkeys(map(chr, range(0x2800, 0x2900)), ".")  # spinners
)
_INTERPRETED = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters except tab and line feed
    # characters that change the direction of text
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
    "\u2028\u2029"  # other line ends
    "\ud800-\udfff"  # surrogates, which cannot be encoded
    "]"
)


def printable(text: str) -> str:
    r"""Escape the characters in a text that a terminal interprets, as in Python, except line feeds and tabs.

    Examples:
        >>> print(printable("net\x1b[31m.fc\n\u202ecf"))
        net\x1b[31m.fc
        \u202ecf
    """
    return _INTERPRETED.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def in_ascii(text: str) -> str:
    r"""Convert a text to ASCII: arrows, lines of tables and other symbols to similar ones; escape other characters.

    Examples:
        >>> print(in_ascii("└── größe → 34"))
        +-- gr\xf6\xdfe -> 34
    """
    return text.translate(_SIGNS).encode("ascii", "backslashreplace").decode()


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return in_ascii(error.object[error.start : error.end]), error.end


@contextlib.contextmanager
def encodable_output() -> Iterator[None]:
    """In a ``with`` block, write characters that stdout and stderr cannot encode as in `in_ascii`."""
    codecs.register_error(_HANDLER, _replace)
    streams = [
        stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)
    ]
    before = [(stream, stream.errors) for stream in streams]
    try:
        for stream in streams:
            stream.reconfigure(errors=_HANDLER)
        yield
    finally:
        for stream, errors in before:
            # the stream was closed, or its file cannot be written
            with contextlib.suppress(ValueError, OSError):
                stream.reconfigure(errors=errors)


def unwritten_output() -> str:
    """Flush stdout, and return the problem if that fails; otherwise an empty text. The output is then dropped."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader needs no more output
        _drop()
    except OSError as error:
        _drop()
        return f"the output cannot be written: {error.strerror or error}"
    return ""


def has_lost_reader() -> bool:
    """Return whether stdout is a pipe whose reader has ended, as of ``| head``; the output is then dropped."""
    if not hasattr(select, "poll"):  # Windows
        return False
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # a stream in memory, or a closed one
        return False
    # A second flush would not raise: Python drops the text that it could not write.
    poll = select.poll()
    poll.register(descriptor, select.POLLERR)
    if not poll.poll(0):
        return False
    _drop()
    return True


def _drop() -> None:
    """Redirect stdout to the null device: Python flushes it again at exit, and would report the error twice."""
    with contextlib.suppress(OSError, ValueError):
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, sys.stdout.fileno())
        os.close(null_device)


_QUIET: ContextVar[bool] = ContextVar("htp_export.quiet_output", default=False)


@contextlib.contextmanager
def quiet_output() -> Iterator[None]:
    """In a ``with`` block, drop the results on stdout, progress and notices; warnings and errors are shown."""
    token = _QUIET.set(True)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        _QUIET.reset(token)


def is_quiet() -> bool:
    """Return whether the command runs in `quiet_output`."""
    return _QUIET.get()


# severities of ONNX Runtime's log: the default, and the highest; the current one cannot be read
_WARNING, _FATAL = 2, 4


class _Dropping(io.TextIOBase):
    """A stream that drops its output while libraries are quiet.

    Handlers of Python's logging keep the stream that was stderr when they were created, for the
    rest of the program: later, their output goes to the stderr of that time.
    """

    def __init__(self, shown: TextIO) -> None:
        self.shown: TextIO | None = shown

    def write(self, text: str, /) -> int:
        current = sys.stderr
        if self.shown is None and current is not self:
            return current.write(text)
        return len(text)

    def flush(self) -> None:
        if self.shown is None and sys.stderr is not self:
            sys.stderr.flush()


class _Warnings(logging.Handler):
    """Prints the log messages of htp_export as lines of the command."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(logging.WARNING)
        self._stream = stream
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        message = printable(shortened(in_commands(record.getMessage())))
        line = f"htp-export: {record.levelname.lower()}: {message}"
        if line not in self._shown:  # a command may read the same file several times
            self._shown.add(line)
            print(line, file=self._stream)


def terminal_stderr() -> TextIO:
    """Return the stream for progress and errors, also while libraries are quiet."""
    stream = sys.stderr
    if isinstance(stream, _Dropping) and stream.shown is not None:
        return stream.shown
    return stream


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Suppress warnings, log messages and stderr output of libraries, but print the log messages of htp_export.

    torch prints graphs before a failed export raises its error, and its loggers have their own
    handlers.
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
    """Suppress the log of ONNX Runtime in sessions of other tools, while libraries are quiet.

    It writes to the stderr of the process directly. Sessions of htp_export have their own severity.
    """
    is_debugging = not isinstance(sys.stderr, _Dropping)
    if is_debugging or not is_installed("onnxruntime"):
        yield
        return
    onnxruntime = required("onnxruntime")
    onnxruntime.set_default_logger_severity(_FATAL)
    try:
        yield
    finally:
        onnxruntime.set_default_logger_severity(_WARNING)
