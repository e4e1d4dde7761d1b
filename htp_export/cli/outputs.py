"""Files that a command writes: checked before any work, so that no input is replaced."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from htp_export.cli.terminal import print_json, show
from htp_export.errors import FileError, InputError
from htp_export.files.filesystem import is_special, why_not_writable
from htp_export.model.columns import si
from htp_export.show.text_file import check_name

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "check_folder",
    "check_new_folder",
    "check_output",
    "new_folder",
    "report",
    "show_model",
    "show_next",
    "show_written",
    "written_files",
    "written_folder",
    "written_page",
]


class _Result(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


def report(
    result: _Result,
    as_json: bool,
    draw: Callable[[], RenderableType] | None = None,
    output: Path | None = None,
    **facts: Any,
) -> None:
    """Write a result as JSON, or draw it and say which files were written.

    Args:
        result: The result.
        as_json: Whether to write it as JSON.
        draw: Draws it; None to print it as text.
        output: The model that was written.
        **facts: Further keys of the JSON.
    """
    if as_json:
        print_json({**facts, **result.to_dict()})
        return
    show(str(result) if draw is None else draw())
    if output is not None:
        show_model(output)


def check_output(output: Path, inputs: Iterable[Path] = (), *, in_place: bool = False, page: bool = False) -> None:
    """Refuse an output that cannot be written, or that is one of the files that the command reads.

    Args:
        output: The file to write, a device or a pipe. The weights of a model are written to ``<output>.data``.
        inputs: The files that are read: ONNX files, results.
        in_place: Whether the user asked to write over an input.
        page: Whether it is a page or text; these are not written to names that models have.

    Raises:
        FileError: If the file cannot be written.
    """
    if is_special(output):
        if not os.access(output, os.W_OK):
            raise FileError(output, "cannot be written: permission denied")
        return
    check_folder(output.parent, output)
    if output.is_dir():
        raise FileError(output, "is a folder; name a file in it")
    if output.exists() and not os.access(output, os.W_OK):
        raise FileError(output, "cannot be written: permission denied")
    if page:
        check_name(output)
    if in_place:
        return
    targets = [output] if page else [output, output.with_name(f"{output.name}.data")]
    targets = [target for target in targets if target.exists()]
    for file in inputs if targets else ():
        if file.exists() and any(target.samefile(file) for target in targets):
            raise FileError(output, "is read by this command; name another file to write")
        for weights in _weights_of(file):
            if weights.exists() and any(target.samefile(weights) for target in targets):
                raise FileError(output, f"would replace {weights.name}, the weights of {file}; name another file")


def check_folder(folder: Path, output: Path) -> None:
    """Refuse a folder that is not there, or in which no file can be made.

    Raises:
        FileError: If it is such a folder.
    """
    error = why_not_writable(folder)
    if folder.is_file():
        raise FileError(output, f"cannot be written: {folder} is a file")
    if isinstance(error, FileNotFoundError):
        raise FileError(output, f"its folder does not exist: {folder}")
    if isinstance(error, PermissionError):
        raise FileError(output, f"cannot be written: no permission to write in the folder {folder}")
    if error is not None:
        raise FileError(output, f"cannot be written in the folder {folder}: {error.strerror}")


def check_new_folder(folder: Path, output: Path) -> None:
    """Refuse a folder that cannot be made, with the folders above it.

    Raises:
        FileError: If it cannot.
    """
    check_folder(next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists()), output)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Make a folder, and those above it, for a ``with`` block; if it fails, those that were made are removed."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if missing:
            shutil.rmtree(missing[-1], ignore_errors=True)
        raise


def _weights_of(file: Path) -> set[Path]:
    """The files beside a model that its weights lie in; empty for what is no ONNX file."""
    from htp_export.files.model_files import external_files, read_model

    try:
        return external_files(read_model(file))
    except InputError:  # no model, or one that is broken; the command that reads it says so
        return set()


def written_files(output: Path) -> dict[str, int]:
    """The file that was written, and those with its weights: path → size in bytes."""
    from htp_export.files.model_files import own_files

    beside = [(output.parent / file.name, file) for file in sorted(own_files(output))]
    weights = [named if named.exists() else file for named, file in beside]  # else the output is a link
    return {str(file): file.stat().st_size for file in (output, *weights)}


def written_page(output: Path) -> dict[str, int]:
    """A page or text that was written: path → size in bytes; nothing for a device or a pipe."""
    return {} if is_special(output) else {str(output): output.stat().st_size}


def written_folder(folder: Path) -> dict[str, int]:
    """The files in a folder that was written: path → size in bytes."""
    return {str(file): file.stat().st_size for file in sorted(folder.rglob("*")) if file.is_file()}


def show_written(files: Mapping[str, int]) -> None:
    """Say which files were written, with their sizes."""
    listed = [f"{file} ({si(size, 'B')})" for file, size in files.items()]
    if listed:
        show(f"wrote {' and '.join((', '.join(listed[:-1]), listed[-1]) if listed[:-1] else listed)}")


def show_next(*step: str | Path) -> None:
    """Say what can be done with the files now: a command, whose words are quoted for the shell."""
    show(f"next: {shlex.join(map(str, step))}")


def show_model(output: Path) -> None:
    """Say which files a model was written to, with their sizes, and what can be done with it now."""
    show_written(written_files(output))
    show_next("htp-export", "view", output)
