"""Pages and other texts, written whole or not at all, and never over a model."""

from __future__ import annotations

import os
from pathlib import Path

from htp_export.errors import FileError
from htp_export.files.replacing import replace_file
from htp_export.files.targets import Kind, check_target

__all__ = ["write_text"]


def write_text(path: str | os.PathLike[str], text: str, kind: Kind = Kind.PAGE) -> None:
    """Write a file whole or not at all; a `FileError` if that fails, or if it has the name of a model.

    Examples:
        >>> write_text("bert.onnx", "<!doctype html>")
        Traceback (most recent call last):
        ...
        htp_export.errors.FileError: bert.onnx: is the name of a model; name the page otherwise, such as bert.html
    """
    check_target(path, kind)
    try:
        with replace_file(Path(path)) as new:
            new.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FileError(path, f"cannot be written: {error.strerror or error}") from error
