"""Output of all commands: results on stdout, progress and errors on stderr.

Everything is printed here, so that no name in a file controls the terminal (`printable`).
"""

from __future__ import annotations

import contextlib
import io
import json
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from htp_export.command.streams import printable, terminal_stderr
from htp_export.errors import shortened
from htp_export.process.progress import listening
from htp_export.reporting.command_words import in_commands

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

# of what --json writes; a new one where a key is renamed, removed, or means something else
SCHEMA_VERSION = 1
_PATIENCE = 2.0  # seconds before progress is shown
_PIPE_WIDTH = 1000  # lines for programs, and for files, are not folded


class CheckFailed(Exception):  # noqa: N818 - it is an outcome that ends the command with status 1, not a fault
    """What was asked for did not hold; the message says what."""


def error_line(message: str) -> None:
    """Say on stderr why the command ended."""
    print(
        f"htp-export: error: {printable(shortened(in_commands(message)))}", file=terminal_stderr()
    )


def warning_line(message: str) -> None:
    """Say on stderr what is not as it should be, where the command goes on."""
    print(f"htp-export: warning: {printable(shortened(message))}", file=terminal_stderr())


def notice_line(message: str) -> None:
    """Say on stderr how a result was got."""
    print(f"htp-export: {printable(shortened(message))}", file=terminal_stderr())


def print_json(data: dict[str, Any]) -> None:
    """Write a result to stdout as JSON, with the version of its layout: see docs/json.md."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, **data}, indent=2))


def print_text(text: str) -> None:
    """Write text to stdout that is laid out already: CSV, lists."""
    print(printable(text), end="")


def show(what: RenderableType) -> None:
    """Draw a result on stdout; text as it is, whatever markup it looks like."""
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
    """A drawing in which every text is `printable`; colours and lines stay."""

    def __init__(self, what: RenderableType) -> None:
        self._what = what

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        for text, style, control in console.render(self._what, options):
            yield Segment(text if control else printable(text), style, control)


def split_names(typed: list[str] | None) -> list[str] | None:
    """Names as typed, by comma or one by one; None where there are none.

    Examples:
        >>> split_names(["class, nodes", "flops"])
        ['class', 'nodes', 'flops']
    """
    names = [name.strip() for text in typed or () for name in text.split(",") if name.strip()]
    return names or None


class Steps:
    """Progress on stderr: the step that is running, its number and for how long; nothing where that is no terminal."""

    def __init__(self, quiet: bool = False, count: int = 1) -> None:
        self._shown = terminal_stderr().isatty() and not quiet
        self._count = count
        self._begun = 0

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Show that a step is running, and how much of it is done, from two seconds on."""
        self._begun += 1
        if not self._shown:
            yield
            return
        number = f"step {self._begun} of {self._count}: " if self._count > 1 else ""
        with _bar(f"{number}{text}"):
            yield


@contextlib.contextmanager
def _bar(text: str) -> Iterator[None]:
    """A line on stderr: what runs, for how long, and a bar where it is counted."""
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
        redirect_stdout=False,  # it would show what libraries print, which `quiet_libraries` drops
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
