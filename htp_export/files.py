"""ONNX files, read without their weights and written whole.

External data stays external: reading opens no data file, and writing streams it, tensor by tensor, only where it has
to move. Large weights within the ONNX file stay there too, until they are asked for, and are written one at a time
(`stored`). Everything is written to a temporary name beside its target and renamed; a failure leaves what was there.
What is written is a copy of the model that shares its tensors: other threads can read the model meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import onnx
import onnx_ir as ir

from htp_export.errors import FileError
from htp_export.replacing import beside, replace_together
from htp_export.stored import Marks, read_hollow, write_filled, write_values

__all__ = ["external_files", "has_external_data", "model_from_proto", "read_model", "write_model"]

_SMALL_BYTES = 256
"""Tensors up to this size stay in the ONNX file, as onnx and onnx_ir have it: shape inference reads them."""

_LARGE_BYTES = 1_800_000_000
"""Models with more in them get external data; protobuf refuses messages of 2 GiB."""

_ONE_AT_A_TIME = threading.RLock()
"""Held while a model is written: one thread may replace the file from which another one copies weights."""


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
    _put_in_order(model)
    return model


def _put_in_order(model: ir.Model) -> None:
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        if not _is_in_order(graph):
            graph.sort()


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
        model: The model; left as it was, except that weights whose file is overwritten are read from the new one, and
            that nodes that stand in no order in which they can run are put in one.
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
    with _ONE_AT_A_TIME:
        if any(slot.external and _same_file(slot.path, target) for slot in _slots(model)):
            raise FileError(target, "holds the weights of this model; write the model under another name")
        data = target.with_name(external_data or f"{target.name}.data")
        new_file, new_data = beside(target), beside(data)
        try:
            moved = _write_beside(model, new_file, new_data, data, own_file=external_data is not None)
            replace_together([*([(new_data, data)] if moved else ()), (new_file, target)])
        except Exception as error:  # whatever it was, the caller's files are as they were
            notes = getattr(error, "__notes__", ())
            raise FileError(target, "; ".join((f"cannot be written: {error}", *notes))) from error
        finally:
            new_data.unlink(missing_ok=True)
            new_file.unlink(missing_ok=True)
        if any(slot.external and _same_file(slot.path, data) for slot, _ in moved):
            for slot, tensor in moved:
                slot.put(tensor)


def _write_beside(
    model: ir.Model, new_file: Path, new_data: Path, data: Path, *, own_file: bool
) -> list[tuple[_Slot, ir.ExternalTensor]]:
    """Write a model, and a file with the weights that need a new place.

    Args:
        model: The model.
        new_file: The ONNX file.
        new_data: The file of weights.
        data: What that file will be called.
        own_file: Whether all weights go there.

    Returns:
        The places in the model whose tensors are in the file of weights, with the tensors that these are there; none
        where no such file was written.
    """
    copy = _copied(model)
    slots = list(zip(_slots(model), _slots(copy), strict=True))
    moving = [slot for slot, _ in slots if slot.tensor.dtype != ir.DataType.STRING]
    if own_file:
        moving = [slot for slot in moving if slot.external or (slot.initializer and slot.tensor.nbytes > _SMALL_BYTES)]
    else:
        moving = _must_move(moving, new_file.parent)
    moved: list[tuple[_Slot, ir.ExternalTensor]] = []
    if moving:
        with new_data.open("xb") as stream:
            moved = list(zip(moving, _stream(moving, stream, data), strict=True))
    copies = {id(slot): same for slot, same in slots}
    for slot, tensor in moved:
        copies[id(slot)].put(tensor)
    _write(copy, new_file)
    return moved


def _copied(model: ir.Model) -> ir.Model:
    """A copy that shares the tensors; nodes that stand in no order in which they can run are put in one first."""
    try:
        return model.clone()
    except RuntimeError:  # a node comes before one that it reads, or it reads what nothing makes
        _put_in_order(model)
    try:
        return model.clone()
    except RuntimeError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # onnx_ir wraps it at each level, with all that is there
            cause = cause.__cause__
        raise ValueError(f"a node reads what nothing in the model makes: {cause}") from error


def _write(copy: ir.Model, file: Path) -> None:
    """Write the ONNX file itself, weights in it one at a time, of a copy that nobody else needs."""
    _say_once(copy)
    if not _is_protobuf(file):
        onnx.save_model(ir.to_proto(copy), file)
        return
    marks, marked = Marks(), list[ir.TensorProtocol]()
    for slot in list(_slots(copy)):
        stand_in = marks.stand_in(slot.tensor)
        if stand_in is not None:
            marked.append(slot.tensor)
            slot.put(stand_in)
    proto = ir.to_proto(copy)
    with file.open("xb") as stream:
        write_filled(proto, marks, marked, stream)


def _say_once(model: ir.Model) -> None:
    """Keep onnx_ir from saying the shapes of weights a second time, in ``value_info``.

    A tool that transposes a weight and leaves what was said of it, as ONNX Runtime's quantizers do, writes no valid
    model.
    """
    for graph in model.graphs():
        for value in graph.initializers.values():
            said_elsewhere = value.is_graph_input() or value.metadata_props or value.doc_string
            if value.const_value is not None and not said_elsewhere:
                value.shape = value.type = None


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


def _same_file(one: str, other: Path) -> bool:
    return Path(one).resolve() == other.resolve()
