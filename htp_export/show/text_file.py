"""Pages and other texts, written whole or not at all, and never over a model."""

from __future__ import annotations

from pathlib import Path

from htp_export.errors import FileError
from htp_export.files.replacing import replace_file

__all__ = ["check_name", "write_text"]

_NAMES_OF_MODELS = (".onnx", ".data", ".ort")


def check_name(path: Path) -> None:
    """Refuse a name that models and their weights have.

    Raises:
        FileError: If it is such a name.

    Examples:
        >>> check_name(Path("bert.onnx"))
        Traceback (most recent call last):
        ...
        htp_export.errors.FileError: bert.onnx: is the name of a model; name the page otherwise, such as bert.html
    """
    if path.suffix.lower() in _NAMES_OF_MODELS:
        page = path.with_name(path.name.split(".")[0] + ".html").name
        raise FileError(path, f"is the name of a model; name the page otherwise, such as {page}")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        FileError: If it cannot be written, or has the name of a model; what was there is untouched.
    """
    check_name(path)
    try:
        with replace_file(path) as new:
            new.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FileError(path, f"cannot be written: {error.strerror or error}") from error
