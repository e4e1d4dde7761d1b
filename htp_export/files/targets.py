"""The one check of a path that is to be written: before any work, by functions and commands alike.

A file that the caller named as an input is not replaced, nor are the weights of such a model. A
command also refuses an existing file that holds something else than what it writes: a source file,
a plan, a page.
"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from htp_export.errors import FileError
from htp_export.files.filesystem import (
    check_kind_of_target,
    is_read_only,
    is_special,
    why_not_writable,
)
from htp_export.files.write_file import real_path
from htp_export.process.user_code import is_read_by_user_code

_NAMES_OF_MODELS = (".onnx", ".data", ".ort")
_HEAD_BYTES = 1024  # enough to tell text, JSON and ONNX apart


class Kind(enum.StrEnum):
    """What is written to a file."""

    MODEL = "an ONNX file"
    PAGE = "an HTML page"
    JSON = "a JSON file"
    ADAPTER = "an adapter of ONNX Runtime"


def check_target(
    path: str | os.PathLike[str] | None,
    kind: Kind = Kind.MODEL,
    reads: Iterable[str | os.PathLike[str]] = (),
    *,
    in_place: bool = False,
    replaces_others: bool = True,
) -> None:
    """Refuse a file that cannot be written, or that is read; None if nothing is written.

    A device or a pipe is written to. Pages and JSON are not written to names that models have. Of a
    model in ``reads``, its weights are read, too; what is no file does not count. ``in_place``: a
    model that is read may be replaced. ``replaces_others``: so may an existing file that is neither
    empty nor of this kind.
    """
    if path is None:
        return
    target = Path(path)
    check_kind_of_target(target)
    if is_special(target):
        if not os.access(target, os.W_OK):
            raise FileError(target, "cannot be written: permission denied")
        return
    check_parent(target)
    if is_read_only(target):
        raise FileError(target, "is read-only; name another file, or allow that it is written")
    if kind in (Kind.PAGE, Kind.JSON) and target.suffix.lower() in _NAMES_OF_MODELS:
        named = target.with_name(
            target.name.split(".")[0] + (".html" if kind is Kind.PAGE else ".json")
        ).name
        what = "page" if kind is Kind.PAGE else "file"
        raise FileError(
            target, f"is the name of a model; name the {what} otherwise, such as {named}"
        )
    is_of_kind = not target.exists() or target.stat().st_size == 0 or _IS[kind](target)
    if not (in_place and is_of_kind and kind is Kind.MODEL):
        _check_reads(target, kind, reads)
    if not (replaces_others or is_of_kind):
        raise FileError(
            target, f"is there, and is not {kind}; name another file, or replace it with --force"
        )


def check_parent(target: Path) -> None:
    """Refuse a file or folder whose folder is not there, or in which nothing can be made."""
    try:
        real_path(target)
    except OSError as cycle:
        raise FileError(target, f"cannot be written: {cycle.strerror}") from cycle
    folder = target.parent if target.name else target.absolute().parent
    error = why_not_writable(folder)
    if isinstance(error, FileNotFoundError):
        raise FileError(
            target, f"cannot be written: its folder does not exist: {folder}"
        ) from error
    if error is not None:
        raise FileError(target, f"cannot be written: {error.strerror}: {folder}") from error


def files_named_in(value: Any) -> Iterator[Path]:
    """Return the existing files that an argument names: a path, a text that is one, or lists and mappings of them."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from files_named_in(each)
    elif isinstance(value, str | os.PathLike):
        try:
            is_file = os.path.isfile(value)  # noqa: PTH113 - it raises on no text
        except ValueError:  # it holds a null character
            return
        if is_file:
            yield Path(value)


def _check_reads(target: Path, kind: Kind, reads: Iterable[str | os.PathLike[str]]) -> None:
    """Refuse to replace files that are read, by a file or by the weights that are written beside a model."""
    written = [target, target.with_name(f"{target.name}.data")] if kind is Kind.MODEL else [target]
    written = [file for file in written if file.exists()]
    if target.exists() and is_read_by_user_code(target):
        raise FileError(
            target, "is read by the code that this command runs; name another file to write"
        )
    for file in map(Path, reads) if written else ():
        if not file.is_file():
            continue
        if any(each.samefile(file) for each in written):
            raise FileError(target, "is read by this command; name another file to write")
        for weights in _weights_of(file):
            if weights.exists() and any(each.samefile(weights) for each in written):
                raise FileError(
                    target,
                    f"would replace {weights.name}, the weights of {file}; name another file",
                )


def _weights_of(file: Path) -> set[Path]:
    """Return the data files of a model; none for what is no ONNX file, or a broken one: whoever reads it says so."""
    import onnx_ir as ir

    from htp_export.files.lazy_tensor import slots
    from htp_export.files.parsing import parsed_or_none

    model = parsed_or_none(file)
    tensors = () if model is None else (slot.tensor for slot in slots(model))
    return {
        file.parent / os.fspath(tensor.location)
        for tensor in tensors
        if isinstance(tensor, ir.ExternalTensor)
    }


def _is_model(file: Path) -> bool:
    from htp_export.files.parsing import message_of

    try:
        return message_of(file) is not None
    except Exception:
        # parsers of four formats raise whatever they like on bytes that are not theirs
        return False


def _is_json(file: Path) -> bool:
    try:
        json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return True


def _head(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(_HEAD_BYTES)
    except OSError:
        return b""


_IS: Mapping[Kind, Callable[[Path], bool]] = {
    Kind.MODEL: _is_model,
    Kind.PAGE: lambda file: _head(file).lower().startswith((b"<!doctype html", b"<html")),
    Kind.JSON: _is_json,
    # the identifier of its schema, adapter_schema.fbs
    Kind.ADAPTER: lambda file: _head(file)[4:8] == b"TORT",
}
