"""The data files of an ONNX file, found in its message: no graph is made of a model that is only replaced."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from htp_export.errors import FileError
from htp_export.files.data_files import find_data
from htp_export.files.data_plan import Place, check_notes, is_named_by_us, shared_files
from htp_export.files.filesystem import Identity
from htp_export.files.parsing import message_of
from htp_export.files.protobuf_bytes import graph_protos, subgraph_protos


@dataclass(frozen=True)
class FileHeader:
    """The metadata of an ONNX file, and the data files that it names.

    Attributes:
        file: The ONNX file.
        metadata: The metadata of the model.
        places: Location of a data file → the positions of the tensors in it.
    """

    file: Path
    metadata: Mapping[str, str]
    places: Mapping[str, Sequence[Place]]

    @classmethod
    def of(cls, file: Path) -> FileHeader | None:
        """Read an ONNX file; None for an invalid file, and for none."""
        if not file.is_file():
            return None
        try:
            message = message_of(file)
            if message is None:
                return None
            proto, _ = message
            metadata = {entry.key: entry.value for entry in proto.metadata_props}
            places: dict[str, list[Place]] = {}
            for location, tensors in external_tensors(proto).items():
                places[location] = list(map(place_of, tensors))
        except Exception:
            # the parsers of four formats raise any error for a file of another format
            return None
        return cls(file, metadata, places)

    def path_of(self, location: str) -> Path:
        """Return the path of a data file; a `FileError` if it is outside the folder of the model."""
        folder, name = find_data(self.file, location)
        return folder / name


def external_tensors(proto: onnx.ModelProto) -> dict[str, list[onnx.TensorProto]]:
    """Return the external tensors of a model: name of a data file → its tensors."""
    by_location: dict[str, list[onnx.TensorProto]] = {}
    for tensor in _tensors(proto):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            location = _external(tensor).get("location", "")
            by_location.setdefault(location, []).append(tensor)
    return by_location


def _tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield the tensors of a model: initializers of all graphs, and tensors in node attributes."""
    graphs = list(graph_protos(proto.graph))
    nodes: list[onnx.NodeProto] = []
    for function in proto.functions:
        nodes.extend(function.node)
        for node in function.node:
            for inner in subgraph_protos(node):
                graphs.extend(graph_protos(inner))
    for graph in graphs:
        yield from graph.initializer
        nodes.extend(graph.node)
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                yield attribute.t


def _external(tensor: onnx.TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def place_of(tensor: onnx.TensorProto) -> Place:
    """Return the position of an external tensor in its data file."""
    fields = _external(tensor)
    length = int(fields.get("length", 0))
    if not length:
        bits = ir.DataType(tensor.data_type).bitwidth * math.prod(tensor.dims)
        length = -(-bits // 8)
    return int(fields.get("offset", 0)), length


def own_files(target: Path) -> set[Path]:
    """Return the data files of an ONNX file, resolved, without shared ones; none if it cannot be read."""
    header = FileHeader.of(target)
    if header is None:
        return set()
    try:
        shared = shared_files(target, header.metadata)
        files = {location: header.path_of(location) for location in header.places}
        check_notes(target, header.metadata, files, lambda location: header.places[location])
    except FileError:
        return set()
    others = {(target.parent / name).resolve() for name in shared}
    return {file.resolve() for file in files.values()} - others


def obsolete_files(target: Path, needed: Collection[Path]) -> list[Path]:
    """Return the data files of the existing model that the new model does not need, to be removed.

    Only files with names that htp_export chose are removed, and none behind a symbolic link.
    """
    obsolete: list[Path] = []
    for file in sorted(own_files(target)):
        is_link = (target.parent / file.name).is_symlink()
        if is_named_by_us(target, file.name) and file not in needed and not is_link:
            obsolete.append(file)
    return obsolete


def replaceable_data(target: Path) -> Callable[[Path], bool]:
    """Return a predicate: whether data of a new model at a target may replace an existing file.

    It may if the file is empty, or contains data of the existing model, even if the two do not
    match after an interrupted export. Shared data files belong to the other model.

    The existing model is read once for all files, and again if it was replaced meanwhile.
    """
    data_of: dict[Identity | None, set[Path]] = {}

    def may_replace(data: Path) -> bool:
        if not data.is_file():
            return not os.path.lexists(data)
        if data.stat().st_size == 0:
            return True
        state = Identity.at(target.resolve())
        if state not in data_of:
            data_of[state] = _named_files(target)
        return data.resolve() in data_of[state]

    return may_replace


def _named_files(target: Path) -> set[Path]:
    """Return the data files that a model refers to, resolved, without shared ones; none if it cannot be read."""
    header = FileHeader.of(target)
    if header is None:
        return set()
    files: set[Path] = set()
    try:
        shared = shared_files(target, header.metadata)
    except FileError:
        return set()
    for location in header.places.keys() - shared.keys():
        with contextlib.suppress(FileError):  # it is outside the folder
            files.add(header.path_of(location).resolve())
    return files
