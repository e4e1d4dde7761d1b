"""Files of measurements that were made elsewhere: which engine wrote one, by its first characters."""

from __future__ import annotations

import contextlib
import os
from typing import cast

from htp_export.capabilities.profile.latency_results import OWN_ENGINE
from htp_export.capabilities.profile.measurements import ProfileEngine
from htp_export.discovery import plug_in, plug_ins
from htp_export.errors import InputError
from htp_export.files.text_files import beginning_of


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
