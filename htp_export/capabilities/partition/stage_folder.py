"""The folder of a partition: written whole, or what was there before stays; and read, wherever it comes from."""

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
    """Refuse a folder that holds anything but an earlier partition; the `FileError` names what is in the way."""
    check_whole_folder(folder, "a partition", _files_of_earlier(folder))


def _files_of_earlier(folder: Path) -> set[str]:
    try:
        return {_MANIFEST, *load_partition(folder).files}
    except FileError:  # no earlier partition
        return set()


def write_folder(
    partition: Partition, folder: Path, extras: Callable[[Partition, Path], Partition]
) -> Partition:
    """Write stages and their manifest; an earlier partition in the folder is replaced.

    ``extras`` writes what else goes there, into the folder that it is given, which has the stages
    already, and returns them with the files that they have then. What was there before is untouched
    if that fails.
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
    """Write one stage; weights that were in files of their own go into one beside it."""
    if stage.model is None:
        raise ValueError(f"stage {number} has no model to write")
    file = folder / f"stage{number}.onnx"
    write_model(stage.model, file, True if has_external_data(stage.model) else None)
    others = sorted(name for name in _files(folder) if name.startswith(f"{file.name}."))
    return replace(stage, file=file, model=None, files=(file.name, *others))


def _files(folder: Path) -> Iterator[str]:
    return (file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


@checks_arguments
def load_partition(folder: str | os.PathLike[str]) -> Partition:
    """Open the stages that ``partition`` wrote into a folder.

    The files of the stages are not read. Files that the manifest names must be in its folder.

    Args:
        folder: The folder.

    Returns:
        The stages, which can be run.

    Raises:
        FileError: The manifest is missing or invalid, or a file that it names is missing or outside
            of the folder.

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
    """A manifest that may come from anywhere; every problem is a ValueError, or one of Python's own."""
    if not isinstance(data, dict) or data.get(FORMAT) != VERSION:
        raise ValueError(f"{FORMAT!r} is not {VERSION!r}")
    inputs = _tensors(data["inputs"])
    stages: list[Stage] = []
    for entry in data["stages"]:
        known = [inputs, *(stage.outputs for stage in stages)]
        sources: dict[str, int | None] = {}
        for given in entry["inputs"]:
            name = _text(given["name"])
            sources[name] = source = None if given["stage"] is None else _count(given["stage"])
            if source is not None and source >= len(stages):
                raise ValueError(
                    f"stage {len(stages)} is said to read {name!r} of a stage that is not before it"
                )
            if name not in known[0 if source is None else source + 1]:
                raise ValueError(
                    f"stage {len(stages)} is said to read {name!r}, which nothing gives"
                )
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
        number, made = _count(entry["stage"]), _text(entry["tensor"])
        if number >= len(stages) or made not in stages[number].outputs:
            raise ValueError(
                f"output {entry['name']!r} is said to come from a stage that does not give it"
            )
        outputs[_text(entry["name"])] = number, made
    files = tuple(_inside(folder, name) for name in data["files"])
    return Partition(
        _text(data["name"]), tuple(stages), inputs, outputs, dict(data["versions"]), folder, files
    )


def _session_entries(written: Any) -> dict[str, str]:
    """The session configuration entries of a stage: names of optimisers. Others load libraries or write files."""
    if not isinstance(written, dict):
        raise ValueError(f"session_config: {written!r} is no object")  # noqa: TRY004 - it is a bad value
    for key, said in written.items():
        if key != DISABLED:
            raise ValueError(
                f"session_config: {key!r} is not allowed; {DISABLED!r} is what partition writes"
            )
        if not _OPTIMISERS.fullmatch(_text(said)):
            raise ValueError(f"session_config: {said!r} are no names of optimisers")
    return dict(written)


def _inside(folder: Path, name: Any) -> str:
    """The path of a file that really lies in a folder; it is read as this system and as the others read it."""
    pure = PurePosixPath(_text(name))
    outside = pure.is_absolute() or ".." in pure.parts or not pure.parts
    if outside or PureWindowsPath(name).anchor or "\\" in name or "\0" in name:
        raise ValueError(f"file {name!r} does not lie in its folder; it will not be read")
    if not (folder / pure).resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"file {name!r} is a link out of its folder; it will not be read")
    if not (folder / pure).is_file():
        raise ValueError(f"file {name!r} is missing")
    return pure.as_posix()


def _tensors(listed: Sequence[Any]) -> dict[str, StageTensor]:
    return {
        _text(entry["name"]): StageTensor(
            None if entry["type"] is None else ir.DataType[entry["type"]].name,
            None if entry["shape"] is None else tuple(map(_size, entry["shape"])),
        )
        for entry in listed
    }


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")  # noqa: TRY004 - it is a bad value
    return value


def _size(value: Any) -> int | str | None:
    return value if value is None or isinstance(value, str) else _count(value)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no number of something")
    return value
