"""Files that other programs write: into a work folder, from which they are moved to their places together."""

from __future__ import annotations

import contextlib
import filecmp
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx
import onnx_ir as ir

from htp_export.errors import FileError
from htp_export.files.data_plan import describe_own, in_safe_order, put_notes, with_serial
from htp_export.files.filesystem import (
    check_kind_of_target,
    is_plain_file,
    is_special,
    temporary_folder,
)
from htp_export.files.lazy_tensor import slots
from htp_export.files.model_files import (
    obsolete_files,
    places_of,
    read_model,
    replaceable_data,
    write_model,
)
from htp_export.files.parsing import deserialized, is_protobuf
from htp_export.files.protobuf_bytes import graph_protos
from htp_export.files.write_file import Move, WorkFolder, work_folder
from htp_export.format import tags

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def written_whole(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    replaces: Callable[[Path], bool] = lambda _: False,
) -> Iterator[Path]:
    """Provide a path to write a model and its data files; on success, they are moved to their places.

    The model gets a description of its data files. If ``path`` is a symbolic link, the model
    replaces the target of the link, and the data files are beside the link, as with
    ``torch.onnx.export``. If it is a device or a pipe, all weights are in the model; a FileError if
    they are more than an ONNX file can hold.

    A data file gets another name if something is in its place that has no data of the model which
    is replaced. Other files beside the model replace one that exists only if ``replaces`` returns
    true for it. If it has the same contents, it stays; otherwise it is a FileError, and nothing is
    replaced.

    ``metadata`` has that of initializers by name: onnx_ir writes none for those in data files. A
    model with data files that is not valid is an InputError, and no file is written.
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
        try:
            _place(work, new, target, metadata, replaces)
        except FileExistsError:  # another process has just taken the name of a data file
            _place(work, new, target, metadata, replaces, serial=True)


def _place(
    work: WorkFolder,
    new: Path,
    target: Path,
    metadata: Mapping[str, Mapping[str, str]],
    replaces: Callable[[Path], bool],
    *,
    serial: bool = False,
) -> None:
    """Move a model and what lies beside it to their places; ``serial``: no data file keeps its name."""
    beside = sorted(file for file in work.new.iterdir() if file != new)
    if not beside:
        work.commit([Move(new, target)], lambda: obsolete_files(target, set()))
        return
    # Not `read_model`, which judges models: torch leaves the weights out with
    # ``export_params=False``.
    proto = onnx.load(new, load_external_data=False)
    tensors = _external_tensors(proto)
    owned = replaceable_data(target)
    data: dict[str, Move] = {}
    others: list[Move] = []
    is_changed = False
    for file in beside:
        place = target.with_name(file.name)
        if file.name not in tensors:
            others += _move_beside(file, place, target, replaces)
            continue
        if serial or not owned(place):
            file, is_changed = _renamed(tensors[file.name], file, with_serial(target)), True
            if not serial:
                _log.warning(
                    "%s is there, and has no data of %s: its data are in %s",
                    place,
                    target.name,
                    file.name,
                )
        data[file.name] = Move(file, target.with_name(file.name), like=target, may_replace=owned)
    _note(new, proto, data, metadata, is_changed=is_changed)
    places = {move.target.resolve() for move in data.values()}
    moves = [*data.values(), *others]
    work.commit(in_safe_order(Move(new, target), moves), lambda: obsolete_files(target, places))


def _move_beside(
    file: Path, place: Path, model: Path, replaces: Callable[[Path], bool]
) -> list[Move]:
    """The move of a file that is none of the data; none if the file is there with the same contents."""
    if is_plain_file(place) and filecmp.cmp(file, place, shallow=False):
        return []
    if os.path.lexists(place) and not replaces(place):
        raise FileError(
            place, f"is there, and belongs to no export of {model.name}; export into another folder"
        )
    return [Move(file, place, like=model, may_replace=replaces)]


def _renamed(tensors: Iterable[onnx.TensorProto], file: Path, place: Path) -> Path:
    """Give a data file another name, in the work folder and in the tensors of the model that are in it."""
    for tensor in tensors:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = place.name
    return file.rename(file.with_name(place.name))


def _external_tensors(proto: onnx.ModelProto) -> dict[str, list[onnx.TensorProto]]:
    """The tensors of a model in each data file, by the name of the file."""
    found: dict[str, list[onnx.TensorProto]] = {}
    for graph in graph_protos(proto.graph):
        attributes = (attribute for node in graph.node for attribute in node.attribute)
        for tensor in (
            *graph.initializer,
            *(attribute.t for attribute in attributes if attribute.HasField("t")),
        ):
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                location = next(
                    (entry.value for entry in tensor.external_data if entry.key == "location"), ""
                )
                found.setdefault(location, []).append(tensor)
    return found


@contextlib.contextmanager
def readable(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Provide a path to write a model to and to read it from; of a device, a temporary one, copied at the end."""
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
    about: Mapping[str, Mapping[str, str]],
    *,
    is_changed: bool,
) -> None:
    """Write the descriptions of its data files, by name, into the file of a model; ``is_changed``: and the model."""
    model = deserialized(proto)
    tensors: dict[str, list[ir.ExternalTensor]] = {}
    for slot in slots(model):
        if isinstance(slot.tensor, ir.ExternalTensor):
            tensors.setdefault(os.fspath(slot.tensor.location), []).append(slot.tensor)
    notes: dict[str, Mapping[str, Any]] = {
        name: describe_own(data[name].new, places_of(stored), data[name].target)
        for name, stored in tensors.items()
        if name in data
    }
    metadata: dict[str, str] = {}
    put_notes(metadata, notes)
    entries = [onnx.StringStringEntryProto(key=key, value=value) for key, value in metadata.items()]
    missing = [
        each for each in proto.graph.initializer if each.name in about and not each.metadata_props
    ]
    for each in missing:
        onnx.helper.set_metadata_props(each, dict(about[each.name]))
    if is_protobuf(file) and tags.DATA not in model.metadata_props and not (missing or is_changed):
        with file.open("ab") as stream:  # protobuf merges messages that follow each other
            stream.write(onnx.ModelProto(metadata_props=entries).SerializeToString())
        return
    kept = [each for each in proto.metadata_props if each.key != tags.DATA]
    del proto.metadata_props[:]
    proto.metadata_props.extend([*kept, *entries])
    onnx.save(proto, file)
