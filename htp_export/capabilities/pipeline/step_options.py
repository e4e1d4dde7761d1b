"""Options of a step: their form in JSON, and the hashes of the files that they name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from htp_export.files.data_plan import sha256_of
from htp_export.runtime.arrays import from_torch


def described_options(value: Any) -> Any:
    """Convert options to JSON values: an array, a tensor or a model to its hash, other objects to their class."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): described_options(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [described_options(entry) for entry in value]
    placeholder = {"object": type(value).__qualname__}
    digest = _digest(value)
    if digest:
        placeholder["sha256"] = digest
    return placeholder


def is_described(value: Any) -> bool:
    """Whether described options determine the result of a step: every Python object has a hash."""
    return all("sha256" in placeholder for placeholder in _objects(value))


def is_repeatable(value: Any) -> bool:
    """Whether a step can be called with described options: they contain no Python object."""
    return not any(True for _ in _objects(value))


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """Placeholders of Python objects in described options."""
    if isinstance(value, Mapping) and "object" in value and set(value) <= {"object", "sha256"}:
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _objects(inner)


def texts_in(options: Any) -> Iterator[str]:
    """Every text among the values of options, also inside lists and mappings."""
    if isinstance(options, str | os.PathLike):
        yield os.fspath(options)
    elif isinstance(options, Mapping | list | tuple):
        for value in options.values() if isinstance(options, Mapping) else options:
            yield from texts_in(value)


def is_plain(value: Any) -> bool:
    """Whether a value consists of numbers, booleans, None, and lists of them."""
    if isinstance(value, list):
        return all(map(is_plain, value))
    return isinstance(value, bool | int | float | None)


def option_files(options: Any) -> dict[str, str]:
    """File or folder that options name → SHA-256; for a folder, of the names and contents of its files."""
    hashes = dict[str, str]()
    for text in texts_in(options):
        if os.path.isdir(text):  # noqa: PTH112 - pathlib's raise an error for texts that are too long for a name
            files = sorted(file for file in Path(text).iterdir() if file.is_file())
            listed = "\n".join(f"{file.name}:{sha256_of(file)}" for file in files)
            hashes[text] = hashlib.sha256(listed.encode(errors="surrogateescape")).hexdigest()
        elif os.path.isfile(text):  # noqa: PTH113 - the same
            hashes[text] = sha256_of(Path(text))
    return hashes


def _digest(value: Any) -> str:
    """The hash of an array, a tensor, a PyTorch model or a dataclass; empty for any other object."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _digest_of_fields(value)
    digest = hashlib.sha256()
    if hasattr(value, "state_dict") and hasattr(value, "named_modules"):
        state = value.state_dict()
        # A state may also contain objects that are no tensors: see torch's `get_extra_state`.
        tensors = {name: tensor for name, tensor in state.items() if hasattr(tensor, "detach")}
        classes = [f"{path}:{type(module).__qualname__}" for path, module in value.named_modules()]
        digest.update(repr((value.training, classes, list(tensors))).encode())
        arrays = list(tensors.values())
    elif hasattr(value, "detach") or isinstance(value, np.ndarray | np.generic):
        arrays = [value]
    else:
        return ""
    for tensor in arrays:
        array = from_torch(tensor) if hasattr(tensor, "detach") else np.asarray(tensor)
        digest.update(repr((str(array.dtype), array.shape)).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _digest_of_fields(value: Any) -> str:
    """The hash of the fields of a dataclass; empty if a field contains an object without a hash."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        fields[field.name] = described_options(getattr(value, field.name))
    if not is_described(fields):
        return ""
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()
