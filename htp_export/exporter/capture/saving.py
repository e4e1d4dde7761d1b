"""How a tagged program of the dynamo exporter is saved: as torch saves it, but whole or not at all.

torch writes the weights first and the model afterwards, each over what is there. Between the two, an old model has new
weights, which loads and computes something that neither model does.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from htp_export.exporter.capture.mapped_weights import written_in_parts
from htp_export.files.external_writers import written_whole
from htp_export.files.filesystem import is_special, why_not_writable

__all__ = ["check_writable", "save_whole"]


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise, before the model runs, what writing a file would end in.

    Raises:
        OSError: If its folder does not exist, or no file can be made there.
    """
    file = Path(path)
    error = None if is_special(file) else why_not_writable(file.absolute().parent)
    if error is not None and not _is_writable(file):
        raise error


def _is_writable(file: Path) -> bool:
    """Whether a file is there and can be written over."""
    return file.is_file() and os.access(file, os.W_OK)


def _only_itself_writable(file: Path) -> bool:
    """Whether a file can be written over, while its folder takes no other: then torch writes it."""
    return _is_writable(file) and why_not_writable(file.absolute().parent) is not None


_MARK = "_htp_export_saves_whole"


def save_whole(program: Any) -> None:
    """Let ``program.save`` write a model and its data together; `torch.onnx.export` saves by that method, too."""
    program_class: Any = type(program)
    if not hasattr(program_class, _MARK):
        program.__class__ = _saved_whole(program_class)


@functools.cache
def _saved_whole(program_class: Any) -> Any:
    original = program_class.save

    @functools.wraps(original)
    def save(self: Any, destination: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(destination, str | os.PathLike) or _only_itself_writable(Path(destination)):
            original(self, destination, *args, **kwargs)
            return
        with written_whole(destination) as new, written_in_parts(self.model):
            original(self, new, *args, **kwargs)

    described = {"__doc__": program_class.__doc__, "__module__": program_class.__module__, "save": save, _MARK: True}
    return type(program_class.__name__, (program_class,), described)
