"""Exports that fail, in one form for all commands: the error, the place in the model, a remedy, a next command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from htp_export.command.model_options import ModelOptions
from htp_export.command.terminal import CheckFailed
from htp_export.errors import HtpExportError, described


@contextlib.contextmanager
def failed_exports(model: ModelOptions) -> Iterator[None]:
    """Raise a `CheckFailed` for an error of torch's exporters in a ``with`` block.

    They pass on any error of the model, the tracer or a translation. Meanwhile, they print no graph.
    """
    from htp_export.exporter.capture.torchscript_internals import without_graph_dump

    try:
        with without_graph_dump():
            yield
    except (HtpExportError, CheckFailed):
        raise
    except Exception as error:
        raise CheckFailed(_message(error, model)) from error


def _message(error: Exception, model: ModelOptions) -> str:
    """The root cause of an exporter's error, the notes that htp_export added, and the next command."""
    from htp_export.exporter.failures import NEXT

    cause = error
    while cause.__cause__ is not None and isinstance(cause.__cause__, Exception):
        cause = cause.__cause__
    notes = list(getattr(error, "__notes__", ()))
    if cause is not error:
        notes += getattr(cause, "__notes__", ())
    lines = [f"the export failed: {described(cause, lines=2)}"]
    for note in dict.fromkeys(notes):
        text = note.removeprefix("htp_export: ")
        if not text.startswith(NEXT):
            lines.append(f"  {text}")
    next_command = f"htp-export tree {model.words}"
    lines.append(f"  {NEXT}{next_command} shows all that torch can trace, with the modules")
    return "\n".join(lines)
