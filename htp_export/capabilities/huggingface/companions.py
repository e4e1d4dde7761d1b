"""The files that lie beside a model: its config, how it generates, its tokenizer and its preprocessor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from htp_export.capabilities.huggingface.reaching import why_unreachable
from htp_export.errors import FileError, ModelSourceError
from htp_export.files.json_file import write_json

__all__ = ["companion_files", "copy_companions", "is_companion", "source_folder", "write_configs"]

_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Of tokenizers, their vocabularies and templates, and of configs; weights have others."""

_NOT_OURS = (".index.json", "genai_config.json", "export.json", "manifest.json")
"""Ends of names of files that describe weights or an earlier export."""


def is_companion(name: str) -> bool:
    """Whether a file of this name belongs to a tokenizer, a preprocessor or a config."""
    return name.endswith(_SUFFIXES) and not name.endswith(_NOT_OURS)


def companion_files(folder: Path) -> list[Path]:
    """The files directly in the folder of a model that a program needs besides its weights.

    Args:
        folder: The folder; it may come from anywhere.

    Raises:
        FileError: If one of them is a link to a place outside of the folder, or of the cache of the hub around it.
    """
    home = folder.resolve()
    if home.parent.name == "snapshots":  # the cache of the hub has links to ../../blobs
        home = home.parent.parent
    found = sorted(_named_like_companions(folder))
    for file in found:
        if not file.resolve().is_relative_to(home):
            raise FileError(file, "is a link out of its folder; it will not be copied")
    return found


def _named_like_companions(folder: Path) -> Iterator[Path]:
    for file in folder.iterdir():
        if is_companion(file.name) and file.is_file():
            yield file


def copy_companions(folder: Path, target: Path) -> list[Path]:
    """Copy the files of a model's tokenizer, preprocessor and configs; files that are in the target already stay.

    Args:
        folder: The folder of the model.
        target: An existing folder.

    Returns:
        The copies.

    Raises:
        FileError: As ``companion_files``.
        OSError: If one cannot be read or written.
    """
    copies = []
    for file in companion_files(folder):
        copy = target / file.name
        if not copy.exists():
            shutil.copyfile(file, copy)
            copies.append(copy)
    return copies


def write_configs(model: Any, target: Path) -> list[Path]:
    """Write ``config.json`` and, for a model that generates, ``generation_config.json``.

    They describe the model as it is, with every setting that was changed since it was loaded.

    Args:
        model: A model of transformers.
        target: An existing folder.

    Returns:
        The files.

    Raises:
        OSError: If they cannot be written.
    """
    config = {**json.loads(model.config.to_json_string()), "architectures": [type(model).__name__]}
    written = [write_json(target / "config.json", config)]
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        written.append(write_json(target / "generation_config.json", json.loads(generation.to_json_string())))
    return written


def source_folder(source: str, revision: str | None = None) -> Path | None:
    """The folder with the files of a model: the local one, or the one in the cache of the hub.

    Args:
        source: What ``load_model`` takes: a local folder, a hub id or a model type; a model type has no folder.
        revision: Branch, tag or commit on the hub.

    Raises:
        ModelSourceError: If the hub does not give the files.
    """
    if Path(source).is_dir():
        return Path(source)
    if "/" not in source:
        from transformers import CONFIG_MAPPING

        if source in CONFIG_MAPPING:
            return None
    from huggingface_hub import snapshot_download

    patterns = [f"*{suffix}" for suffix in _SUFFIXES]
    try:
        folder = snapshot_download(
            source,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=["*/*", *(f"*{end}" for end in _NOT_OURS)],
            local_files_only=bool(why_unreachable()),
        )
    except Exception as error:  # the hub's client raises kinds of several libraries
        raise ModelSourceError(source, f"its tokenizer and configs cannot be had: {error}") from error
    return Path(folder)
