"""Models that other libraries write, into a work folder: then all files are renamed together."""

from __future__ import annotations

import contextlib
import filecmp
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx

from htp_export.errors import FileError
from htp_export.files.data_plan import (
    describe_own,
    in_safe_order,
    put_notes,
    shared_files,
    with_serial,
)
from htp_export.files.filesystem import (
    check_kind_of_target,
    is_plain_file,
    is_special,
    temporary_folder,
)
from htp_export.files.kept_name import rename_data
from htp_export.files.linked_weights import is_same_content
from htp_export.files.model_files import read_model, write_model
from htp_export.files.own_data import (
    external_tensors,
    obsolete_files,
    place_of,
    replaceable_data,
)
from htp_export.files.parsing import deserialized, is_protobuf
from htp_export.files.write_file import Move, WorkFolder, work_folder
from htp_export.format import tags

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def written_whole(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    replaces: Callable[[Path], bool] = lambda _: False,
    *,
    is_checked: bool = False,
) -> Iterator[Path]:
    """Provide a path to write a model and its data files; on success, they replace the files at ``path``.

    A description of the data files is added to the model. If ``path`` is a symbolic link, the model
    replaces the target of the link, and the data files are written beside the link, as with
    ``torch.onnx.export``. If it is a device or a pipe, the model contains all weights; a FileError
    if they exceed the size of an ONNX file.

    A data file is renamed if a file of its name exists that has no data of the replaced model. Any
    other file beside the model replaces an existing file only if ``replaces`` returns true for it,
    and is dropped if the existing file has the same contents; otherwise it is a FileError, and
    nothing is replaced.

    ``metadata``: name of an initializer → its metadata, which onnx_ir does not write for external
    tensors. ``is_checked``: the model is written from a valid graph in memory. Otherwise, an invalid
    model with data files is an InputError, and no file is written.
    """
    target = Path(path)
    check_kind_of_target(target)
    if is_special(target):
        with readable(target) as new:
            yield new
        return
    with work_folder(target) as work:
        new = work.new / target.name
        yield new
        if not new.exists():
            return
        if not is_checked:
            _check_readable(work, new)
        try:
            _place(work, new, target, metadata, replaces)
        except FileExistsError:  # another process created a file of that name meanwhile
            _place(work, new, target, metadata, replaces, serial=True)


def _check_readable(work: WorkFolder, new: Path) -> None:
    """Raise an InputError if a model with data files is not valid."""
    if any(file != new for file in work.new.iterdir()):
        deserialized(onnx.load(new, load_external_data=False))


def _place(
    work: WorkFolder,
    new: Path,
    target: Path,
    metadata: Mapping[str, Mapping[str, str]],
    replaces: Callable[[Path], bool],
    *,
    serial: bool = False,
) -> None:
    """Rename a model and the files beside it to their targets; ``serial``: give each data file a new name."""
    beside = sorted(file for file in work.new.iterdir() if file != new)
    if not beside:
        work.commit([Move(new, target)], lambda: obsolete_files(target, set()))
        return
    # `read_model` would refuse a model without weights, as torch writes it with
    # ``export_params=False``
    proto = onnx.load(new, load_external_data=False)
    tensors = external_tensors(proto)
    metadata_props = {entry.key: entry.value for entry in proto.metadata_props}
    shared = shared_files(new, metadata_props)
    is_replaceable = replaceable_data(target)
    data: dict[str, Move] = {}
    others: list[Move] = []
    is_changed = False
    for file in beside:
        existing = target.with_name(file.name)
        if file.name in shared:
            others += _move_shared(file, existing, target)
            continue
        if file.name not in tensors:
            others += _move_beside(file, existing, target, replaces)
            continue
        if serial or not is_replaceable(existing):
            new_name = with_serial(target).name
            rename_data(tensors[file.name], new_name)
            file = file.rename(file.with_name(new_name))
            is_changed = True
            if not serial:
                _log.warning(
                    "%s exists and has no data of %s: the data is written to %s",
                    existing,
                    target.name,
                    file.name,
                )
        data_target = target.with_name(file.name)
        data[file.name] = Move(file, data_target, like=target, may_replace=is_replaceable)
    _note(new, proto, data, metadata, is_changed=is_changed)
    needed = {move.target.resolve() for move in data.values()}
    moves = [*data.values(), *others]
    work.commit(in_safe_order(Move(new, target), moves), lambda: obsolete_files(target, needed))


def _move_shared(file: Path, target: Path, model: Path) -> list[Move]:
    """Return the rename of a link to a file of a checkpoint; empty if the target is this file or a copy of it."""
    if is_plain_file(target) and is_same_content(file, target):
        return []
    if os.path.lexists(target):
        raise FileError(
            target, f"is another file than that to which {model.name} refers; name another folder"
        )
    return [Move(file, target, free=True)]


def _move_beside(
    file: Path, target: Path, model: Path, replaces: Callable[[Path], bool]
) -> list[Move]:
    """Return the rename of a file without weights; empty if the target has the same contents."""
    if is_plain_file(target) and filecmp.cmp(file, target, shallow=False):
        return []
    if os.path.lexists(target) and not replaces(target):
        raise FileError(
            target,
            f"exists, and was not written by an export of {model.name}; export into another folder",
        )
    return [Move(file, target, like=model, may_replace=replaces)]


@contextlib.contextmanager
def readable(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Provide a path to write a model to and read it from: for a device, a file that is copied at the end."""
    target = Path(path)
    check_kind_of_target(target)
    if not is_special(target):
        yield target
        return
    with temporary_folder() as folder:
        new = folder / "model.onnx"
        yield new
        write_model(read_model(new), target)


def _note(
    file: Path,
    proto: onnx.ModelProto,
    data: Mapping[str, Move],
    metadata: Mapping[str, Mapping[str, str]],
    *,
    is_changed: bool,
) -> None:
    """Add descriptions of the data files, and metadata of initializers, to the file of a model.

    ``data``: name of a data file → its rename. ``is_changed``: ``proto`` differs from the file, so
    that all of it is written again.
    """
    # The message alone is in memory: a graph of it would be a second one beside the exporter's.
    notes: dict[str, Mapping[str, Any]] = {}
    for name, tensors in external_tensors(proto).items():
        if name in data:
            places = map(place_of, tensors)
            notes[name] = describe_own(data[name].new, places, data[name].target)
    added: dict[str, str] = {}
    put_notes(added, notes)
    entries = [onnx.StringStringEntryProto(key=key, value=value) for key, value in added.items()]
    for initializer in proto.graph.initializer:
        if initializer.name in metadata and not initializer.metadata_props:
            onnx.helper.set_metadata_props(initializer, dict(metadata[initializer.name]))
            is_changed = True
    has_notes = any(entry.key == tags.DATA for entry in proto.metadata_props)
    if is_protobuf(file) and not has_notes and not is_changed:
        with file.open("ab") as stream:  # protobuf merges concatenated messages
            stream.write(onnx.ModelProto(metadata_props=entries).SerializeToString())
        return
    kept = [entry for entry in proto.metadata_props if entry.key != tags.DATA]
    del proto.metadata_props[:]
    proto.metadata_props.extend([*kept, *entries])
    onnx.save(proto, file)
