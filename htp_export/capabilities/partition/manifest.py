"""The manifest of a partition, read from a folder that may come from anywhere."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import onnx_ir as ir

from htp_export.capabilities.partition.partitions import FORMAT, VERSION, Partition
from htp_export.capabilities.partition.stages import Stage, StageTensor
from htp_export.errors import FileError
from htp_export.files.json_file import read_json

__all__ = ["MANIFEST", "load_partition"]

MANIFEST = "manifest.json"


def load_partition(folder: str | os.PathLike[str]) -> Partition:
    """Open the stages that ``partition`` wrote into a folder.

    The files of the stages are not read. Files that the manifest names must be in its folder.

    Args:
        folder: The folder.

    Returns:
        The stages, which can be run.

    Raises:
        FileError: The manifest is missing or invalid, or a file that it names is missing or outside of the folder.

    Examples:
        >>> import tempfile, torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = htp_export.partition(program, 2, folder)
        ...     [stage.modules for stage in load_partition(folder).stages]
        [('0',), ('1',)]
    """
    file = Path(folder) / MANIFEST
    data = read_json(file)
    try:
        return _Reader(Path(folder)).partition(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise FileError(file, f"not the manifest of a partition: {problem}") from error


class _Reader:
    """Reads a manifest that may come from anywhere; every problem is a ValueError, or one of Python's own.

    Args:
        folder: Where it lies.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def partition(self, data: Any) -> Partition:
        if not isinstance(data, dict) or data.get(FORMAT) != VERSION:
            raise ValueError(f"{FORMAT!r} is not {VERSION!r}")
        inputs = _tensors(data["inputs"])
        stages: list[Stage] = []
        for entry in data["stages"]:
            stages.append(self._stage(entry, inputs, stages))
        if not stages:
            raise ValueError("it has no stages")
        outputs: dict[str, tuple[int, str]] = {}
        for entry in data["outputs"]:
            source = (_count(entry["stage"]), _text(entry["tensor"]))
            if source[0] >= len(stages) or source[1] not in stages[source[0]].outputs:
                raise ValueError(f"output {entry['name']!r} is said to come from a stage that does not give it")
            outputs[_text(entry["name"])] = source
        files = tuple(self._file(name).relative_to(self._folder).as_posix() for name in data["files"])
        return Partition(
            _text(data["name"]), tuple(stages), inputs, outputs, dict(data["versions"]), self._folder, files
        )

    def _stage(self, entry: Any, inputs: Mapping[str, StageTensor], before: list[Stage]) -> Stage:
        sources: dict[str, int | None] = {}
        for given in entry["inputs"]:
            name = _text(given["name"])
            sources[name] = source = None if given["stage"] is None else _count(given["stage"])
            if source is not None and source >= len(before):
                raise ValueError(f"stage {len(before)} is said to read {name!r} of a stage that is not before it")
            if name not in (inputs if source is None else before[source].outputs):
                raise ValueError(f"stage {len(before)} is said to read {name!r}, which nothing gives")
        return Stage(
            tuple(map(_text, entry["modules"])),
            _tensors(entry["inputs"]),
            _tensors(entry["outputs"]),
            sources,
            _count(entry["nodes"]),
            _count(entry["parameter_bytes"]),
            self._file(entry["file"]),
            files=tuple(self._file(name).relative_to(self._folder).as_posix() for name in entry["files"]),
            session_config={_text(key): _text(each) for key, each in entry.get("session_config", {}).items()},
        )

    def _file(self, name: Any) -> Path:
        """A file in the folder that really lies there; in this system's words and in the other's."""
        pure = PurePosixPath(_text(name))
        outside = pure.is_absolute() or ".." in pure.parts or not pure.parts
        if outside or PureWindowsPath(name).anchor or "\\" in name or "\0" in name:
            raise ValueError(f"file {name!r} does not lie in its folder; it will not be read")
        file = self._folder / pure
        if not file.resolve().is_relative_to(self._folder.resolve()):
            raise ValueError(f"file {name!r} is a link out of its folder; it will not be read")
        if not file.is_file():
            raise ValueError(f"file {name!r} is missing")
        return file


def _tensors(listed: Any) -> dict[str, StageTensor]:
    found = dict(_named_tensors(listed))
    if len(found) < len(listed):
        raise ValueError("a tensor is listed twice")
    return found


def _named_tensors(listed: Any) -> Iterator[tuple[str, StageTensor]]:
    for entry in listed:
        name, kind, shape = _text(entry["name"]), entry["type"], entry["shape"]
        if kind is not None and kind not in ir.DataType.__members__:
            raise ValueError(f"tensor {name!r} is of no ONNX type: {kind!r}")
        if shape is not None:
            if not isinstance(shape, list) or not all(each is None or isinstance(each, int | str) for each in shape):
                raise ValueError(f"tensor {name!r} has no shape: {shape!r}")
            shape = tuple(shape)
        yield name, StageTensor(kind, shape)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")  # noqa: TRY004 - it is a bad value
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no number of something")
    return value
