"""Data files that a model shares with another one: which they are, and whether they are what they were.

A file that is written anew, by exporting the other model again, would change what this one computes. So the model says
in its metadata what the file was: see ``docs/format.md``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from htp_export import tags
from htp_export.errors import FileError

__all__ = ["check_shared", "describe_shared", "shared_files"]


def describe_shared(files: Mapping[str, Path]) -> str:
    """The value of ``htp.weights``: the size, time and content of each file; reads all of them.

    Args:
        files: The name by which the model knows a file → the file.
    """
    said = {}
    for location, file in sorted(files.items()):
        state = file.stat()
        said[location] = {"size": state.st_size, "modified_ns": state.st_mtime_ns, "sha256": _digest(file)}
    return json.dumps(said, separators=(",", ":"))


def shared_files(model: Path, written: str | None) -> dict[str, dict[str, Any]]:
    """What a model says of the files that it shares: name → facts; empty where it shares none.

    Args:
        model: The ONNX file, for errors.
        written: The value of ``htp.weights``.

    Raises:
        FileError: If it is not what the file format says.
    """
    if written is None:
        return {}
    try:
        said = json.loads(written)
        kinds = {"size": int, "modified_ns": int, "sha256": str}
        if all(isinstance(facts[key], kind) for facts in said.values() for key, kind in kinds.items()):
            return dict(said)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise FileError(model, f"its {tags.WEIGHTS} is not what the file format says")


def check_shared(model: Path, written: str | None, files: Mapping[str, Path]) -> None:
    """Refuse a model whose shared weights are not those that it was written with.

    A file that has its size and time is taken as it is; one that was copied or changed meanwhile is read.

    Args:
        model: The ONNX file.
        written: The value of its ``htp.weights``.
        files: The name by which the model knows a file → the file.

    Raises:
        FileError: If a file changed.
    """
    for location, facts in shared_files(model, written).items():
        file = files.get(location)
        if file is None or not file.is_file():  # what is missing is said when it is needed
            continue
        state = file.stat()
        problem = ""
        if state.st_size != facts["size"]:
            problem = f"it had {facts['size']:,} bytes and has {state.st_size:,}"
        elif state.st_mtime_ns != facts["modified_ns"] and _digest(file) != facts["sha256"]:
            problem = "it has other contents"
        if problem:
            raise FileError(
                model,
                f"shares its weights, which were changed: {file} is not what it was ({problem}); "
                f"write {model.name} again, without --share-weights to be safe from this",
            )


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
