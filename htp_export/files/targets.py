"""The check of an output path before any work, by functions and commands.

An input file is not replaced, nor are the weights of an input model. A command also refuses an
existing file of another kind than its output: a source file, a plan, a page.
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
    """The kind of an output file, as a phrase for messages."""

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
    """Refuse an output file that cannot be written, or that is an input.

    A device or a pipe is accepted. Pages and JSON files cannot have the extension of a model.

    Args:
        path: The output file; None if there is none.
        kind: The kind of the output.
        reads: The inputs. Weights of a model are inputs, too; values that are no files are ignored.
        in_place: Accept an output model that is also an input.
        replaces_others: Accept an existing file that is neither empty nor of this kind.
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
        raise FileError(target, "is read-only; name another file, or change its permissions")
    if kind in (Kind.PAGE, Kind.JSON):
        _check_extension(target, kind)
    is_of_kind = not target.exists() or target.stat().st_size == 0 or _IS[kind](target)
    if not (in_place and is_of_kind and kind is Kind.MODEL):
        _check_reads(target, kind, reads)
    if not (replaces_others or is_of_kind):
        raise FileError(
            target, f"exists, and is not {kind}; name another file, or replace it with --force"
        )


def _check_extension(target: Path, kind: Kind) -> None:
    """Refuse to write a page or a JSON file to a path with the extension of a model."""
    if target.suffix.lower() not in _NAMES_OF_MODELS:
        return
    extension = ".html" if kind is Kind.PAGE else ".json"
    example = target.with_name(target.name.split(".")[0] + extension).name
    raise FileError(target, f"has the extension of a model; choose another name, such as {example}")


def check_parent(target: Path) -> None:
    """Refuse a file or folder whose parent folder does not exist, or is not writable."""
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


def files_of(source: str | os.PathLike[str]) -> list[Path]:
    """Return the files of a checkpoint or an adapter: all of its folder, or of its index, or the file itself.

    ONNX files in the folder, which refer to the checkpoint or were made of it, are none of them.
    """
    path = Path(source)
    if path.name.endswith(".index.json"):
        path = path.parent
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.glob("*") if file.suffix.lower() not in _NAMES_OF_MODELS)


def files_named_in(value: Any) -> Iterator[Path]:
    """Yield the existing files in an argument: a path or string, or lists and mappings of these."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from files_named_in(item)
    elif isinstance(value, str | os.PathLike):
        try:
            is_file = os.path.isfile(value)  # noqa: PTH113 - it accepts any string
        except ValueError:  # it contains a null character
            return
        if is_file:
            yield Path(value)


def _check_reads(target: Path, kind: Kind, reads: Iterable[str | os.PathLike[str]]) -> None:
    """Refuse to replace an input by the output, or by the weights that are written beside an output model."""
    written = [target]
    if kind is Kind.MODEL:
        written.append(target.with_name(f"{target.name}.data"))
    replaced = [file for file in written if file.exists()]
    if target.exists() and is_read_by_user_code(target):
        raise FileError(
            target,
            "is read by the Python code that this command runs; name another file to write",
        )
    if not replaced:
        return
    for file in map(Path, reads):
        if not file.is_file():
            continue
        if _is_one_of(file, replaced):
            raise FileError(target, "is an input of this command; name another file to write")
        for weights in _weights_of(file):
            if weights.exists() and _is_one_of(weights, replaced):
                raise FileError(
                    target,
                    f"would replace {weights.name}, the weights of {file}; name another file",
                )


def _is_one_of(file: Path, others: Iterable[Path]) -> bool:
    return any(other.samefile(file) for other in others)


def _weights_of(file: Path) -> set[Path]:
    """Return the data files of a model; empty for an invalid file, which is reported when it is read."""
    from htp_export.files.own_data import FileHeader

    header = FileHeader.of(file)
    return set() if header is None else {file.parent / location for location in header.places}


def _is_model(file: Path) -> bool:
    from htp_export.files.parsing import message_of

    try:
        return message_of(file) is not None
    except Exception:
        # the parsers of four formats raise any error for a file of another format
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
    # the file identifier of ONNX Runtime's schema, adapter_schema.fbs
    Kind.ADAPTER: lambda file: _head(file)[4:8] == b"TORT",
}
