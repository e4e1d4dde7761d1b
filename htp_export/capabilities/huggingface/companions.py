"""The files that lie beside a model: its config, how it generates, its tokenizer and its preprocessor."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from htp_export.capabilities.huggingface.sources import Source
from htp_export.errors import FileError, HtpExportError
from htp_export.files.json_file import write_json

__all__ = ["copy_companions", "is_companion", "named_if_unwritable", "source_folder", "write_configs"]

_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Of tokenizers, their vocabularies and templates, and of configs; weights have others."""

_NOT_OURS = (".index.json", "genai_config.json", "export.json", "manifest.json")
"""Ends of names of files that describe weights or an earlier export."""


def is_companion(name: str) -> bool:
    """Whether a file of this name belongs to a tokenizer, a preprocessor or a config."""
    return name.endswith(_SUFFIXES) and not name.endswith(_NOT_OURS)


def copy_companions(folder: Path, target: Path) -> list[Path]:
    """Copy the files of a model's tokenizer, preprocessor and configs; files that are in the target already stay.

    The folder may come from anywhere; the target exists.

    Raises:
        FileError: If one of them is a link to a place outside of the folder, or of the cache of the hub around it.
        OSError: If one cannot be read or written.
    """
    home = folder.resolve()
    if home.parent.name == "snapshots":  # the cache of the hub has links to ../../blobs
        home = home.parent.parent
    found = sorted(file for file in folder.iterdir() if is_companion(file.name) and file.is_file())
    for file in found:
        if not file.resolve().is_relative_to(home):
            raise FileError(file, "is a link out of its folder; it will not be copied")
    copies = [target / file.name for file in found if not (target / file.name).exists()]
    for copy in copies:
        shutil.copyfile(folder / copy.name, copy)
    return copies


def write_configs(model: Any, target: Path) -> list[Path]:
    """Write ``config.json`` and, for a model that generates, ``generation_config.json`` into an existing folder.

    They describe the model as it is, with every setting that was changed since it was loaded.
    """
    config = {**json.loads(model.config.to_json_string()), "architectures": [type(model).__name__]}
    written = [write_json(target / "config.json", config)]
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        written.append(write_json(target / "generation_config.json", json.loads(generation.to_json_string())))
    return written


def source_folder(source: str, revision: str | None = None) -> Path | None:
    """The folder with the companions of a model: the local one, or in the cache of the hub; None for a model type.

    Raises:
        ModelSourceError: If the hub does not give the files.
    """
    return Source(source, revision=revision).folder(_SUFFIXES, _NOT_OURS)


@contextlib.contextmanager
def named_if_unwritable(folder: Path) -> Iterator[None]:
    """Name a folder if writing into it fails, inside a ``with`` block.

    Raises:
        FileError: Instead of an ``OSError``; errors of htp_export stay as they are.
    """
    try:
        yield
    except HtpExportError:
        raise
    except OSError as error:
        raise FileError(folder, f"cannot be written: {error.strerror or error}") from error
