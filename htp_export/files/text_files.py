"""JSON files, pages and other texts: those that users give, and those that are written, never over a model."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from htp_export.errors import FileError
from htp_export.files.replacing import replace_file
from htp_export.files.targets import Kind, check_target


@contextlib.contextmanager
def named_if_unwritable(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise a `FileError` that names a file or folder in place of an ``OSError``."""
    try:
        yield
    except OSError as error:
        raise FileError(path, f"cannot be written: {error.strerror or error}") from error


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file; a `FileError` if it cannot be read or is not JSON."""
    file = Path(path)
    try:
        return json.loads(file.read_bytes())
    except OSError as error:
        raise FileError.unreadable(file, error) from error
    except UnicodeDecodeError as error:
        raise FileError(file, "is not JSON: it is no text") from error
    except (ValueError, RecursionError) as error:
        raise FileError(file, f"is not JSON: {error}") from error


def write_json(file: Path, content: Any) -> Path:
    """Write a JSON file into a folder that is written whole, and return it; an `OSError` if that fails."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")
    return file


def write_text(path: str | os.PathLike[str], text: str, kind: Kind = Kind.PAGE) -> None:
    """Write a file whole or not at all; a `FileError` if that fails, or if it has the name of a model.

    Examples:
        >>> write_text("bert.onnx", "<!doctype html>")
        Traceback (most recent call last):
        ...
        htp_export.errors.FileError: bert.onnx: is the name of a model; name the page otherwise, such as bert.html
    """
    check_target(path, kind)
    with named_if_unwritable(path), replace_file(Path(path)) as new:
        new.write_text(text, encoding="utf-8", newline="\n")
