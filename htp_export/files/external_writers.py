"""Files that other programs write: into a work folder, from which they are moved to their places together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx
import onnx_ir as ir

from htp_export.files.data_plan import describe_own, in_safe_order, put_notes
from htp_export.files.filesystem import is_special, temporary_folder
from htp_export.files.model_files import obsolete_files, places_of, read_model, write_model
from htp_export.files.parsing import deserialized, is_protobuf
from htp_export.files.replacing import Move, work_folder
from htp_export.files.stored import slots
from htp_export.format import tags


@contextlib.contextmanager
def written_whole(
    path: str | os.PathLike[str], metadata: Mapping[str, Mapping[str, str]] = MappingProxyType({})
) -> Iterator[Path]:
    """Provide a path to write a model and its data files; on success, they are moved to their places.

    The model gets a description of its data files. If ``path`` is a symbolic link, the model replaces the target of the
    link, and the data files are beside the link, as with ``torch.onnx.export``. If it is a device or a pipe, all
    weights are in the model; a FileError if they are more than an ONNX file can hold.

    ``metadata`` has that of initializers by name: onnx_ir writes none for those in data files. A model with data files
    that is not valid is an InputError, and no file is written.
    """
    target = Path(path)
    if is_special(target):
        with readable(target) as new:
            yield new
        return
    with work_folder(target) as work:
        new = work.new / target.name
        yield new
        data = [Move(file, target.with_name(file.name), like=target) for file in work.new.iterdir() if file != new]
        if not new.exists():
            return
        if data:
            _note(new, {move.new.name: move.target for move in data}, metadata)
        places = {move.target.resolve() for move in data}
        work.commit(in_safe_order(Move(new, target), data), lambda: obsolete_files(target, places))


@contextlib.contextmanager
def readable(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Provide a path to write a model to and to read it from; of a device, a temporary one, copied at the end."""
    target = Path(path)
    if not is_special(target):
        yield target
        return
    with temporary_folder() as folder:
        new = folder / "model.onnx"
        yield new
        write_model(read_model(new), target)


def _note(file: Path, replaced: Mapping[str, Path], about: Mapping[str, Mapping[str, str]]) -> None:
    """Write the descriptions of its data files into a model; ``replaced`` is the file that each, by name, replaces."""
    # Not `read_model`, which judges models: torch leaves the weights out with ``export_params=False``.
    proto = onnx.load(file, load_external_data=False)
    model = deserialized(proto)
    tensors: dict[str, list[ir.ExternalTensor]] = {}
    for slot in slots(model):
        if isinstance(slot.tensor, ir.ExternalTensor):
            tensors.setdefault(os.fspath(slot.tensor.location), []).append(slot.tensor)
    notes: dict[str, Mapping[str, Any]] = {
        name: describe_own(file.with_name(name), places_of(stored), replaced[name])
        for name, stored in tensors.items()
        if name in replaced
    }
    metadata: dict[str, str] = {}
    put_notes(metadata, notes)
    entries = [onnx.StringStringEntryProto(key=key, value=value) for key, value in metadata.items()]
    missing = [each for each in proto.graph.initializer if each.name in about and not each.metadata_props]
    for each in missing:
        onnx.helper.set_metadata_props(each, dict(about[each.name]))
    if is_protobuf(file) and tags.DATA not in model.metadata_props and not missing:
        with file.open("ab") as stream:  # protobuf merges messages that follow each other
            stream.write(onnx.ModelProto(metadata_props=entries).SerializeToString())
        return
    kept = [each for each in proto.metadata_props if each.key != tags.DATA]
    del proto.metadata_props[:]
    proto.metadata_props.extend([*kept, *entries])
    onnx.save(proto, file)
