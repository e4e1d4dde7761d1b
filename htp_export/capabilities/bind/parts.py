"""``only``: one part of the new weights, in a data file of its own; the run that completes the parts writes the model.

Beside each data file is a JSON file that says which tensors are where in it. Their names have a hash of
the model, the weights and the tensors, so that parts of other runs are never mixed.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import onnx_ir as ir

from htp_export.errors import FileError, InputError, first_line
from htp_export.files.data_files import DataFile, DataTensor, find_data, place_data
from htp_export.files.data_plan import describe_own, sha256_of
from htp_export.files.filesystem import is_plain_file, is_special
from htp_export.files.lazy_tensor import Slot, descriptive_fields
from htp_export.files.model_files import places_of, write_sharing
from htp_export.files.text_files import read_json
from htp_export.files.write_file import Move, real_path, work_folder
from htp_export.format.recipes import Recipe, parameters_in
from htp_export.format.tags import ancestors
from htp_export.model.tagged import ModelSource, TaggedModel
from htp_export.plans.rules import modules_within
from htp_export.reporting.columns import many
from htp_export.weights.fitting import Needed

Selector: TypeAlias = str | Sequence[str]

Tensors: TypeAlias = Mapping[ir.Value, ir.TensorProtocol]

_SMALL_BYTES = 256
"""Tensors up to this size are in the ONNX file: the run that writes it computes them."""

_MOST_NAMED = 5
"""Modules that a note names."""


@dataclass(frozen=True)
class Parts:
    """The parts of the weights of one model.

    Attributes:
        output: The model that is written when all parts are there.
        run: A hash of the model and of the weights.
        large: Name of each initializer in a part → its new contents.
        modules: Name of each initializer in a part → the module of its first entry.
    """

    output: Path
    run: str
    large: Mapping[str, ir.TensorProtocol]
    modules: Mapping[str, str]

    @classmethod
    def of(
        cls,
        model: ModelSource,
        output: str | os.PathLike[str] | None,
        needed: Needed,
        tensors: Tensors,
        entries: Mapping[str, ir.TensorProtocol],
    ) -> Parts:
        """Find the tensors of all parts.

        Raises:
            InputError: There is no output, or the model or the weights are no files.
            FileError: The output is a device or a pipe.
        """
        files = {tensor.file.path for tensor in entries.values() if isinstance(tensor, DataTensor)}
        if output is None or not isinstance(model, str | os.PathLike) or not files:
            raise InputError(
                "only writes a part of a file: give the path of a model, an output, and safetensors files as weights"
            )
        if is_special(Path(output)):
            raise FileError(output, "is not a regular file, so that no data file can be beside it")
        large: dict[str, ir.TensorProtocol] = {}
        modules: dict[str, str] = {}
        for value, tensor in tensors.items():
            if tensor.nbytes > _SMALL_BYTES:
                large[str(value.name)] = tensor
                modules[str(value.name)] = _module_of(needed.recipes[value], needed)
        run = _hash_of([sha256_of(Path(model)), _described(entries)])
        return cls(real_path(Path(output)), run, large, modules)

    def write(self, only: Selector, tagged: TaggedModel) -> str:
        """Write one part, and the model if all parts are there; return a note on what is missing.

        Raises:
            InputError: The selector matches no module, or no module with weights.
            FileError: A file cannot be written.
        """
        selected = frozenset(modules_within(tagged, only))
        names = [name for name, module in self.modules.items() if module in selected]
        if not names:
            raise InputError(
                f"only={only!r}: no tensor of the file has its weights from these modules"
            )
        try:
            self._write_part(names)
        except FileError:
            raise
        except Exception as error:
            problem = getattr(error, "strerror", None) or first_line(error)
            raise FileError(self.output, f"a part of it cannot be written: {problem}") from error
        written = self._written()
        missing = [name for name in self.large if name not in written]
        done = f"{len(names):,} of {many(len(self.large), 'tensor')} were written"
        if missing:
            modules = list(dict.fromkeys(self.modules[name] or "." for name in missing))
            more = ", ..." * (len(modules) > _MOST_NAMED)
            listed = ", ".join(modules[:_MOST_NAMED]) + more
            return f"{done}; {self.output.name} is written when those of {listed} are there"
        self._write_model(tagged.model, written)
        return f"{done}; all parts are there, and {self.output.name} refers to them"

    def _write_part(self, names: list[str]) -> None:
        """Write the tensors into a data file, and a JSON file that describes it."""
        key = _hash_of([self.run, names])[:8]
        data = self.output.with_name(f"{self.output.name}.{key}.data")
        index = data.with_suffix(".json")
        slots = [Slot(self.large[name], _keep, True) for name in names]
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

    def _written(self) -> dict[str, DataTensor]:
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
            tensor = self.large.get(key)
            if tensor is not None and tensor.nbytes == length:
                shape = tuple(tensor.shape.numpy())
                fields = descriptive_fields(tensor)
                place = (name, offset, length, tensor.dtype, shape)
                yield key, DataTensor(*place, fields, file, folder)

    def _write_model(self, model: ir.Model, written: Mapping[str, DataTensor]) -> None:
        """Write the ONNX file, which refers to the data files of all parts."""
        for graph in model.graphs():
            for value in graph.initializers.values():
                tensor = written.get(str(value.name))
                if tensor is not None and value.const_value is self.large[str(value.name)]:
                    value.const_value = tensor
        files = {tensor.file.path for tensor in written.values()}
        write_sharing(model, self.output, files, own=True)


def _keep(_: ir.TensorProtocol) -> None:
    """Leave the tensor where it is."""


def _module_of(recipe: Recipe, needed: Needed) -> str:
    """Return the module that has the first entry of a recipe."""
    name = next(parameters_in(recipe), "")
    return next((path for path in ancestors(name) if path in needed.modules), "")


def _described(entries: Mapping[str, ir.TensorProtocol]) -> dict[str, Any]:
    """Return the size and a hash of samples of each file of weights."""
    by_file: dict[Path, list[DataTensor]] = {}
    for tensor in entries.values():
        if isinstance(tensor, DataTensor):
            by_file.setdefault(tensor.file.path, []).append(tensor)
    return {file.name: describe_own(file, places_of(found)) for file, found in by_file.items()}


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


def _hash_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
