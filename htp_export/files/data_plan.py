"""The data files of a model that is written: which weights they contain, and their description in its metadata.

``htp.weights`` describes a data file that the model shares with another model: a new export of the
other model would change the weights of this one. ``htp.data`` describes the model's own data files,
to detect that the model or a data file was replaced or copied without the other.
``docs/format.md`` has the format.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import onnx
import onnx_ir as ir

from htp_export.errors import FileError
from htp_export.files.filesystem import CHUNK_BYTES
from htp_export.files.lazy_tensor import Slot
from htp_export.files.linked_weights import SharedFile, shared_files_of
from htp_export.files.write_file import Move
from htp_export.format import tags
from htp_export.format.json_text import parse_json

_SMALL_BYTES = 256
"""Tensors up to this size stay in the ONNX file, as in onnx and onnx_ir, because shape inference reads them."""


@dataclass(frozen=True)
class DataPlan:
    """Which tensors of a model are written into its data file, and which stay in existing data files.

    ``free``: whether the data file must not exist yet. This is so if its name was chosen here: then
    one rename replaces the model. Names in ``staying`` are relative to the folder of the target;
    ``shared`` is the subset of these names that belongs to another model. ``linked`` has the files
    that the folder of the target may not have yet.
    """

    target: Path
    data: Path
    free: bool
    moving: list[Slot]
    staying: list[tuple[Slot, str]]
    shared: set[str]
    linked: Sequence[SharedFile] = ()

    @property
    def needed(self) -> set[Path]:
        """The data files of the model that is written, resolved."""
        files = {self.data.resolve()}
        for slot, _ in self.staying:
            files.add(Path(slot.path).resolve())
        return files


class _Sources:
    """The data files that the external tensors of a model are read from, by the paths of the tensors.

    ``names`` are relative to the folder of the target; None for a file in another folder.
    """

    def __init__(self, external: Iterable[Slot], target: Path) -> None:
        home = target.parent.resolve()
        # many tensors have the same path; each look at the file system takes time
        paths = {slot.path for slot in external}
        self.names = {path: _name_from(home, Path(path)) for path in paths}
        self._files = {path: Path(path).resolve() for path in paths}

    def names_outside(self, files: Collection[Path]) -> set[str]:
        """The names of the data files that are not in ``files``."""
        names = set[str]()
        for path, name in self.names.items():
            if name is not None and self._files[path] not in files:
                names.add(name)
        return names

    def contain(self, file: Path) -> bool:
        """Whether tensors are read from a file."""
        return file in self._files.values()


def plan_data(
    places: list[Slot],
    target: Path,
    external_data: str | Literal[True] | None,
    own: Callable[[], Collection[Path]],
    *,
    most_inside: int,
    share: bool,
    serial: bool = False,
    outside: Collection[int] = (),
) -> DataPlan:
    """Plan the data files of a model: either all of its external tensors move into a new file, or none.

    ``external_data`` is the name of the data file for all weights; True to choose the name here;
    None to write all weights into the ONNX file, or all into the data file: into the data file if
    there are external weights, or more than ``most_inside`` bytes. ``own`` returns the data files
    of the model that is replaced, without shared ones. ``share``: external weights stay in their
    files, and up to ``most_inside`` bytes of other weights are in the ONNX file; a `FileError` if
    the files are in another folder. ``serial``: do not choose the plain name ``<name>.data``.
    ``outside``: the ``id`` of small tensors that are written into the data file if large ones are.
    """
    movable = [slot for slot in places if slot.tensor.dtype != ir.DataType.STRING]
    external = [slot for slot in movable if slot.external]
    large = [slot for slot in movable if _is_large_initializer(slot, outside)]
    free = external_data in (None, True)
    data = _free_name(target, serial=serial) if free else target.with_name(str(external_data))
    if external_data is not None:
        return DataPlan(target, data, free, [*external, *large], [], set())
    is_beside = bool(external) and not share
    if not is_beside and _total_bytes(large) <= most_inside:
        large = []
    sources = _Sources(external, target)
    if share:
        _check_shareable(target, sources.names)
    usual = usual_data_file(target).resolve()
    owned = {usual}
    if external and not share:
        owned.update(own())
    shared = sources.names_outside(owned)
    # large weights would be written over the external ones that are read from there
    overwrites_source = bool(large) and sources.contain(usual)
    is_in_another_folder = None in sources.names.values()
    is_of_another_model = bool(shared) and not share
    if overwrites_source or is_in_another_folder or is_of_another_model:
        return DataPlan(target, data, free, [*external, *large], [], set())
    staying = [(slot, sources.names[slot.path] or "") for slot in external]
    return DataPlan(target, data, free, large, staying, shared)


def plan_shared(
    places: list[Slot],
    target: Path,
    sources: Iterable[Path],
    *,
    own: bool = False,
    serial: bool = False,
) -> DataPlan:
    """Plan the data files of a model that shares files of a checkpoint; other weights move into its data file.

    ``sources``: the files of the checkpoint. ``own``: they belong to the model. ``serial``: do not
    choose the plain name ``<name>.data``.
    """
    files = shared_files_of(sources, target)
    moving: list[Slot] = []
    staying: list[tuple[Slot, str]] = []
    for slot in places:
        shared = files.get(Path(slot.path).resolve()) if slot.external else None
        if shared is not None:
            staying.append((slot, shared.name))
        elif slot.external or _is_large_initializer(slot, ()):
            moving.append(slot)
    names = {name for _, name in staying}
    linked = [file for file in files.values() if file.name in names]
    data = _free_name(target, serial=serial)
    return DataPlan(target, data, True, moving, staying, set() if own else names, linked)


def _is_large_initializer(slot: Slot, outside: Collection[int]) -> bool:
    """Return whether an initializer in memory is written into the data file."""
    if slot.external or not slot.initializer:
        return False
    return slot.tensor.nbytes > _SMALL_BYTES or id(slot.tensor) in outside


def _total_bytes(weights: Iterable[Slot]) -> int:
    """Return the size of weights in memory; a tensor that several initializers share counts once."""
    sizes = {id(slot.tensor): slot.tensor.nbytes for slot in weights}
    return sum(sizes.values())


def _check_shareable(target: Path, names: Mapping[str, str | None]) -> None:
    """Refuse to share data files that have no name relative to the folder of the model."""
    for path, name in names.items():
        if name is None:
            advice = "write the model into that folder, or copy the weights"
            raise FileError(
                target, f"cannot share the weights in {path}: they are in another folder; {advice}"
            )


def _free_name(target: Path, *, serial: bool) -> Path:
    usual = usual_data_file(target)
    if not serial and not os.path.lexists(usual):
        return usual
    return with_serial(target)


def usual_data_file(target: Path) -> Path:
    """Return the path of the data file of an ONNX file, as torch names it."""
    return target.with_name(f"{target.name}.data")


def with_serial(target: Path) -> Path:
    """Return an unused path for a data file of an ONNX file: its name contains a random serial."""
    return target.with_name(f"{target.name}.{secrets.token_hex(4)}.data")


def is_named_by_us(target: Path, name: str) -> bool:
    """Return whether the name of a data file was chosen by htp_export, and not by the user.

    Examples:
        >>> model = Path("a.onnx")
        >>> [is_named_by_us(model, name) for name in ("a.onnx.data", "a.onnx.01ab23cd.data", "weights.bin")]
        [True, True, False]
    """
    return re.fullmatch(rf"{re.escape(target.name)}(\.[0-9a-f]{{8}})?\.data", name) is not None


def _name_from(home: Path, file: Path) -> str | None:
    """Return the path of a data file relative to a folder; None if it is elsewhere, or a link."""
    folder = file.parent.resolve()
    if not folder.is_relative_to(home):
        return None
    return (folder / file.name).relative_to(home).as_posix()


def in_safe_order(model: Move, data: Sequence[Move]) -> list[Move]:
    """Return the renames of a model and its data files in an order in which each mismatch is detected.

    A data file comes before the model if the model or the data file is new: the rename of the model
    then switches from the old files to the new ones. Other data files come after the model: the new
    model has a description, which does not match the data that is still there (`check_notes`), but
    the old model may have no description.
    """
    is_new_model = not os.path.lexists(model.target)
    first = [move for move in data if is_new_model or not os.path.lexists(move.target)]
    return [*first, model, *(move for move in data if move not in first)]


Place = tuple[int, int]
"""The position of a tensor in a data file: its offset and its length in bytes."""

_BLOCK_BYTES = 4096  # one page of memory
_BLOCKS = 64  # sampled in each file, independent of its size: they are read in one millisecond
_TENSOR_BYTES = 256  # sampled at the start of each tensor: other weights differ there

_END = b"htp.data "
"""The first bytes after the tensors in a data file that replaces another one; a JSON object follows."""

_LONGEST_END = 256  # such an end has about a hundred bytes

_SHARED = {"size": int, "modified_ns": int, "sha256": str}
_OWN = {"size": int, "serial": str, "tensors": str}


def describe_shared(file: Path) -> dict[str, Any]:
    """Return the entry of ``htp.weights`` for a shared file: size, modification time and hash."""
    state = file.stat()
    return {"size": state.st_size, "modified_ns": state.st_mtime_ns, "sha256": sha256_of(file)}


def describe_own(
    file: Path, tensors: Iterable[Place], replaced: Path | None = None
) -> dict[str, Any]:
    """Return the entry of ``htp.data`` for a model's own data file: its size, and a hash of samples.

    If the file that it replaces would match, too, the first block that differs is sampled as well, so
    that the model never matches the replaced file.
    """
    places = sorted(tensors)
    size = file.stat().st_size
    serial = _serial(file, places, size)
    note: dict[str, Any] = {"size": size, "serial": serial, "tensors": layout_of(places)}
    if replaced is None or not replaced.is_file():
        return note
    offset = None
    with contextlib.suppress(FileNotFoundError):  # another process may replace it at any time
        if replaced.stat().st_size >= size and _is_described(replaced, note, places):
            offset = _first_difference(file, replaced)
    if offset is not None:
        note["serial"] = _serial(file, places, size, offset)
        note["differs"] = offset
    return note


def end_of_replacement(file: Path, note: Mapping[str, Any], places: Iterable[Place]) -> bytes:
    """Return the bytes to append to new data, so that they match a model that was written with other data.

    Empty if they match as they are.

    Args:
        file: The new data, as long as the data that the note describes.
        note: The entry of ``htp.data`` in the model, which does not change.
        places: The positions of the tensors.
    """
    serial = _serial(file, places, note["size"], note.get("differs"))
    if serial == note["serial"]:
        return b""
    end = {"replaces": _hash_of(note), "serial": serial}
    return _END + json.dumps(end, separators=(",", ":")).encode() + b"\n"


def put_notes(
    metadata: MutableMapping[str, str],
    own: Mapping[str, Mapping[str, Any]],
    shared: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Replace the descriptions of data files in the metadata of a model.

    ``own`` and ``shared``: name of a data file → its entry of ``htp.data`` or ``htp.weights``.
    """
    for key, notes in ((tags.DATA, own), (tags.WEIGHTS, shared)):
        metadata.pop(key, None)
        if notes:
            metadata[key] = json.dumps(dict(sorted(notes.items())), separators=(",", ":"))


def rename_note(
    metadata: Iterable[onnx.StringStringEntryProto], old_name: str, new_name: str
) -> None:
    """Give the description of a data file in the metadata of a model another name of the file."""
    for entry in metadata:
        if entry.key == tags.DATA:
            notes = json.loads(entry.value)
            own = {new_name if name == old_name else name: note for name, note in notes.items()}
            renamed: dict[str, str] = {}
            put_notes(renamed, own)
            entry.value = renamed[tags.DATA]


def shared_files(model: Path, metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the data files that a model shares: name → description; a `FileError` for an invalid entry."""
    return _notes(model, metadata, tags.WEIGHTS, _SHARED)


def check_notes(
    model: Path,
    metadata: Mapping[str, str],
    files: Mapping[str, Path],
    tensors: Callable[[str], Iterable[Place]],
) -> None:
    """Refuse a model if its data files are not the files that it was written with.

    A shared file with the same size and modification time is accepted without reading it; otherwise
    it is hashed. Of the model's own files, only samples are read. If the tensors have other
    positions than described, another tool wrote both files, and the description is ignored.

    Args:
        model: The ONNX file, for messages.
        metadata: The metadata of the model.
        files: The location in external tensors → the data file.
        tensors: Returns the positions of the tensors at a location.
    """
    shared = shared_files(model, metadata)
    own = own_notes(model, metadata)
    for location, note in (*shared.items(), *own.items()):
        file = files.get(location)
        # a missing file is reported when a tensor is read
        if file is None or not file.is_file():
            continue
        try:
            if location in shared:
                _check_shared(model, file, note)
            else:
                _check_own(model, file, note, sorted(tensors(location)))
        except OSError as error:
            raise FileError.unreadable(file, error) from error


def _check_shared(model: Path, file: Path, note: Mapping[str, Any]) -> None:
    state = file.stat()
    if state.st_size != note["size"]:
        problem = f"it had {note['size']:,} bytes and now has {state.st_size:,}"
    elif state.st_mtime_ns != note["modified_ns"] and sha256_of(file) != note["sha256"]:
        problem = "its contents differ"
    else:
        return
    raise FileError(
        model,
        f"its shared weights were changed: {file} is not the file that the model was written with "
        f"({problem}); write {model.name} again, without --share-weights if it should have a copy",
    )


def _check_own(model: Path, file: Path, note: Mapping[str, Any], places: list[Place]) -> None:
    size = file.stat().st_size
    if layout_of(places) != note["tensors"]:
        return  # another tool wrote both files
    needed = max((offset + length for offset, length in places), default=0)
    if size < needed:
        return  # this is reported when a tensor is read
    if size < note["size"]:
        problem = (
            f"the model was written with {note['size']:,} bytes of data, but the file has {size:,}"
        )
    elif not _is_described(file, note, places):
        problem = "its contents are not the data that the model was written with"
    else:  # if the file is longer, another tool appended data
        return
    raise FileError(
        model,
        f"does not match its data file {file.name}: {problem}. One of the two was replaced without the other, "
        "for example by an interrupted export; write the model again",
    )


def _is_described(file: Path, note: Mapping[str, Any], places: Sequence[Place]) -> bool:
    """Return whether a data file has the data that a model was written with, or replaces them."""
    serial = _serial(file, places, note["size"], note.get("differs"))
    if serial == note["serial"]:
        return True
    end = behind_data(file, note)
    return bool(end == {"replaces": _hash_of(note), "serial": serial})


def _hash_of(note: Mapping[str, Any]) -> str:
    """Return a hash of the description of a data file, which names the data that others replace."""
    described = {
        name: note[name] for name in ("differs", "serial", "size", "tensors") if name in note
    }
    text = json.dumps(described, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def behind_data(file: Path, note: Mapping[str, Any]) -> Any:
    """Return what is behind the data that a note describes: ``{}`` for nothing, None for data of others.

    Otherwise, it is the JSON object that `end_of_replacement` has appended.
    """
    with file.open("rb") as stream:
        stream.seek(note["size"])
        end = stream.read(_LONGEST_END + 1)
    if not end:
        return {}
    if not end.startswith(_END) or len(end) > _LONGEST_END:
        return None
    try:
        return parse_json(end.removeprefix(_END))
    except ValueError:
        return None


def own_notes(model: Path, metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the data files that belong to a model: name → description; a `FileError` for an invalid entry."""
    return _notes(model, metadata, tags.DATA, _OWN)


def _notes(
    model: Path, metadata: Mapping[str, str], key: str, kinds: Mapping[str, type]
) -> dict[str, dict[str, Any]]:
    """Return the notes under a key of the metadata, with fields of these types."""
    try:
        notes = parse_json(metadata.get(key, "{}"))
        if all(_is_note(note, kinds) for note in notes.values()):
            return dict(notes)
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise FileError(model, f"its {key} is not what the file format says")


def _is_note(note: Mapping[str, Any], kinds: Mapping[str, type]) -> bool:
    for number in (note["size"], note.get("differs", 0)):
        # the sum of two such numbers is a valid offset of 63 bits
        if type(number) is not int or not 0 <= number < 1 << 62:
            return False
    return all(isinstance(note[key], kind) for key, kind in kinds.items())


def _serial(file: Path, places: Iterable[Place], size: int, differs: int | None = None) -> str:
    """Return a hash of samples of the first ``size`` bytes of a file.

    The samples are evenly spaced blocks, the starts of tensors, and the block at the offset
    ``differs``.
    """
    last = max(size - _BLOCK_BYTES, 0)
    samples = {
        (last * number // (_BLOCKS - 1), min(_BLOCK_BYTES, size)) for number in range(_BLOCKS)
    }
    samples |= {(offset, min(length, _TENSOR_BYTES)) for offset, length in places}
    if differs is not None:
        samples.add((differs, min(_BLOCK_BYTES, size - differs)))
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        for offset, length in sorted(samples):
            stream.seek(offset)
            digest.update(stream.read(max(length, 0)))
    return digest.hexdigest()[:32]


def layout_of(places: Iterable[Place]) -> str:
    """Return the hash of the positions of tensors, as in the field ``tensors`` of ``htp.data``."""
    return hashlib.sha256(json.dumps(sorted(places)).encode()).hexdigest()[:16]


def _first_difference(first_path: Path, second_path: Path) -> int | None:
    """Return the offset of the first block in which a file differs from the start of another; None if equal."""
    with first_path.open("rb") as first, second_path.open("rb") as second:
        position = 0
        while chunk := first.read(CHUNK_BYTES):
            counterpart = second.read(len(chunk))
            if chunk != counterpart:
                start = 0
                while (
                    chunk[start : start + _BLOCK_BYTES] == counterpart[start : start + _BLOCK_BYTES]
                ):
                    start += _BLOCK_BYTES
                return position + start
            position += len(chunk)
    return None


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
