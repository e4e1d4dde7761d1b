"""Folders that cannot be written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from htp_export.errors import FileError, HtpExportError

__all__ = ["named_if_unwritable"]


@contextlib.contextmanager
def named_if_unwritable(folder: Path) -> Iterator[None]:
    """Name a folder if writing into it fails, inside a ``with`` block.

    Raises:
        FileError: Instead of an ``OSError``; errors of htp_export stay as they are.
    """
    try:
        yield
    except HtpExportError:
        raise
    except OSError as error:
        raise FileError(folder, f"cannot be written: {error.strerror or error}") from error
