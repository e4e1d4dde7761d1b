"""Finished runs in a file, a line of JSON each, so that a measurement that was interrupted goes on where it ended."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from htp_export.errors import FileError
from htp_export.model.content_hash import content_hash
from htp_export.runtime.arrays import Array

__all__ = ["FinishedRuns", "RunStore", "digest_of"]


def digest_of(model: ir.Model, feeds: Iterable[Mapping[str, Array]], settings: Sequence[Any] = ()) -> str:
    """What the results of runs depend on, as a digest: the model, its inputs, settings."""
    digest = hashlib.sha256(repr((content_hash(model), settings)).encode())
    for feed in feeds:
        for name, array in feed.items():
            digest.update(repr((name, str(array.dtype), array.shape)).encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:32]


_BEGINNING = '{"of": "'


class RunStore(Protocol):
    """Where finished runs are kept: a file, or a study that several processes share."""

    def get(self, key: str) -> dict[str, Any] | None:
        """The result of a finished run; None if it is still to be made."""

    def add(self, key: str, result: dict[str, Any]) -> None:
        """Keep a result."""


class FinishedRuns:
    """The runs of a file, by key; without a file, in memory.

    Args:
        path: The file; it is created when the first run is added. None for none.
        digest: See `digest_of`: runs with another digest are of another model, or other data, and do not count.

    Raises:
        FileError: If the file cannot be read, or holds something else.
    """

    def __init__(self, path: str | os.PathLike[str] | None, digest: str) -> None:
        self._path = None if path is None else Path(path)
        self._digest = digest
        self._runs: dict[str, dict[str, Any]] = {}
        self._broken = 0
        if self._path is None:
            return
        if not self._path.absolute().parent.is_dir():
            raise FileError(self._path, f"its folder does not exist: {self._path.absolute().parent}")
        if self._path.exists():
            self._read(self._path)

    def _read(self, path: Path) -> None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise FileError(path, f"cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise FileError(path, "holds no results: it is no text") from error
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                digest, key, result = entry["of"], entry["run"], entry["result"]
            except (ValueError, KeyError, TypeError) as error:
                begun = line.startswith(_BEGINNING) or _BEGINNING.startswith(line)
                if number == len(lines) and begun:  # a process was killed while it wrote the last line
                    self._broken = len(line.encode())
                    break
                raise FileError(path, f"line {number} is no result of a run; name another file") from error
            if digest == self._digest:
                self._runs[key] = result

    def get(self, key: str) -> dict[str, Any] | None:
        """The result of a finished run; None if it is still to be made."""
        return self._runs.get(key)

    def add(self, key: str, result: dict[str, Any]) -> None:
        """Keep a result.

        Raises:
            FileError: If it cannot be written.
        """
        self._runs[key] = result
        if self._path is None:
            return
        line = json.dumps({"of": self._digest, "run": key, "result": result})
        try:
            with self._path.open("a+b") as stream:
                if self._broken:
                    stream.truncate(stream.seek(0, os.SEEK_END) - self._broken)
                    self._broken = 0
                stream.write(f"{line}\n".encode())
        except OSError as error:
            raise FileError(self._path, f"cannot be written: {error.strerror or error}") from error
