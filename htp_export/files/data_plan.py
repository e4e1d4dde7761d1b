"""The data files of a model that is written: which weights they take, and how its metadata describes them.

``htp.weights`` describes the contents of a file that the model shares with another one: exporting
the other model again would change this one. ``htp.data`` describes the model's own data files well
enough to detect that one of the two files was replaced or copied without the other.
``docs/format.md`` has the format.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir

from htp_export.errors import FileError
from htp_export.files.filesystem import CHUNK_BYTES
from htp_export.files.lazy_tensor import Slot
from htp_export.files.write_file import Move
from htp_export.format import tags
from htp_export.format.json_text import parse_json

_SMALL_BYTES = 256
"""Tensors up to this size stay in the ONNX file, as onnx and onnx_ir have it: shape inference reads them."""


@dataclass(frozen=True)
class DataPlan:
    """The plan for the weights of a model: places whose tensors move into the data file, and those that stay.

    ``free``: whether the name of the data file must not exist, because it was chosen here: one
    rename then replaces the model. Names of files that stay are relative to the folder of the
    target; ``shared`` are those that are not the target's own.
    """

    target: Path
    data: Path
    free: bool
    moving: list[Slot]
    staying: list[tuple[Slot, str]]
    shared: set[str]

    @property
    def needed(self) -> set[Path]:
        """The data files of the model that is written, resolved."""
        return {self.data.resolve(), *(Path(slot.path).resolve() for slot, _ in self.staying)}


def plan_data(
    places: list[Slot],
    target: Path,
    external_data: str | Literal[True] | None,
    own: Callable[[], Collection[Path]],
    *,
    most_inside: int,
    share: bool,
    serial: bool = False,
) -> DataPlan:
    """Make the plan: all external tensors move, or none.

    ``external_data`` names the data file for all weights; True to choose the name here; None to
    keep external what is external. ``own`` returns the data files of the model that is replaced,
    without shared ones. At most ``most_inside`` bytes of weights in memory go into the ONNX file.
    ``share``: external weights stay where they are; a `FileError` if they are in another folder.
    ``serial``: the plain name, ``<name>.data``, is not to be chosen.
    """
    movable = [slot for slot in places if slot.tensor.dtype != ir.DataType.STRING]
    external = [slot for slot in movable if slot.external]
    large = [
        slot
        for slot in movable
        if slot.initializer and not slot.external and slot.tensor.nbytes > _SMALL_BYTES
    ]
    data = (
        _free_name(target, serial=serial)
        if external_data in (None, True)
        else target.with_name(str(external_data))
    )
    free = external_data in (None, True)
    if external_data is not None:
        return DataPlan(target, data, free, [*external, *large], [], set())
    if sum({id(slot.tensor): slot.tensor.nbytes for slot in large}.values()) <= most_inside:
        large = []
    home = target.parent.resolve()
    names = {path: _name_from(home, Path(path)) for path in {slot.path for slot in external}}
    if share:
        for path, name in names.items():
            if name is None:
                advice = "write into that folder, or copy the weights"
                raise FileError(
                    target,
                    f"cannot share the weights in {path}: they lie in another folder; {advice}",
                )
    usual = target.with_name(f"{target.name}.data").resolve()
    ours = {usual} if share or not names else {usual, *own()}
    stays = all(
        name is not None and (share or Path(path).resolve() in ours) for path, name in names.items()
    )
    if not stays or (large and any(Path(path).resolve() == usual for path in names)):
        return DataPlan(target, data, free, [*external, *large], [], set())
    shared = {name for path, name in names.items() if name and Path(path).resolve() not in ours}
    staying = [(slot, names[slot.path] or "") for slot in external]
    return DataPlan(target, data, free, large, staying, shared)


def _free_name(target: Path, *, serial: bool) -> Path:
    usual = target.with_name(f"{target.name}.data")
    if not serial and not os.path.lexists(usual):
        return usual
    return with_serial(target)


def with_serial(target: Path) -> Path:
    """Return a name for a data file of an ONNX file that no other file has."""
    return target.with_name(f"{target.name}.{secrets.token_hex(4)}.data")


def is_named_by_us(target: Path, name: str) -> bool:
    """Return whether a data file of an ONNX file has a name that was chosen here.

    Examples:
        >>> model = Path("a.onnx")
        >>> [is_named_by_us(model, name) for name in ("a.onnx.data", "a.onnx.01ab23cd.data", "weights.bin")]
        [True, True, False]
    """
    return re.fullmatch(rf"{re.escape(target.name)}(\.[0-9a-f]{{8}})?\.data", name) is not None


def _name_from(home: Path, file: Path) -> str | None:
    """Return the path of a data file relative to a folder; None if it is elsewhere, or a link."""
    folder = file.parent.resolve()
    return (
        (folder / file.name).relative_to(home).as_posix() if folder.is_relative_to(home) else None
    )


def in_safe_order(model: Move, data: Sequence[Move]) -> list[Move]:
    """Return the files in an order in which every wrong pair of model and data is detected.

    Data files come before a new model, and if their names are new: the rename of the model then
    switches from the old files to the new ones. Others come after the model, because the new model
    describes that it does not match the data that they replace (`data_notes`); the old model may
    have no description.
    """
    first = [
        move
        for move in data
        if not os.path.lexists(move.target) or not os.path.lexists(model.target)
    ]
    return [*first, model, *(move for move in data if move not in first)]


Place = tuple[int, int]
"""Where a tensor lies in a data file: where it begins, and how many bytes it takes."""

_BLOCK_BYTES = 4096  # a page
_BLOCKS = 64  # of a file, whatever its size: they are read in a millisecond
_TENSOR_BYTES = 256  # of the start of each tensor: other numbers differ there

_SHARED = {"size": int, "modified_ns": int, "sha256": str}
_OWN = {"size": int, "serial": str, "tensors": str}


def describe_shared(file: Path) -> dict[str, Any]:
    """Return the entry of ``htp.weights`` for a file of another model: size, modification time and hash."""
    state = file.stat()
    return {"size": state.st_size, "modified_ns": state.st_mtime_ns, "sha256": sha256_of(file)}


def describe_own(
    file: Path, tensors: Iterable[Place], replaced: Path | None = None
) -> dict[str, Any]:
    """Return the entry of ``htp.data`` for a model's own data file: its size, and a serial computed from samples.

    If the samples of the file that it replaces are equal, the first block that differs is sampled,
    too, so that the model never matches the replaced file.
    """
    places = sorted(tensors)
    size = file.stat().st_size
    note: dict[str, Any] = {
        "size": size,
        "serial": _serial(file, places, size),
        "tensors": _layout(places),
    }
    alike = replaced is not None and replaced.is_file() and replaced.stat().st_size >= size
    if replaced is not None and alike and _serial(replaced, places, size) == note["serial"]:
        at = _first_difference(file, replaced)
        note |= {} if at is None else {"serial": _serial(file, places, size, at), "differs": at}
    return note


def put_notes(
    metadata: MutableMapping[str, str],
    own: Mapping[str, Mapping[str, Any]],
    shared: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write the descriptions of data files, by name, into the metadata of a model, and remove earlier ones."""
    for key, notes in ((tags.DATA, own), (tags.WEIGHTS, shared)):
        metadata.pop(key, None)
        if notes:
            metadata[key] = json.dumps(dict(sorted(notes.items())), separators=(",", ":"))


def shared_files(model: Path, metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the files that a model shares with others: name → description. An invalid entry is a `FileError`."""
    return _notes(model, metadata, tags.WEIGHTS, _SHARED)


def check_notes(
    model: Path,
    metadata: Mapping[str, str],
    files: Mapping[str, Path],
    tensors: Callable[[str], Iterable[Place]],
) -> None:
    """Refuse a model whose data files are not those with which it was written.

    A shared file with the same size and modification time is accepted; otherwise it is hashed. Of
    the model's own files, samples are read. If the model's tensors have other places in the file
    than described, another tool has written both files, and the description is ignored. ``files``:
    the name by which the model knows a file → the file; ``tensors`` returns the places of the
    tensors in a file of this name.
    """
    shared = shared_files(model, metadata)
    own = _notes(model, metadata, tags.DATA, _OWN)
    for location, facts in (*shared.items(), *own.items()):
        file = files.get(location)
        if file is None or not file.is_file():  # what is missing is said when it is needed
            continue
        try:
            if location in shared:
                _check_shared(model, file, facts)
            else:
                _check_own(model, file, facts, sorted(tensors(location)))
        except OSError as error:
            raise FileError.unreadable(file, error) from error


def _check_shared(model: Path, file: Path, facts: Mapping[str, Any]) -> None:
    state = file.stat()
    problem = ""
    if state.st_size != facts["size"]:
        problem = f"it had {facts['size']:,} bytes and has {state.st_size:,}"
    elif state.st_mtime_ns != facts["modified_ns"] and sha256_of(file) != facts["sha256"]:
        problem = "it has other contents"
    if problem:
        raise FileError(
            model,
            f"shares its weights, which were changed: {file} is not what it was ({problem}); "
            f"write {model.name} again, without --share-weights to be safe from this",
        )


def _check_own(model: Path, file: Path, facts: Mapping[str, Any], places: list[Place]) -> None:
    size = file.stat().st_size
    if _layout(places) != facts["tensors"] or size < max(
        (at + length for at, length in places), default=0
    ):
        return  # written by another tool; or too short, which is said when a tensor is read
    if size < facts["size"]:
        problem = (
            f"the model was written with {facts['size']:,} bytes of data, and there are {size:,}"
        )
    elif _serial(file, places, facts["size"], facts.get("differs")) != facts["serial"]:
        problem = "it has other contents than the data that the model was written with"
    else:  # what follows in a file that is longer was appended by another tool
        return
    raise FileError(
        model,
        f"does not fit its data file {file.name}: {problem}. One of the two was replaced without the other, as by an "
        "export that was interrupted; write the model again",
    )


def _notes(
    model: Path, metadata: Mapping[str, str], key: str, kinds: Mapping[str, type]
) -> dict[str, dict[str, Any]]:
    try:
        notes = parse_json(metadata.get(key, "{}"))
        if all(_is_note(facts, kinds) for facts in notes.values()):
            return dict(notes)
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise FileError(model, f"its {key} is not what the file format says")


def _is_note(facts: Mapping[str, Any], kinds: Mapping[str, type]) -> bool:
    numbers = (facts["size"], facts.get("differs", 0))
    places = all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
    return places and all(isinstance(facts[key], kind) for key, kind in kinds.items())


def _serial(file: Path, places: Iterable[Place], size: int, differs: int | None = None) -> str:
    """Return a hash of samples of the first ``size`` bytes: evenly spaced blocks, starts of tensors, and one block."""
    last = max(size - _BLOCK_BYTES, 0)
    parts = {(last * number // (_BLOCKS - 1), min(_BLOCK_BYTES, size)) for number in range(_BLOCKS)}
    parts |= {(at, min(length, _TENSOR_BYTES)) for at, length in places}
    parts |= {(differs, min(_BLOCK_BYTES, size - differs))} if differs is not None else set()
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        for at, length in sorted(parts):
            stream.seek(at)
            digest.update(stream.read(max(length, 0)))
    return digest.hexdigest()[:32]


def _layout(places: list[Place]) -> str:
    return hashlib.sha256(json.dumps(places).encode()).hexdigest()[:16]


def _first_difference(first_path: Path, second_path: Path) -> int | None:
    """Return the offset of the first block that differs between a file and the start of another; None without one."""
    with first_path.open("rb") as first, second_path.open("rb") as second:
        at = 0
        while chunk := first.read(CHUNK_BYTES):
            opposite = second.read(len(chunk))
            if chunk != opposite:
                bounds = [*range(0, len(chunk), _BLOCK_BYTES), len(chunk)]
                same = (chunk[start:end] == opposite[start:end] for start, end in pairwise(bounds))
                return at + _BLOCK_BYTES * list(same).index(False)
            at += len(chunk)
    return None


def sha256_of(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
