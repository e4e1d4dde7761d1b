"""Files of weights that a model shares with a checkpoint: each is in the folder of the model, or is linked into it.

ONNX Runtime refuses external data outside of the folder of the model, also behind symbolic links: it
reads hard links. Where the file system has none, the file is copied.
"""

from __future__ import annotations

import enum
import filecmp
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from htp_export.errors import FileError
from htp_export.files.filesystem import copy_range
from htp_export.files.write_file import Move


class Way(enum.StrEnum):
    """How a file is in the folder of a model, as a phrase for messages."""

    THERE = "is in its folder"
    LINKED = "is linked into its folder"
    COPIED = "is copied into its folder"


@dataclass(frozen=True)
class SharedFile:
    """A file of weights, and its name relative to the folder of the model.

    ``is_there``: whether the folder has it already.
    """

    source: Path
    target: Path
    name: str
    is_there: bool

    @classmethod
    def of(cls, source: Path, model: Path) -> SharedFile:
        """Find the name of a file in the folder of a model.

        A `FileError` if another file has this name.
        """
        home = model.parent.resolve()
        real = source.resolve()
        if real.is_relative_to(home):
            return cls(source, real, real.relative_to(home).as_posix(), True)
        target = home / source.name
        if not os.path.lexists(target):
            return cls(source, target, source.name, False)
        if not target.is_symlink() and target.is_file() and is_same_content(target, real):
            return cls(source, target, source.name, True)
        raise FileError(
            target,
            f"is another file than {source}, to which {model.name} refers; name another folder",
        )

    def put_into(self, folder: Path) -> tuple[Way, list[Move]]:
        """Link or copy the file into a work folder, if the folder of the model does not have it.

        Returns:
            The way, and the rename to its target.
        """
        if self.is_there:
            return Way.THERE, []
        new = folder / self.name
        way = _linked_or_copied(self.source.resolve(), new)
        return way, [Move(new, self.target, free=True)]


def shared_files_of(sources: Iterable[Path], model: Path) -> dict[Path, SharedFile]:
    """Return resolved path → file in the folder of a model; a `FileError` if two would have one name."""
    found: dict[Path, SharedFile] = {}
    names: dict[str, Path] = {}
    for source in sources:
        real = source.resolve()
        if real in found:
            continue
        found[real] = SharedFile.of(source, model)
        first = names.setdefault(found[real].name, real)
        if first != real:
            raise FileError(source, f"has the name of {first}, and both belong into {model.parent}")
    return found


def is_same_content(one: Path, other: Path) -> bool:
    """Return whether two files are the same file, or have the same contents."""
    return one.samefile(other) or filecmp.cmp(one, other, shallow=False)


def _linked_or_copied(source: Path, new: Path) -> Way:
    try:
        os.link(source, new)
        return Way.LINKED
    except OSError:  # another file system, or one without hard links
        pass
    state = source.stat()
    with source.open("rb") as stream, new.open("xb") as target:
        copied = copy_range(stream, 0, state.st_size, target)
    if copied < state.st_size:
        raise FileError(source, "became shorter while it was copied")
    shutil.copystat(source, new)
    return Way.COPIED
