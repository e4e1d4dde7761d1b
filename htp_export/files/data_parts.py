"""The weights of one model in several data files, which several runs write, each with a JSON file that describes it.

The names of the files and their descriptions have a hash of the run, so that parts of other runs are never mixed.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from htp_export.errors import FileError, InputError, first_line
from htp_export.files.data_files import DataFile, DataTensor, find_data, place_data
from htp_export.files.data_plan import describe_own
from htp_export.files.filesystem import is_plain_file
from htp_export.files.lazy_tensor import Slot, descriptive_fields
from htp_export.files.model_files import places_of
from htp_export.files.text_files import read_json
from htp_export.files.write_file import Move, work_folder


@dataclass(frozen=True)
class DataParts:
    """The data files of one model that several runs write.

    Attributes:
        output: The path of the model.
        run: A hash of everything that the tensors are computed from.
        tensors: Name → contents, of the tensors of all parts.
    """

    output: Path
    run: str
    tensors: Mapping[str, ir.TensorProtocol]

    def write(self, names: Sequence[str]) -> None:
        """Write some tensors into a data file, and a JSON file that describes it.

        Raises:
            FileError: A file cannot be written; then neither is.
        """
        try:
            self._write(names)
        except FileError:
            raise
        except Exception as error:
            problem = getattr(error, "strerror", None) or first_line(error)
            raise FileError(self.output, f"a part of it cannot be written: {problem}") from error

    def _write(self, names: Sequence[str]) -> None:
        key = hash_of([self.run, names])[:8]
        data = self.output.with_name(f"{self.output.name}.{key}.data")
        index = data.with_suffix(".json")
        slots = [Slot(self.tensors[name], _keep, True) for name in names]
        with work_folder(data) as work:
            new, new_index = work.new / data.name, work.new / index.name
            with new.open("xb") as stream:
                placed = place_data(slots, stream, data, self.output)
            note = describe_own(new, places_of(placed))
            places = {
                name: [tensor.offset, tensor.length]
                for name, tensor in zip(names, placed, strict=True)
            }
            described = {"run": self.run, "data": data.name, **note, "places": places}
            new_index.write_text(json.dumps(described, indent=1), encoding="utf-8", newline="\n")
            work.commit([Move(new, data), Move(new_index, index)])

    def written(self) -> dict[str, DataTensor]:
        """Return the tensors in the parts of this run: name → tensor in a data file."""
        found: dict[str, DataTensor] = {}
        for index in sorted(self.output.parent.glob(f"{glob.escape(self.output.name)}.*.json")):
            described = _part(index)
            if described is None or described.get("run") != self.run:
                continue
            for name, tensor in self._tensors_of(described):
                found.setdefault(name, tensor)
        return found

    def _tensors_of(self, described: Mapping[str, Any]) -> Iterator[tuple[str, DataTensor]]:
        """Yield the tensors of a part: none if its data file is not the one that is described."""
        folder, name = find_data(self.output, str(described["data"]))
        file = DataFile(folder / name, self.output)
        places = [tuple(place) for place in described["places"].values()]
        if not is_plain_file(file.path) or describe_own(file.path, places) != {
            key: described[key] for key in ("size", "serial", "tensors")
        }:
            return
        for key, (offset, length) in described["places"].items():
            tensor = self.tensors.get(key)
            if tensor is not None and tensor.nbytes == length:
                shape = tuple(tensor.shape.numpy())
                fields = descriptive_fields(tensor)
                place = (name, offset, length, tensor.dtype, shape)
                yield key, DataTensor(*place, fields, file, folder)


def _keep(_: ir.TensorProtocol) -> None:
    """Leave the tensor where it is."""


def _part(index: Path) -> dict[str, Any] | None:
    """Return the description of a part; None for any other file."""
    try:
        described = read_json(index, plain=True)
        places = described["places"].values()
        if all(_is_place(place) for place in places) and isinstance(described["data"], str):
            return dict(described)
    except (FileError, InputError, TypeError, KeyError, AttributeError):
        pass
    return None


def _is_place(place: Any) -> bool:
    if not isinstance(place, list) or len(place) != 2:
        return False
    return all(type(number) is int and 0 <= number < 1 << 62 for number in place)


def hash_of(value: Any) -> str:
    """Return a hash of anything that JSON can express."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def described_files(tensors: Mapping[str, ir.TensorProtocol]) -> dict[str, Any]:
    """Return the size and a hash of samples of each file that contains some of the tensors."""
    by_file: dict[Path, list[DataTensor]] = {}
    for tensor in tensors.values():
        if isinstance(tensor, DataTensor):
            by_file.setdefault(tensor.file.path, []).append(tensor)
    return {file.name: describe_own(file, places_of(found)) for file, found in by_file.items()}
