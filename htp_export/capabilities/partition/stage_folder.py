"""The folder of a partition: written completely or not at all, and read as an untrusted input."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import onnx_ir as ir

from htp_export.capabilities.partition.partitions import (
    FORMAT,
    VERSION,
    Partition,
    Stage,
    StageTensor,
)
from htp_export.errors import FileError
from htp_export.files.folders import check_whole_folder, whole_folder
from htp_export.files.model_files import has_external_data, write_model
from htp_export.files.text_files import named_if_unwritable, read_json, write_json
from htp_export.process.argument_types import checks_arguments
from htp_export.process.progress import counted
from htp_export.runtime.faulty_optimizers import DISABLED

_MANIFEST = "manifest.json"
_OPTIMISERS = re.compile(r"\w+(;\w+)*", re.ASCII)


def check_folder(folder: Path) -> None:
    """Refuse a folder with other contents than an earlier partition; the error names them."""
    check_whole_folder(folder, "a partition", _files_of_earlier(folder))


def _files_of_earlier(folder: Path) -> set[str]:
    try:
        return {_MANIFEST, *load_partition(folder).files}
    except FileError:  # there is no earlier partition
        return set()


def write_folder(
    partition: Partition, folder: Path, extras: Callable[[Partition, Path], Partition]
) -> Partition:
    """Write stages and their manifest; an earlier partition in the folder is replaced.

    ``extras`` writes further files into the new folder, which already contains the stages, and
    returns the partition with them. If it fails, the earlier contents are unchanged.
    """
    check_folder(folder)
    with named_if_unwritable(folder), whole_folder(folder, _files_of_earlier, _MANIFEST) as new:
        numbered = list(enumerate(partition.stages))
        stages = tuple(
            _write_stage(stage, number, new) for number, stage in counted(numbered, "stages")
        )
        written = replace(partition, stages=stages, folder=new)
        written = extras(written, new)
        written = replace(written, files=tuple(sorted(_files(new))))
        write_json(new / _MANIFEST, written.to_dict())
    stages = tuple(replace(stage, file=folder / stage.files[0]) for stage in written.stages)
    return replace(written, stages=stages, folder=folder)


def _write_stage(stage: Stage, number: int, folder: Path) -> Stage:
    """Write one stage; weights in external files go into one file beside it."""
    if stage.model is None:
        raise ValueError(f"stage {number} has no model to write")
    file = folder / f"stage{number}.onnx"
    write_model(stage.model, file, True if has_external_data(stage.model) else None)
    data_files = sorted(name for name in _files(folder) if name.startswith(f"{file.name}."))
    return replace(stage, file=file, model=None, files=(file.name, *data_files))


def _files(folder: Path) -> Iterator[str]:
    return (file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


@checks_arguments
def load_partition(folder: str | os.PathLike[str]) -> Partition:
    """Open the stages that ``partition`` wrote into a folder.

    The files of the stages are not loaded. Files in the manifest must be in its folder.

    Args:
        folder: The folder.

    Returns:
        The stages, which can be run.

    Raises:
        FileError: The manifest is missing or invalid, or one of its files is missing or outside of
            the folder.

    Examples:
        >>> import tempfile, torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = htp_export.partition(program, 2, folder)
        ...     [stage.modules for stage in load_partition(folder).stages]
        [('0',), ('1',)]
    """
    file = Path(folder) / _MANIFEST
    try:
        return _read(read_json(file, plain=True), Path(folder))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise FileError(file, f"not the manifest of a partition: {problem}") from error


def _read(data: Any, folder: Path) -> Partition:
    """Read an untrusted manifest; every problem is a ValueError, or one of Python's own errors."""
    if not isinstance(data, dict) or data.get(FORMAT) != VERSION:
        raise ValueError(f"{FORMAT!r} is not {VERSION!r}")
    inputs = _tensors(data["inputs"])
    stages: list[Stage] = []
    for entry in data["stages"]:
        sources: dict[str, int | None] = {}
        for tensor in entry["inputs"]:
            name = _text(tensor["name"])
            sources[name] = source = None if tensor["stage"] is None else _count(tensor["stage"])
            if source is not None and source >= len(stages):
                raise ValueError(
                    f"stage {len(stages)} uses {name!r} of a stage that is not before it"
                )
            available = inputs if source is None else stages[source].outputs
            if name not in available:
                raise ValueError(f"stage {len(stages)} uses {name!r}, which no stage produces")
        stage = Stage(
            tuple(map(_text, entry["modules"])),
            _tensors(entry["inputs"]),
            _tensors(entry["outputs"]),
            sources,
            _count(entry["nodes"]),
            _count(entry["parameter_bytes"]),
            folder / _inside(folder, entry["file"]),
            files=tuple(_inside(folder, name) for name in entry["files"]),
            session_config=_session_entries(entry.get("session_config", {})),
        )
        stages.append(stage)
    if not stages:
        raise ValueError("it has no stages")
    outputs: dict[str, tuple[int, str]] = {}
    for entry in data["outputs"]:
        number = _count(entry["stage"])
        tensor_name = _text(entry["tensor"])
        if number >= len(stages) or tensor_name not in stages[number].outputs:
            raise ValueError(f"output {entry['name']!r} names a stage that does not produce it")
        outputs[_text(entry["name"])] = number, tensor_name
    files = tuple(_inside(folder, name) for name in data["files"])
    return Partition(
        _text(data["name"]), tuple(stages), inputs, outputs, dict(data["versions"]), folder, files
    )


def _session_entries(written: Any) -> dict[str, str]:
    """The session configuration entries of a stage: names of optimizers.

    No other entry is accepted: some load libraries or write files.
    """
    if not isinstance(written, dict):
        raise ValueError(f"session_config: {written!r} is not an object")  # noqa: TRY004 - it is a bad value
    for key, value in written.items():
        if key != DISABLED:
            raise ValueError(
                f"session_config: {key!r} is not allowed; {DISABLED!r} is what partition writes"
            )
        if not _OPTIMISERS.fullmatch(_text(value)):
            raise ValueError(f"session_config: {value!r} are no names of optimisers")
    return dict(written)


def _inside(folder: Path, name: Any) -> str:
    """The path of a file that really is inside a folder, on this system and on others."""
    pure = PurePosixPath(_text(name))
    outside = pure.is_absolute() or ".." in pure.parts or not pure.parts
    if outside or PureWindowsPath(name).anchor or "\\" in name or "\0" in name:
        raise ValueError(f"file {name!r} is outside of its folder; it will not be read")
    if not (folder / pure).resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"file {name!r} is a link out of its folder; it will not be read")
    if not (folder / pure).is_file():
        raise ValueError(f"file {name!r} is missing")
    return pure.as_posix()


def _tensors(listed: Sequence[Any]) -> dict[str, StageTensor]:
    tensors = {}
    for entry in listed:
        dtype = None if entry["type"] is None else ir.DataType[entry["type"]].name
        shape = None if entry["shape"] is None else tuple(map(_size, entry["shape"]))
        tensors[_text(entry["name"])] = StageTensor(dtype, shape)
    return tensors


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a string")  # noqa: TRY004 - it is a bad value
    return value


def _size(value: Any) -> int | str | None:
    if value is None or isinstance(value, str):
        return value
    return _count(value)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a whole number from 0 up")
    return value
