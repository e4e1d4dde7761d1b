"""The program ``htp-export``: its commands, and the exit status and message of errors.

Exit status: 0 for success; 1 if a requested check or an export fails; 2 for invalid input; 3 for a
bug of htp_export; 130 after Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from htp_export.command.commands import CommandGroup
from htp_export.command.streams import (
    encodable_output,
    quiet_libraries,
    quiet_output,
    unwritten_output,
)
from htp_export.command.terminal import CheckFailed, error_line, print_text
from htp_export.errors import HtpExportError, InputError, described
from htp_export.process.interrupts import Interrupts
from htp_export.process.restoring import rare_collections
from htp_export.version import __version__

_INTERNAL_ERROR = 3  # the exit status; 1 is a failed check, 2 is invalid input

_DEBUG = ("--debug",)
_QUIET = ("--quiet", "-q")
_AS_PYTHON = "--as-python"
GLOBAL_OPTIONS = (*_DEBUG, *_QUIET, _AS_PYTHON)
"""Options that may stand before or after a command."""
_TABLES = ("--json", "--csv")

app = typer.Typer(
    name="htp-export",
    cls=CommandGroup,
    help="Export PyTorch models to ONNX files whose every node knows its module.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"htp-export {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            help="Show tracebacks, and what libraries log; may stand after a command, too.",
        ),
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", "-q", help="Show nothing but errors; may stand after a command, too."
        ),
    ] = False,
    as_python: Annotated[
        bool,
        typer.Option("--as-python", help="Print the Python of the command, and do not run it."),
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Declare the options before a command; they take effect when they are parsed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default that of ``sys.argv``, and return the exit status.

    Examples:
        >>> main(["tree", "nowhere.onnx"])
        2
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    with encodable_output():
        status = _status(arguments)
        if problem := unwritten_output():
            error_line(problem)
            status = status or 2
    return status


def _status(arguments: list[str]) -> int:
    """Run a command, print the message of an error, and return the exit status."""
    debug = not set(_DEBUG).isdisjoint(arguments)
    quiet = not set(_QUIET).isdisjoint(arguments)
    as_python = _AS_PYTHON in arguments
    arguments = [word for word in arguments if word not in GLOBAL_OPTIONS]
    quiet = quiet and not as_python  # the program is the result
    interrupts = Interrupts()
    try:
        with (
            interrupts,
            rare_collections(),
            contextlib.nullcontext() if debug else quiet_libraries(),
            quiet_output() if quiet else contextlib.nullcontext(),
        ):
            if quiet:
                _check_quiet(arguments)
            run = functools.partial(
                app, args=arguments, prog_name="htp-export", standalone_mode=False
            )
            status = _show_python(run) if as_python else run()
    except (KeyboardInterrupt, typer.Abort):
        status = interrupts.status
    except Exception as error:
        if interrupts.seen:
            error_line(interrupts.described)
            return interrupts.status
        if debug:
            traceback.print_exception(error)
        message, code = _explained(error, debug)
        error_line(message)
        return code
    if interrupts.seen:  # a library dropped the exception, and the command completed
        status = interrupts.status
    if status == interrupts.status:  # typer may have caught the exception
        error_line(interrupts.described)
    return status if isinstance(status, int) else 0


def _show_python(run: Callable[[], object]) -> int:
    """Print the Python of a command in place of a run."""
    from htp_export.command.as_python import python_of

    print_text(python_of(run))
    return 0


def _check_quiet(arguments: Sequence[str]) -> None:
    """Refuse options that print a table beside ``--quiet``."""
    for option in _TABLES:
        if option in arguments:
            raise InputError(f"{option} has no effect: --quiet shows nothing; leave it out")


def _explained(error: Exception, debug: bool) -> tuple[str, int]:
    """Return the message of an error for the user, and the exit status."""
    if isinstance(error, InputError):
        return str(error), 2
    if isinstance(error, CheckFailed | HtpExportError):
        return str(error), 1
    # usage errors of typer, which, depending on its version, has its own copy of click
    format_message = getattr(error, "format_message", None)
    if format_message is not None:
        # the prefixes are typer's, for choices and for values
        message = " ".join(format_message().split()).replace("Value error, ", "")
        message = message.removeprefix("Invalid value: ")
        example = getattr(getattr(getattr(error, "ctx", None), "command", None), "epilog", None)
        if message.startswith("Missing") and example:
            message = f"{message.rstrip('.')}; {example[0].lower()}{example[1:]}"
        return message, 2
    # an error without a file name is one of a stream, stdout
    if isinstance(error, OSError) and error.strerror is not None:
        return f"{error.filename or 'the output cannot be written'}: {error.strerror}", 2
    if isinstance(error, MemoryError):
        return "there is not enough memory", 1
    versions = f"htp_export {__version__}, Python {platform.python_version()}"
    advice = "" if debug else "; run the command with --debug, and report what it prints"
    return f"this is a bug in htp_export ({versions}): {described(error)}{advice}", _INTERNAL_ERROR
