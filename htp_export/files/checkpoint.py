"""Checkpoints in safetensors files: one file, or several files with an index. Only headers are read here.

The files are not trusted: no pickle is opened, no file outside the folder of the index is read, and
each tensor must be in exactly one file.
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
from htp_export.format.json_text import parse_json

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_LONGEST_HEADER = 100_000_000  # of the safetensors library, too
_PICKLED = "is a pickle, which can run code when it is read; save the weights as safetensors (save_pretrained does)"


@dataclass(frozen=True)
class Stored:
    """How a safetensors file stores a tensor: its type, such as ``BF16``, offset and length in bytes."""

    kind: str
    offset: int
    length: int


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checkpoint: the file and the shape of each, by name.

    ``path`` is the index, or the only file. ``stored`` has the type and the position of each tensor.
    ``states`` has the identity of each file when it was read.
    """

    path: Path
    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]
    stored: Mapping[str, Stored]
    states: Mapping[Path, Identity | None]

    def check(self) -> None:
        """Refuse files that were changed after they were read."""
        for file, state in self.states.items():
            if Identity.at(file.resolve()) != state:
                raise FileError(file, "was changed after its weights were loaded; load them again")


def read_checkpoint(source: str | os.PathLike[str]) -> Checkpoint:
    """Read the headers of a checkpoint: a file, its index, or a folder with ``model.safetensors`` or its index.

    A `FileError` for a pickle, for a file outside the folder, for an invalid header, and for a
    tensor that is missing in its file.
    """
    path = _file_of(Path(source))
    names: Mapping[str, str] = {}
    shards = {path.name: path}
    if path.suffix == ".json":
        names = _index(path)
        shards = {name: _shard(path, name) for name in sorted(set(names.values()))}
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    stored: dict[str, Stored] = {}
    for file in shards.values():
        places = _places(file)
        for key, shape in _header(file).items():
            if key not in places:
                raise FileError(file, f"does not say where tensor {key!r} is")
            if key in files:
                raise FileError(
                    file, f"contains tensor {key!r}, which is also in {files[key].name}"
                )
            files[key], shapes[key], stored[key] = file, shape, places[key]
    for key, name in names.items():
        if files.get(key) != shards[name]:
            raise FileError(
                shards[name], f"does not contain tensor {key!r}, which {path.name} assigns to it"
            )
    states = {file: Identity.at(file.resolve()) for file in shards.values()}
    return Checkpoint(path, files, shapes, stored, states)


def _file_of(source: Path) -> Path:
    """Return the index or the only file of a checkpoint."""
    if source.is_dir():
        for name in (_ONE, _INDEX):
            if (source / name).is_file():
                return source / name
        pickles = sorted(file.name for file in source.iterdir() if file.suffix in _PICKLES)
        if pickles:
            raise FileError(source / pickles[0], _PICKLED)
        raise FileError(source, f"contains neither {_ONE} nor {_INDEX}")
    if source.suffix in _PICKLES:
        raise FileError(source, _PICKLED)
    if not source.is_file():
        raise FileError(source, "is missing")
    return source


def _index(path: Path) -> dict[str, str]:
    """Return the mapping of an index: name of a tensor → name of its file; never empty."""
    content = read_json(path, plain=True)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if isinstance(names, dict) and names and all(isinstance(name, str) for name in names.values()):
        return names
    raise FileError(
        path, 'is not an index of safetensors files: it has no "weight_map" from tensors to files'
    )


def _shard(index: Path, name: str) -> Path:
    folder, location = find_data(index, name, "file")
    file = folder / location
    if file.suffix in _PICKLES:
        raise FileError(file, _PICKLED)
    if not name.endswith(".safetensors"):
        raise FileError(file, "is not a safetensors file")
    if not file.is_file():
        raise FileError(file, f"is missing: {index.name} refers to it")
    return file


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as opened:
            names: Iterable[str] = opened.keys()
            return {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError) as error:
        raise FileError(file, f"is not a safetensors file, or is incomplete: {error}") from error


def _places(file: Path) -> dict[str, Stored]:
    """Return how a file, whose header is valid, stores its tensors.

    A file begins with the length of its header in 8 bytes, and the header in JSON
    (https://huggingface.co/docs/safetensors); offsets count from the end of the header.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = parse_json(stream.read(length) if length <= _LONGEST_HEADER else b"")
        found: dict[str, Stored] = {}
        for name, described in header.items():
            if name != "__metadata__":
                start, end = described["data_offsets"]
                found[name] = Stored(described["dtype"], 8 + length + start, end - start)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise FileError(file, f"is not a safetensors file, or is incomplete: {error}") from error
    return found
