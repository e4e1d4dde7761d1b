"""stdout and stderr of a command: characters that they can encode, and nothing that libraries print.

A redirected stdout of Windows is cp1252, that of ``LC_ALL=C`` ASCII: signs of htp_export, rich and
typer get a counterpart, other characters are escaped as in Python, and so are control characters in
any encoding: terminals interpret some, and names in files are not trusted.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from typing import TextIO

from htp_export.errors import shortened
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
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and line feed: ESC, and those of C1
    # they change the direction in which text is shown
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
    "\u2028\u2029"  # further ends of lines
    "\ud800-\udfff"  # halves of characters, which no encoding has
    "]"
)


def printable(text: str) -> str:
    r"""A text in which characters that a terminal interprets are escaped as in Python; lines and tabs stay.

    Examples:
        >>> print(printable("net\x1b[31m.fc\n\u202ecf"))
        net\x1b[31m.fc
        \u202ecf
    """
    return _INTERPRETED.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def in_ascii(text: str) -> str:
    r"""A text in ASCII: lines of tables, arrows and the like as similar signs, other characters escaped.

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
    """Write to stdout and stderr what their encodings have, and `in_ascii` what they do not have."""
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
            # it was closed, or its file cannot be written
            with contextlib.suppress(ValueError, OSError):
                stream.reconfigure(errors=errors)


def unwritten_output() -> str:
    """Write what stdout holds back; why that is not possible, else an empty text. It is then dropped."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # who reads has read enough
        _drop()
    except OSError as error:
        _drop()
        return f"the output cannot be written: {error.strerror or error}"
    return ""


def _drop() -> None:
    """Let Python write what is left to nowhere when it ends: it would report the error a second time."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


# Severities of ONNX Runtime's log. What was set before cannot be asked: the first is what it starts
# with.
_WARNING, _FATAL = 2, 4


class _Dropping(io.TextIOBase):
    """A stream that drops what is written, while libraries are to be quiet.

    Handlers of Python's logging hold the stream that was there when they were made, for the rest of
    the program: afterwards, what they write goes to whatever is stderr then.
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


class _Warnings(logging.Handler):
    """Shows what htp_export logs as lines of the command."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(logging.WARNING)
        self._stream = stream
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = f"htp-export: {record.levelname.lower()}: {printable(shortened(in_commands(record.getMessage())))}"
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

    It writes to the process's stderr by itself, in colours; sessions of htp_export set their own
    severity.
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
