"""Output files of a command: they are checked before any work, so that no input is replaced."""

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
from htp_export.reporting.row_table import DrawnResult

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
    """Print a result as JSON, with further facts; or draw it, by default as text, and print the written file."""
    if as_json:
        print_json({**facts, **result.to_dict()})
        return
    show(DrawnResult(result) if draw is None else draw())
    if output is not None:
        show_model(output)


@dataclass(frozen=True)
class Writes:
    """Marks an option as the output of a command; such a command also has ``--force``.

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
"""The check of an output, with the settings of the running command."""


@contextlib.contextmanager
def reading(
    values: Iterable[Any], *, force: bool = False, in_place: bool = False
) -> Iterator[None]:
    """Run a command in a ``with`` block, in which `check_output` refuses to replace its input files.

    ``values`` are the values of its options. ``force``: files of another kind may be replaced;
    ``in_place``: an input model may be replaced.
    """
    listed = list(values)
    files = list(files_named_in(listed))
    for value in listed:
        for word in value if isinstance(value, list) else [value]:
            source = factory_file(word)
            if source is not None:
                files.append(source)
    token = _check.set(partial(check_target, reads=files, in_place=in_place, replaces_others=force))
    try:
        with noting_files():
            yield
    finally:
        _check.reset(token)


def check_output(output: Path, kind: Kind) -> None:
    """Refuse an output that cannot be written, that is an input, or that is a file of another kind.

    Raises:
        FileError: In these cases, and if a new ONNX file has no extension. The weights of a model,
            ``<output>.data``, are checked, too.
    """
    if kind is Kind.MODEL and not output.suffix and not os.path.lexists(output):
        raise FileError(output, f"has no extension; name the file {output.name}.onnx")
    _check.get(check_target)(output, kind)


def written_files(output: Path) -> dict[str, int]:
    """Return the written file, and those with its weights: path → size in bytes."""
    from htp_export.files.own_data import own_files

    beside = [(output.parent / file.name, file) for file in sorted(own_files(output))]
    # if the output is a link, its weights are beside the target of the link
    weights = [named if named.exists() else file for named, file in beside]
    return {str(file): file.stat().st_size for file in (output, *weights)}


def written_page(output: Path) -> dict[str, int]:
    """Return a written page or text: path → size in bytes; empty for a device or a pipe."""
    return {} if is_special(output) else {str(output): output.stat().st_size}


def written_folder(folder: Path) -> dict[str, int]:
    """Return the files in a written folder: path → size in bytes."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return {str(file): file.stat().st_size for file in files}


def show_written(files: Mapping[str, int]) -> None:
    """Print the written files and their sizes."""
    listed = [f"{file} ({si(size, 'B')})" for file, size in files.items()]
    if not listed:
        return
    *others, last = listed
    show(f"wrote {', '.join(others)} and {last}" if others else f"wrote {last}")


def show_next(*step: str | Path) -> None:
    """Print a command for a next step with the files, quoted for the shell."""
    show(f"next: {shlex.join(map(str, step))}")


def show_model(output: Path) -> None:
    """Print the files of a written model with their sizes, and a command for a next step."""
    show_written(written_files(output))
    show_next("htp-export", "view", output)
