"""Files of measurements that were made elsewhere: which engine wrote one, by its first characters."""

from __future__ import annotations

import contextlib
import os
from typing import cast

from htp_export.capabilities.profile.latency_results import OWN_ENGINE
from htp_export.capabilities.profile.measurements import ProfileEngine
from htp_export.discovery import plug_in, plug_ins
from htp_export.errors import FileError, InputError
from htp_export.files.filesystem import opened_plain

_BEGINNING = 4096
"""Bytes: a trace has up to 300 MB, and each form differs in its first keys."""


def engine_of(path: str | os.PathLike[str]) -> str | None:
    """Return the engine of `profile` that wrote a file; None for a file of no engine, or an unreadable one.

    ONNX Runtime's profiler writes a list of events in JSON. An engine of another package recognizes
    its own files by `ProfileEngine.wrote`.
    """
    beginning = beginning_of(path)
    for name in plug_ins("profile"):
        with contextlib.suppress(InputError):  # one that cannot be loaded reads nothing
            wrote = getattr(cast(ProfileEngine, plug_in("profile", name)), "wrote", None)
            if wrote is not None and wrote(beginning):
                return name
    return OWN_ENGINE if beginning.startswith("[") else None


def beginning_of(path: str | os.PathLike[str]) -> str:
    """Return the first characters of a text file, without leading space; empty if it cannot be read."""
    try:
        with opened_plain(path) as file:
            return file.read(_BEGINNING).decode("utf-8-sig", "replace").lstrip()
    except (OSError, FileError):
        return ""
