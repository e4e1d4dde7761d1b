"""New contents for the data file of a model whose ONNX file stays byte for byte as it is.

Engines find compiled models by the hash of the ONNX file. One rename replaces the data file, so that
a killed process leaves the old data or the new; both match the model (`end_of_replacement`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeGuard

import onnx_ir as ir

from htp_export.errors import FileError, first_line
from htp_export.files.data_files import DataFile, DataTensor, find_data
from htp_export.files.data_plan import (
    Place,
    behind_data,
    end_of_replacement,
    layout_of,
    own_notes,
    shared_files,
)
from htp_export.files.filesystem import Identity, begin_flush, copy_range
from htp_export.files.lazy_tensor import descriptive_fields, slots, write_values
from htp_export.files.model_files import ONE_AT_A_TIME, places_of
from htp_export.files.write_file import Move, real_path, work_folder
from htp_export.process.progress import counted


@dataclass(frozen=True)
class Replacement:
    """A tensor in a data file, and its new values, in the same type and shape."""

    old: DataTensor
    new: ir.TensorProtocol

    @property
    def place(self) -> Place:
        """The position of the tensor in the data file."""
        return _place(self.old)


def replace_data(
    file: Path, read: Identity | None, model: ir.Model, replacements: Sequence[Replacement]
) -> list[DataTensor]:
    """Replace tensors in the data file of a model; nothing else changes in it, and nothing in the ONNX file.

    Args:
        file: The ONNX file.
        read: The identity of the ONNX file before it was read.
        model: The model in it, which may have the new tensors.
        replacements: The tensors, as `read_model` returns them. The new values may be computed from
            the old ones.

    Returns:
        The new tensors, in the same order.

    Raises:
        FileError: The tensors are in several data files, or in one that the model shares; a tensor
            overlaps another one with other values; a file was changed meanwhile; or the data file
            cannot be written. No file is changed.
    """
    data = _data_file(file, replacements)
    with ONE_AT_A_TIME.lock:
        contents = _Contents.of(file, model, data, replacements)
        changes = _distinct(data, contents, replacements)
        state = Identity.at(real_path(file))

        def is_as_read(_: Path) -> bool:
            replacements[0].old.file.check()
            return read == state == Identity.at(real_path(file))

        target = real_path(data.path)
        try:
            with work_folder(target) as work:
                new = work.new / target.name
                with new.open("xb") as stream:
                    _write(stream, data, contents, changes)
                if contents.note is not None:
                    end = end_of_replacement(new, contents.note, contents.places)
                    with new.open("ab") as stream:
                        stream.write(end)
                work.commit([Move(new, target, may_replace=is_as_read)])
        except FileExistsError as error:
            raise FileError(file, "was changed after it was read; load it again") from error
        except FileError:
            raise
        except Exception as error:
            problem = getattr(error, "strerror", None) or first_line(error)
            raise FileError(data.path, f"cannot be written: {problem}") from error
    placed = DataFile(data.path, file)
    return [_moved(each, placed) for each in replacements]


@dataclass(frozen=True)
class _Contents:
    """The tensors of a model in one of its data files, and the description of this file in the model.

    ``note`` is None if the model does not describe the file.
    """

    tensors: Sequence[DataTensor]
    note: Mapping[str, Any] | None

    @property
    def places(self) -> list[Place]:
        return sorted(places_of(self.tensors))

    @classmethod
    def of(
        cls, file: Path, model: ir.Model, data: DataFile, replacements: Iterable[Replacement]
    ) -> _Contents:
        """Find the tensors of a model; a `FileError` if the data file belongs to another model, too."""
        for name in shared_files(file, model.metadata_props):
            if _is_at(file, name, data.path):
                raise FileError(
                    file,
                    f"shares {name} with another model, whose weights would change, too; write a copy",
                )
        replaced = [each.old for each in replacements]
        # new tensors may be in files of a checkpoint
        stored = [slot.tensor for slot in slots(model)]
        kept = [tensor for tensor in stored if _is_in(tensor, data)]
        tensors = [*replaced, *kept]
        notes = own_notes(file, model.metadata_props).items()
        note = next((note for name, note in notes if _is_at(file, name, data.path)), None)
        if note is not None and layout_of(places_of(tensors)) != note["tensors"]:
            note = None  # another tool wrote both files
        return cls(tensors, note)


def _is_in(tensor: ir.TensorProtocol, data: DataFile) -> TypeGuard[DataTensor]:
    return isinstance(tensor, DataTensor) and tensor.file.is_same(data)


def _is_at(model: Path, location: str, data: Path) -> bool:
    folder, name = find_data(model, location)
    return (folder / name).resolve() == data.resolve()


def _data_file(model: Path, replacements: Sequence[Replacement]) -> DataFile:
    """Return the only data file of tensors."""
    files = {each.old.file.path.resolve(): each.old.file for each in replacements}
    if len(files) > 1:
        named = ", ".join(sorted(file.name for file in files))
        raise FileError(
            model,
            f"has its weights in {len(files)} data files ({named}), which no single rename replaces; "
            "write it with one data file first",
        )
    return next(iter(files.values()))


def _distinct(
    data: DataFile, contents: _Contents, replacements: Sequence[Replacement]
) -> list[Replacement]:
    """Return one replacement for each position, in order; a `FileError` if two tensors would disagree."""
    by_place: dict[Place, Replacement] = {}
    for each in replacements:
        first = by_place.setdefault(each.place, each)
        if first is not each and first.new.tobytes() != each.new.tobytes():
            raise _disagreeing(data, first.old, each.old)
    places = {each.place for each in replacements}
    kept = [tensor for tensor in contents.tensors if _place(tensor) not in places]
    changes = sorted(by_place.values(), key=lambda each: each.place)
    listed = [(_place(tensor), tensor) for tensor in kept]
    listed += [(each.place, each.old) for each in changes]
    listed.sort(key=lambda item: item[0])
    end, before = 0, None
    for (offset, length), tensor in listed:
        if before is not None and offset < end and places & {_place(before), (offset, length)}:
            raise _disagreeing(data, before, tensor)
        if offset + length > end:
            end, before = offset + length, tensor
    return changes


def _disagreeing(data: DataFile, first: DataTensor, second: DataTensor) -> FileError:
    return FileError(
        data.path,
        f"contains {first.name!r} and {second.name!r} in the same bytes, and their new values differ; "
        "write another file in place of this data file alone",
    )


def _place(tensor: ir.ExternalTensor) -> Place:
    return tensor.offset or 0, tensor.length or tensor.nbytes


def _write(
    stream: IO[bytes], data: DataFile, contents: _Contents, changes: Sequence[Replacement]
) -> None:
    """Write a data file anew with other values of some tensors, without the end of an earlier replacement."""
    position = flushed = 0
    size = data.path.stat().st_size
    if contents.note is not None:
        if behind_data(data.path, contents.note) is None:
            raise FileError(data.path, "contains other data behind the weights of the model")
        size = contents.note["size"]
    with data.opened() as source:
        for each in counted(changes, "weights"):
            offset, length = each.place
            copy_range(source, position, offset - position, stream)
            write_values(each.new, stream)
            position = offset + length
            if stream.tell() != position:
                raise ValueError(f"tensor {each.old.name!r} has another size than before")
            flushed = begin_flush(stream, flushed)
        copy_range(source, position, size - position, stream)


def _moved(replacement: Replacement, file: DataFile) -> DataTensor:
    """Return the external tensor of new values."""
    old = replacement.old
    shape = tuple(old.shape.numpy())
    fields = descriptive_fields(replacement.new)
    return DataTensor(
        os.fspath(old.location),
        old.offset,
        old.length,
        old.dtype,
        shape,
        fields,
        file,
        old.base_dir,
    )
