"""Files that a command writes: checked before any work, so that no input is replaced."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from htp_export.command.terminal import print_json, show
from htp_export.errors import FileError
from htp_export.files.filesystem import is_special
from htp_export.files.targets import Kind, check_target, files_named_in
from htp_export.process.user_code import factory_file, noting_files
from htp_export.reporting.columns import si

if TYPE_CHECKING:
    from rich.console import RenderableType

    from htp_export.reporting.result import Result


def report(
    result: Result,
    as_json: bool,
    draw: Callable[[], RenderableType] | None = None,
    output: Path | None = None,
    **facts: Any,
) -> None:
    """Write a result as JSON, with further facts; or draw it, as text if nothing draws it, and say what was written."""
    if as_json:
        print_json({**facts, **result.to_dict()})
        return
    show(str(result) if draw is None else draw())
    if output is not None:
        show_model(output)


@dataclass(frozen=True)
class Writes:
    """Marks an option that names what a command writes; such a command also has ``--force``.

    Attributes:
        kind: What is written there, which is checked before the command runs; None if the command
            checks it.
        in_place: Whether the command has ``--in-place``, too.
    """

    kind: Kind | None = None
    in_place: bool = False


FORCE = Annotated[bool, "Allow --output to be an existing file of another kind."]
IN_PLACE = Annotated[bool, "Allow --output to be a file that is read."]


_check: ContextVar[Callable[[Path, Kind], None]] = ContextVar("_check")
"""Checks an output, as the command that runs now allows it."""


@contextlib.contextmanager
def reading(
    values: Iterable[Any], *, force: bool = False, in_place: bool = False
) -> Iterator[None]:
    """Run a command, in which `check_output` refuses to replace files that the values of its options name.

    With ``force``, files of another kind may be replaced; with ``in_place``, a model that is read.
    """
    listed = list(values)
    sources = (
        factory_file(word)
        for value in listed
        for word in (value if isinstance(value, list) else [value])
    )
    files = (*files_named_in(listed), *(file for file in sources if file is not None))
    token = _check.set(partial(check_target, reads=files, in_place=in_place, replaces_others=force))
    try:
        with noting_files():
            yield
    finally:
        _check.reset(token)


def check_output(output: Path, kind: Kind) -> None:
    """Refuse an output that cannot be written, that the command reads, or that is a file of another kind.

    Raises:
        FileError: If it is one, or if the name of a new ONNX file has no extension. The weights of
            a model, which are checked too, are written to ``<output>.data``.
    """
    if kind is Kind.MODEL and not output.suffix and not os.path.lexists(output):
        raise FileError(output, f"has no extension; name the file {output.name}.onnx")
    _check.get(check_target)(output, kind)


def written_files(output: Path) -> dict[str, int]:
    """The file that was written, and those with its weights: path → size in bytes."""
    from htp_export.files.model_files import own_files

    beside = [(output.parent / file.name, file) for file in sorted(own_files(output))]
    # else the output is a link
    weights = [named if named.exists() else file for named, file in beside]
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
        show(
            f"wrote {' and '.join((', '.join(listed[:-1]), listed[-1]) if listed[:-1] else listed)}"
        )


def show_next(*step: str | Path) -> None:
    """Say what can be done with the files now: a command, whose words are quoted for the shell."""
    show(f"next: {shlex.join(map(str, step))}")


def show_model(output: Path) -> None:
    """Say which files a model was written to, with their sizes, and what can be done with it now."""
    show_written(written_files(output))
    show_next("htp-export", "view", output)
