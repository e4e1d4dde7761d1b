"""Checkpoints in safetensors files: one file, or several with an index. Only headers are read here.

Files of others are not trusted: no pickle is opened, the index names no file outside of its folder,
and each tensor is in one file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from htp_export.errors import FileError
from htp_export.files.data_files import find_data
from htp_export.files.filesystem import Identity
from htp_export.files.text_files import read_json

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_PICKLED = "is a pickle, which can run code when it is read; save the weights as safetensors (save_pretrained does)"


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checkpoint; ``path`` is the index, or the only file; ``states`` when it was read."""

    path: Path
    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]
    states: Mapping[Path, Identity | None]

    def check(self) -> None:
        """Refuse files that were changed after they were read."""
        for file, state in self.states.items():
            if Identity.at(file.resolve()) != state:
                raise FileError(file, "was changed after its weights were loaded; load them again")


def read_checkpoint(source: str | os.PathLike[str]) -> Checkpoint:
    """Read the headers of a checkpoint: a file, its index, or a folder with ``model.safetensors`` or its index.

    Refused are a pickle, a file outside of the folder, a broken header, and a tensor that its file
    does not have.
    """
    path = _found(Path(source))
    names = _index(path) if path.suffix == ".json" else {}
    shards = (
        {name: _shard(path, name) for name in sorted(set(names.values()))}
        if names
        else {path.name: path}
    )
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in shards.values():
        for key, shape in _header(file).items():
            if key in files:
                raise FileError(file, f"has tensor {key!r}, which {files[key].name} has, too")
            files[key], shapes[key] = file, shape
    for key, name in names.items():
        if files.get(key) != shards[name]:
            raise FileError(
                shards[name], f"has no tensor {key!r}, which is there according to {path.name}"
            )
    return Checkpoint(
        path, files, shapes, {file: Identity.at(file.resolve()) for file in shards.values()}
    )


def _found(source: Path) -> Path:
    if source.is_dir():
        for name in (_ONE, _INDEX):
            if (source / name).is_file():
                return source / name
        pickles = sorted(file.name for file in source.iterdir() if file.suffix in _PICKLES)
        if pickles:
            raise FileError(source / pickles[0], _PICKLED)
        raise FileError(source, f"has no {_ONE} and no {_INDEX}")
    if source.suffix in _PICKLES:
        raise FileError(source, _PICKLED)
    if not source.is_file():
        raise FileError(source, "is missing")
    return source


def _index(path: Path) -> dict[str, str]:
    content = read_json(path, plain=True)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if (
        not isinstance(names, dict)
        or not names
        or not all(isinstance(name, str) for name in names.values())
    ):
        raise FileError(
            path, 'is no index of safetensors files: it has no "weight_map" from tensors to files'
        )
    return names


def _shard(index: Path, name: str) -> Path:
    folder, location = find_data(index, name, "file")
    file = folder / location
    if not name.endswith(".safetensors"):
        raise FileError(file, _PICKLED if file.suffix in _PICKLES else "is no safetensors file")
    if not file.is_file():
        raise FileError(file, f"is missing: {index.name} names it")
    return file


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as opened:
            names: Iterable[str] = opened.keys()
            return {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError) as error:
        raise FileError(file, f"is no safetensors file, or is incomplete: {error}") from error
