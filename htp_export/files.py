"""ONNX files, read without their weights and written whole.

External data stays external: reading opens no data file, and writing streams it, tensor by tensor, only where it has
to move. Large weights within the ONNX file stay there too, until they are asked for, and are written one at a time
(`stored`). Everything is written to a temporary name beside its target and renamed; a failure leaves what was there.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import onnx
import onnx_ir as ir

from htp_export.errors import FileError
from htp_export.stored import Marks, read_hollow, write_filled, write_values

__all__ = ["external_files", "has_external_data", "model_from_proto", "read_model", "write_model"]

_SMALL_BYTES = 256
"""Tensors up to this size stay in the ONNX file, as onnx and onnx_ir have it: shape inference reads them."""

_LARGE_BYTES = 1_800_000_000
"""Models with more in them get external data; protobuf refuses messages of 2 GiB."""


def read_model(path: str | os.PathLike[str]) -> ir.Model:
    """Read an ONNX file; external data and large weights are left where they are until somebody asks for their values.

    The file may be replaced or deleted meanwhile, by `write_model` and whoever else renames, but not written over.

    Args:
        path: The file. Its extension says the format, as in ``onnx.load``.

    Raises:
        FileError: If it is missing, cannot be read, is not ONNX, or names external data outside its folder.
    """
    file = Path(path)
    try:
        model = _parse(file)
    except FileError:
        raise
    except OSError as error:
        raise FileError(file, f"cannot be read: {error.strerror or error}") from error
    except Exception as error:  # parsers of four formats raise whatever they like on bytes that are not theirs
        raise FileError(file, f"not an ONNX model: {error}") from error
    if model is None:  # what protobuf makes of an empty file, and of some that are not ONNX
        raise FileError(file, "not an ONNX model")
    folder = file.parent.absolute()
    checked: set[str] = set()
    for slot in _slots(model):
        if isinstance(slot.tensor, ir.ExternalTensor):
            slot.tensor.base_dir = os.fspath(folder)
            location = os.fspath(slot.tensor.location)
            if location not in checked and not (folder / location).resolve().is_relative_to(folder.resolve()):
                raise FileError(file, f"its external data {location!r} lies outside its folder; it will not be read")
            checked.add(location)
    return model


def _parse(file: Path) -> ir.Model | None:
    """The model; None for what protobuf can read, but is not one."""
    hollow = read_hollow(file) if _is_protobuf(file) else None
    proto = onnx.load(file, load_external_data=False) if hollow is None else hollow.proto
    if not proto.ir_version or not proto.HasField("graph"):
        return None
    model = model_from_proto(proto)
    if hollow is not None:
        for slot in list(_slots(model)):
            tensor = hollow.tensor(slot.tensor)
            if tensor is not None:
                slot.put(tensor)
        if not hollow.is_whole:  # some are where there are no slots, or twice under a name
            model = model_from_proto(onnx.load(file, load_external_data=False))
    return model


def _is_protobuf(file: Path) -> bool:
    """Whether an extension says protobuf, or nothing."""
    return onnx.serialization.registry.get_format_from_file_extension(file.suffix) in ("protobuf", None)


def model_from_proto(proto: onnx.ModelProto) -> ir.Model:
    """A model whose nodes stand in the order in which they run, as the ONNX specification has it.

    Some tools, ``onnxruntime.transformers.float16`` for one, append nodes where they should insert them; ONNX Runtime
    takes that, and onnx_ir cannot copy it. A model that is in order stays as it is.

    Raises:
        ValueError: A node needs what is made of its own results.
    """
    model = ir.from_proto(proto)
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        if not _is_in_order(graph):
            graph.sort()
    return model


def _is_in_order(graph: ir.Graph) -> bool:
    seen = set[ir.Node]()
    for node in graph.all_nodes():
        for value in node.inputs:
            maker = None if value is None else value.producer()
            if maker is not None and maker not in seen:
                return False
        seen.add(node)
    return True


def write_model(model: ir.Model, path: str | os.PathLike[str], external_data: str | None = None) -> None:
    """Write an ONNX file whole, and its external data.

    Weights that are external already stay where they are if that is the folder of ``path``; else they are streamed
    into ``<name>.data`` beside it. Weights in memory go into the file, unless together they are too large for one.

    Args:
        model: The model; left as it was, except that weights whose file is overwritten are read from the new one.
        path: The file to write; its extension says the format, as in ``onnx.save``.
        external_data: Name of a file beside ``path`` that takes all weights of more than 256 bytes.

    Raises:
        FileError: If either file cannot be written, or external data cannot be read; what was there is untouched.
    """
    target = Path(path)
    if external_data is not None and (Path(external_data).name != external_data or external_data == target.name):
        raise FileError(target, f"external data goes into another file in the same folder, not {external_data!r}")
    if target.is_dir():
        raise FileError(target, "is a folder")
    if any(slot.external and _same_file(slot.path, target) for slot in _slots(model)):
        raise FileError(target, "holds the weights of this model; write the model under another name")
    data = target.with_name(external_data or f"{target.name}.data")
    moving = [slot for slot in _slots(model) if slot.tensor.dtype != ir.DataType.STRING]
    if external_data is None:
        moving = _must_move(moving, target.parent)
    else:
        moving = [slot for slot in moving if slot.external or (slot.initializer and slot.tensor.nbytes > _SMALL_BYTES)]
    new_data = _beside(data) if moving else None
    new_file = _beside(target)
    overwritten = any(slot.external and _same_file(slot.path, data) for slot in moving)
    placed = False
    try:
        if new_data is not None:
            with new_data.open("xb") as stream:
                moved = _stream(moving, stream, data)
            for slot, tensor in zip(moving, moved, strict=True):
                slot.put(tensor)
        _write(model, new_file)
        if new_data is not None:
            new_data.replace(data)
            placed = True
        new_file.replace(target)
    except Exception as error:  # whatever it was, the caller's files are as they were
        raise FileError(target, f"cannot be written: {error}") from error
    finally:
        if not (placed and overwritten):
            for slot in moving:
                slot.put(slot.tensor)
        for left in (new_data, new_file):
            if left is not None:
                left.unlink(missing_ok=True)


def _write(model: ir.Model, file: Path) -> None:
    """Write the ONNX file itself; weights in it one at a time."""
    if not _is_protobuf(file):
        with _said_once(model):
            onnx.save_model(ir.to_proto(model), file)
        return
    marks, marked = Marks(), list[_Slot]()
    try:
        for slot in list(_slots(model)):
            stand_in = marks.stand_in(slot.tensor)
            if stand_in is not None:
                marked.append(slot)
                slot.put(stand_in)
        with _said_once(model):
            proto = ir.to_proto(model)
    finally:
        for slot in marked:
            slot.put(slot.tensor)
    with file.open("xb") as stream:
        write_filled(proto, marks, [slot.tensor for slot in marked], stream)


@contextlib.contextmanager
def _said_once(model: ir.Model) -> Iterator[None]:
    """Keep onnx_ir from saying the shapes of weights a second time, in ``value_info``.

    A tool that transposes a weight and leaves what was said of it, as ONNX Runtime's quantizers do, writes no valid
    model.
    """
    said = [
        (value, value.shape, value.type)
        for graph in model.graphs()
        for value in graph.initializers.values()
        if value.const_value is not None and not (value.is_graph_input() or value.metadata_props or value.doc_string)
    ]
    try:
        for value, _, _ in said:
            value.shape = value.type = None
        yield
    finally:
        for value, shape, kind in said:
            value.shape, value.type = shape, kind


def has_external_data(model: ir.Model) -> bool:
    """Whether any tensor of a model lies in a file of its own."""
    return any(slot.external for slot in _slots(model))


def external_files(model: ir.Model) -> set[Path]:
    """The files that tensors of a model lie in, each once, whether they are there or not."""
    return {Path(slot.path) for slot in _slots(model) if slot.external}


@dataclass(frozen=True)
class _Slot:
    """A place in a model that holds a tensor, and the way to put another one there."""

    tensor: ir.TensorProtocol
    put: Callable[[ir.TensorProtocol], None]
    initializer: bool

    @property
    def external(self) -> bool:
        return isinstance(self.tensor, ir.ExternalTensor)

    @property
    def path(self) -> str:
        return self.tensor.path if isinstance(self.tensor, ir.ExternalTensor) else ""


def _slots(model: ir.Model) -> Iterator[_Slot]:
    """Every tensor of a model: initializers of all its graphs, and tensors in node attributes."""
    graphs = [*model.graphs(), *(graph for function in model.functions.values() for graph in function.subgraphs())]
    for graph in graphs:
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield _Slot(value.const_value, _setter(value), True)
    for nodes in (model.graph.all_nodes(), *(function.all_nodes() for function in model.functions.values())):
        for node in nodes:
            for attribute in list(node.attributes.values()):
                if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                    yield _Slot(attribute.as_tensor(), _attribute_setter(node, attribute.name), False)


def _setter(value: ir.Value) -> Callable[[ir.TensorProtocol], None]:
    def put(tensor: ir.TensorProtocol) -> None:
        value.const_value = tensor

    return put


def _attribute_setter(node: ir.Node, name: str) -> Callable[[ir.TensorProtocol], None]:
    first = node.attributes[name]

    def put(tensor: ir.TensorProtocol) -> None:
        same = tensor is first.value
        node.attributes[name] = first if same else ir.AttrTensor(name, tensor, doc_string=first.doc_string)

    return put


def _must_move(slots: list[_Slot], folder: Path) -> list[_Slot]:
    """The tensors that need a new place in a file written to ``folder``: all external ones, or none of them."""
    home = folder.resolve()
    external = [slot for slot in slots if slot.external]
    moving = []
    if any(
        isinstance(slot.tensor, ir.ExternalTensor) and Path(slot.tensor.base_dir).resolve() != home for slot in external
    ):
        moving = external
    large = [slot for slot in slots if slot.initializer and not slot.external and slot.tensor.nbytes > _SMALL_BYTES]
    if sum({id(slot.tensor): slot.tensor.nbytes for slot in large}.values()) > _LARGE_BYTES:
        moving = [*external, *large]  # into one new file, which may bear the name of the one that the others are in
    return moving


def _stream(slots: list[_Slot], stream: IO[bytes], data: Path) -> list[ir.ExternalTensor]:
    """Write tensors one after another, those that share their storage once; the same tensors as external ones."""
    places: dict[object, tuple[int, int]] = {}
    moved = []
    for slot in slots:
        tensor = slot.tensor
        key: object = id(tensor)
        if isinstance(tensor, ir.ExternalTensor):
            key = (tensor.path, tensor.offset, tensor.length)
        if key not in places:
            start = stream.tell()
            write_values(tensor, stream)
            places[key] = (start, stream.tell() - start)
        offset, length = places[key]
        moved.append(
            ir.ExternalTensor(
                data.name,
                offset,
                length,
                tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()),
                name=tensor.name or "",
                doc_string=tensor.doc_string,
                base_dir=os.fspath(data.parent.absolute()),
            )
        )
    return moved


def _beside(path: Path) -> Path:
    """A temporary name in the same folder, with the same extension."""
    return path.with_name(f".{path.stem}.{uuid.uuid4().hex[:12]}{path.suffix}")


def _same_file(one: str, other: Path) -> bool:
    return Path(one).resolve() == other.resolve()
