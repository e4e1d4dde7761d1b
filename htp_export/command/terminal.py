"""Output of all commands: results on stdout, progress and errors on stderr.

Only this module prints, so that no name in an untrusted file can control the terminal
(`printable`).
"""

from __future__ import annotations

import contextlib
import io
import json
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from htp_export.command.streams import is_quiet, printable, terminal_stderr
from htp_export.errors import shortened
from htp_export.process.progress import listening
from htp_export.reporting.command_words import in_commands

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

# of the output of --json; increased if a key is renamed, removed, or changes its meaning
SCHEMA_VERSION = 1
_PATIENCE = 2.0  # seconds before progress is shown: most commands end sooner
_PIPE_WIDTH = 1000  # columns: lines for programs and files are not wrapped


class CheckFailed(Exception):  # noqa: N818 - it is an outcome that ends the command with status 1, not a fault
    """A requested check failed; the message describes it."""


def error_line(message: str) -> None:
    """Print to stderr why the command failed."""
    text = printable(shortened(in_commands(message)))
    print(f"htp-export: error: {text}", file=terminal_stderr())


def warning_line(message: str) -> None:
    """Print a problem to stderr that does not end the command."""
    print(
        f"htp-export: warning: {printable(shortened(in_commands(message)))}", file=terminal_stderr()
    )


def notice_line(message: str) -> None:
    """Print to stderr how a result was obtained."""
    if is_quiet():
        return
    print(f"htp-export: {printable(shortened(in_commands(message)))}", file=terminal_stderr())


def print_json(data: dict[str, Any]) -> None:
    """Print a result to stdout as JSON, with the version of its schema: see docs/json.md."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, **data}, indent=2))


def print_text(text: str) -> None:
    """Print formatted text to stdout: CSV, lists."""
    print(printable(text), end="")


def show(what: RenderableType) -> None:
    """Draw a result on stdout; text without interpretation of markup."""
    from rich.console import Console
    from rich.text import Text

    drawn = _Printable(Text(in_commands(what)) if isinstance(what, str) else what)
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(drawn)
        return
    text = io.StringIO()
    Console(highlight=False, width=_PIPE_WIDTH, file=text).print(drawn)
    for line in text.getvalue().rstrip("\n").split("\n"):
        print(line.rstrip())


class _Printable:
    """A drawing in which all text is `printable`; colours and line breaks are unchanged."""

    def __init__(self, what: RenderableType) -> None:
        self._what = what

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        for text, style, control in console.render(self._what, options):
            yield Segment(text if control else printable(text), style, control)


def split_names(typed: list[str] | None) -> list[str] | None:
    """Split names, which may be separated by commas; None without names.

    Examples:
        >>> split_names(["class, nodes", "flops"])
        ['class', 'nodes', 'flops']
    """
    names: list[str] = []
    for text in typed or ():
        stripped = map(str.strip, text.split(","))
        names.extend(filter(None, stripped))
    return names or None


class Steps:
    """Progress on stderr: the running step, its number and its time; nothing if stderr is not a terminal."""

    def __init__(self, quiet: bool = False, count: int = 1) -> None:
        self._shown = terminal_stderr().isatty() and not (quiet or is_quiet())
        self._count = count
        self._begun = 0

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Show a step and its progress in a ``with`` block, after two seconds."""
        self._begun += 1
        if not self._shown:
            yield
            return
        number = f"step {self._begun} of {self._count}: " if self._count > 1 else ""
        with _bar(f"{number}{text}"):
            yield


@contextlib.contextmanager
def _bar(text: str) -> Iterator[None]:
    """Show a line on stderr in a ``with`` block: a text, the time, and a bar if items are counted."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[counted]}", markup=False),
        TimeElapsedColumn(),
    )
    progress = Progress(
        *columns,
        console=Console(file=terminal_stderr()),
        transient=True,
        redirect_stdout=False,  # it would show output of libraries, which `quiet_libraries` drops
        redirect_stderr=False,
    )
    task = progress.add_task(printable(shortened(text)), total=None, counted="")

    def show_done(what: str, done: int, total: int) -> None:
        progress.update(task, completed=done, total=total, counted=f"{done} of {total} {what}")

    late = threading.Timer(_PATIENCE, progress.start)
    late.daemon = True
    late.start()
    try:
        with listening(show_done):
            yield
    finally:
        late.cancel()
        late.join()
        if progress.live.is_started:
            progress.stop()
