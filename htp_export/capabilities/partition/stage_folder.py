"""A folder of stages, written whole: it appears with all that is in it, or what was there before stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from htp_export.capabilities.partition.manifest import MANIFEST, load_partition
from htp_export.capabilities.partition.partitions import Partition
from htp_export.capabilities.partition.stages import Stage
from htp_export.errors import FileError, HtpExportError
from htp_export.files import targets
from htp_export.files.json_file import write_json
from htp_export.files.model_files import has_external_data, write_model
from htp_export.files.replacing import Move, work_folder
from htp_export.process.progress import counted

__all__ = ["check_folder", "write_folder"]


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds anything but an earlier partition.

    Raises:
        FileError: If it does, or is no folder; it names what is in the way.
    """
    try:
        known = {MANIFEST, *load_partition(folder).files}
    except FileError:  # no earlier partition
        known = set()
    targets.check_folder(folder, "a partition", known.__contains__)


def write_folder(partition: Partition, folder: Path, extras: Callable[[Partition, Path], Partition]) -> Partition:
    """Write stages and their manifest.

    Args:
        partition: The stages, with their models.
        folder: Where to; an earlier partition there is replaced.
        extras: Writes what else goes there, into the folder as it is given; the stages are there already. Gives the
            stages with the files that they have then.

    Returns:
        The same stages, with their files in place of their models.

    Raises:
        FileError: If it cannot be written; what was there before is untouched.
    """
    check_folder(folder)
    try:
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        with work_folder(folder) as work:
            new = work.new / folder.absolute().name
            new.mkdir()
            numbered = list(enumerate(partition.stages))
            stages = tuple(_write_stage(stage, number, new) for number, stage in counted(numbered, "stages"))
            written = replace(partition, stages=stages, folder=new)
            written = extras(written, new)
            written = replace(written, files=tuple(sorted(_files(new))))
            write_json(new / MANIFEST, written.to_dict())
            work.commit([Move(new, folder)])
    except HtpExportError:
        raise
    except OSError as error:
        raise FileError(folder, f"cannot be written: {error.strerror or error}") from error
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
