"""The options of a step: as JSON holds them in a file, and the files that they name, with hashes."""

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
    """Return options as JSON can hold them: an array, a tensor or a model by its hash, others by their class."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): described_options(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [described_options(each) for each in value]
    digest = _digest(value)
    return {"object": type(value).__qualname__, **({"sha256": digest} if digest else {})}


def is_described(value: Any) -> bool:
    """Return whether described options hold everything that decides what a step makes."""
    return all("sha256" in stand_in for stand_in in _objects(value))


def is_repeatable(value: Any) -> bool:
    """Return whether described options are options that a step can be called with."""
    return not any(True for _ in _objects(value))


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """What described options have in place of objects of Python."""
    if isinstance(value, Mapping) and "object" in value and set(value) <= {"object", "sha256"}:
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _objects(inner)


def texts_in(options: Any) -> Iterator[str]:
    """Every text among the values of options, however deep."""
    if isinstance(options, str | os.PathLike):
        yield os.fspath(options)
    elif isinstance(options, Mapping | list | tuple):
        for value in options.values() if isinstance(options, Mapping) else options:
            yield from texts_in(value)


def is_plain(value: Any) -> bool:
    """Return whether a value is nothing but numbers, truth values and lists of them."""
    return (
        all(map(is_plain, value))
        if isinstance(value, list)
        else isinstance(value, bool | int | float | None)
    )


def option_files(options: Any) -> dict[str, str]:
    """The files that options name → their SHA-256; of a folder, that of the names and contents of the files in it."""
    found = dict[str, str]()
    for text in texts_in(options):
        if os.path.isdir(text):  # noqa: PTH112 - pathlib's raise an error for texts that are too long for a name
            files = sorted(file for file in Path(text).iterdir() if file.is_file())
            listed = "\n".join(f"{file.name}:{sha256_of(file)}" for file in files)
            found[text] = hashlib.sha256(listed.encode(errors="surrogateescape")).hexdigest()
        elif os.path.isfile(text):  # noqa: PTH113 - the same
            found[text] = sha256_of(Path(text))
    return found


def _digest(value: Any) -> str:
    """The hash of an array, a tensor, a PyTorch model or a dataclass; empty for anything else."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            each.name: described_options(getattr(value, each.name))
            for each in dataclasses.fields(value)
        }
        return (
            hashlib.sha256(json.dumps(fields).encode()).hexdigest() if is_described(fields) else ""
        )
    digest, arrays = hashlib.sha256(), {"": value}
    if hasattr(value, "state_dict") and hasattr(value, "named_modules"):
        arrays = {
            name: each for name, each in value.state_dict().items() if hasattr(each, "detach")
        }
        classes = [f"{path}:{type(module).__qualname__}" for path, module in value.named_modules()]
        digest.update(repr((value.training, classes, list(arrays))).encode())
    elif not (hasattr(value, "detach") or isinstance(value, np.ndarray | np.generic)):
        return ""
    for each in arrays.values():
        array = from_torch(each) if hasattr(each, "detach") else np.asarray(each)
        digest.update(repr((str(array.dtype), array.shape)).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
