"""Read ONNX files without their weights, and write them completely or not at all.

External data and large weights stay in their files until they are used, and are written one at a
time (`lazy_tensor`). All files are written into a work folder beside the target and then renamed
(`write_file`), from a copy that shares the tensors, so that other threads can read the model
meanwhile. An invalid model is not written (`written_check`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, Literal

import onnx
import onnx_ir as ir

from htp_export.errors import FileError, InputError, ResultError, first_line
from htp_export.files.data_files import DataFile, DataTensor, check_data, find_data, place_data
from htp_export.files.data_plan import (
    DataPlan,
    Place,
    check_notes,
    describe_own,
    describe_shared,
    in_safe_order,
    plan_data,
    plan_shared,
    put_notes,
    usual_data_file,
)
from htp_export.files.filesystem import Identity, check_kind_of_target, is_special, opened_plain
from htp_export.files.kept_name import KeptName
from htp_export.files.lazy_tensor import Slot, descriptive_fields, slots, write_filled
from htp_export.files.linked_weights import SharedFile, Way
from htp_export.files.own_data import obsolete_files, own_files
from htp_export.files.parsing import is_protobuf, parsed, put_in_order
from htp_export.files.protobuf_bytes import Marks
from htp_export.files.targets import check_target
from htp_export.files.write_file import Move, real_path, replace_file, work_folder
from htp_export.files.written_check import check_written, hollow_proto
from htp_export.format import tags
from htp_export.process.forking import Mutex

_LARGE_BYTES = 1_800_000_000
"""Weights in memory above this size are written as external data: protobuf refuses messages of 2 GiB."""


ONE_AT_A_TIME = Mutex()
"""Held while a model is written: a thread could replace the file from which another thread copies weights."""


def read_model(path: str | os.PathLike[str]) -> ir.Model:
    """Read an ONNX file; external data and large weights stay in their files until their values are used.

    The extension determines the format, as in ``onnx.load``. Until then, the file may be replaced
    or deleted, as `write_model` does, but not overwritten. Data files must be in the folder of the
    model, and must not change.
    """
    file = Path(path)
    try:
        model = parsed(file)
    except FileError:
        raise
    except InputError as error:
        raise FileError(file, str(error)) from error
    except OSError as error:
        raise FileError.unreadable(file, error) from error
    except Exception as error:
        # the parsers of four formats raise any error for a file of another format
        problem = other_form(file) or first_line(error)
        raise FileError(file, f"not an ONNX model: {problem}") from error
    if model is None:  # protobuf parses an empty file, and some files of other formats
        problem = other_form(file)
        raise FileError(file, f"not an ONNX model{problem and f': {problem}'}")
    _find_weights(model, file)
    return model


_BEGINNING = 64
"""Bytes that tell the form of a file."""
_CHECKPOINT = (
    "weights without a graph; htp_export.export(...) writes the model of them, and "
    "htp_export.bind(...) puts weights into a file"
)


def other_form(file: Path) -> str:
    """Name the form of a file that is no model, with what to do; ``""`` for an unknown one.

    Nothing in the file is loaded or run: the first bytes tell its form.
    """
    try:
        with opened_plain(file) as opened:
            begin = opened.read(_BEGINNING)
    except (OSError, FileError):
        return ""
    if not begin:
        return "it is empty"
    if begin.startswith((b"PK", b"\x80\x02", b"\x80\x04", b"\x80\x05")):
        return f"it is a file of torch.save, {_CHECKPOINT}"
    if begin[8:9] == b"{" and 2 <= int.from_bytes(begin[:8], "little") < file.stat().st_size:
        return f"it is a safetensors file, {_CHECKPOINT}"
    if begin.lstrip()[:1] in (b"{", b"["):
        return "it is JSON of something else"
    return ""


def _find_weights(model: ir.Model, file: Path) -> None:
    """Bind external tensors to their files, and check the files against their descriptions in the metadata."""
    data_files: dict[str, tuple[Path, str, DataFile]] = {}
    placed: dict[str, list[ir.ExternalTensor]] = {}
    for slot in list(slots(model)):
        tensor = slot.tensor
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        location = os.fspath(tensor.location)
        if location not in data_files:
            folder, name = find_data(file, location)
            shown = file.parent / name if folder == file.parent.absolute() else None
            data_files[location] = (folder, name, DataFile(folder / name, file, shown))
        folder, name, data = data_files[location]
        shape = tensor.shape.numpy()
        fields = descriptive_fields(tensor)
        slot.put(
            DataTensor(
                name, tensor.offset, tensor.length, tensor.dtype, shape, fields, data, folder
            )
        )
        placed.setdefault(location, []).append(tensor)
    files = {location: data.path for location, (*_, data) in data_files.items()}
    check_notes(file, model.metadata_props, files, lambda location: places_of(placed[location]))


def places_of(tensors: Iterable[ir.ExternalTensor]) -> list[Place]:
    """Return the offset and length of each tensor in its data file."""
    return [(tensor.offset or 0, tensor.length or tensor.nbytes) for tensor in tensors]


def write_model(
    model: ir.Model,
    path: str | os.PathLike[str],
    external_data: str | Literal[True] | None = None,
    *,
    share_weights: bool = False,
    outside: Iterable[ir.TensorProtocol] = (),
    is_same_graph: bool = False,
) -> None:
    """Write an ONNX file and its external data completely or not at all.

    The model does not depend on files of other models. All weights of more than 256 bytes are in
    one place: in the ONNX file, if all of them are in memory and together not too large for it; in
    ``<name>.data`` beside ``path`` otherwise, or in ``<name>.<serial>.data`` if that name belongs
    to another file. If all are in a data file that already belongs to the model at ``path``, they
    stay there.

    Args:
        model: The model. It is not changed, except that weights in a replaced file are then read
            from the new file, and that nodes are sorted if they are not in topological order.
        path: The file to write; its extension determines the format, as in ``onnx.save``. A
            symbolic link is followed; a device or a pipe is written to, with all weights.
        external_data: Name of a file beside ``path`` for all weights of more than 256 bytes; True
            for a name that is chosen as above.
        share_weights: Leave external weights in the data file of another model in the same folder.
            A description of the data file is written, and a model whose shared weights were changed
            afterwards is refused when it is read.
        outside: Initializers that are written to external data, too, if other weights are, also
            those of at most 256 bytes.
        is_same_graph: Only contents of initializers differ from a model that was read: the graph is
            not checked again.

    Raises:
        FileError: If a file cannot be written, external data cannot be read, weights in another
            folder cannot be shared, or the model is a graph for inspection; existing files are
            unchanged.
        ResultError: If the model is not valid ONNX, although its source model is
            (`written_check`).
    """
    small, checked = frozenset(map(id, outside)), not is_same_graph
    _write_model(
        model,
        Path(path),
        external_data,
        share_weights=share_weights,
        outside=small,
        checked=checked,
    )


def write_sharing(
    model: ir.Model,
    path: str | os.PathLike[str],
    files: Collection[Path],
    *,
    own: bool = False,
    is_same_graph: bool = False,
) -> list[tuple[SharedFile, Way]]:
    """Write an ONNX file that refers to files of a checkpoint; all other weights go into its data file.

    Args:
        model: The model: its external tensors in ``files`` stay there.
        path: The file to write.
        files: Files of weights. Each is linked into the folder of the model, or copied, if it is in
            another one.
        own: The files belong to the model: they were written for it.
        is_same_graph: As for `write_model`.

    Returns:
        The files that the model refers to, and how each is in its folder.

    Raises:
        FileError: As for `write_model`; or another file has the name of a linked one.
        ResultError: As for `write_model`.
    """
    ways: list[tuple[SharedFile, Way]] = []
    plan = functools.partial(plan_shared, sources=files, own=own)
    checked = not is_same_graph
    _write_model(model, Path(path), None, share_weights=True, checked=checked, plan=plan, ways=ways)
    return ways


def write_for_tool(model: ir.Model, path: str | os.PathLike[str]) -> None:
    """Write a model to a temporary folder, for a tool or a runtime; its validity is not checked."""
    _write_model(model, Path(path), None, share_weights=False, checked=False)


def _write_model(
    model: ir.Model,
    target: Path,
    external_data: str | Literal[True] | None,
    *,
    share_weights: bool,
    checked: bool,
    outside: Collection[int] = (),
    plan: Callable[..., DataPlan] | None = None,
    ways: list[tuple[SharedFile, Way]] | None = None,
) -> None:
    _check_request(model, target, external_data, share_weights=share_weights)
    with ONE_AT_A_TIME.lock:
        _check_holds_no_weights(target, model)
        try:
            copy = _copied(model)
            places = list(zip(slots(model), slots(copy), strict=True))
            if is_special(target):
                _write_whole(copy, places, target, checked=checked)
                return
            target = real_path(target)
            choose = functools.partial(
                plan_data, [slot for slot, _ in places], target, external_data,
                lambda: own_files(target), most_inside=_LARGE_BYTES, share=share_weights, outside=outside,
            )  # fmt: skip
            if plan is not None:
                choose = functools.partial(plan, [slot for slot, _ in places], target)
            try:
                moved = _write_files(copy, places, choose(), ways, checked=checked)
            except FileExistsError:  # another process created a file of that name meanwhile
                moved = _write_files(copy, places, choose(serial=True), ways, checked=checked)
        except (FileError, ResultError):
            raise
        except Exception as error:  # after any error, the caller's files are unchanged
            # `strerror` alone, because the whole message names paths in the work folder
            problem = getattr(error, "strerror", None) or first_line(error)
            problem = "; ".join((problem, *getattr(error, "__notes__", ())))
            raise FileError(target, f"cannot be written: {problem}") from error
        for slot, tensor in moved:
            slot.put(tensor)


def _check_request(
    model: ir.Model,
    target: Path,
    external_data: str | Literal[True] | None,
    *,
    share_weights: bool,
) -> None:
    """Refuse arguments that cannot be combined, and a target that cannot be written."""
    if way := model.metadata_props.get(tags.WAY):
        raise FileError(
            target,
            f"is not written: this graph of torch's operators, by {way}, is for inspection only",
        )
    data_name = external_data if isinstance(external_data, str) else None
    if data_name is not None and (Path(data_name).name != data_name or data_name == target.name):
        raise FileError(
            target, f"external data must be another file in the same folder, not {data_name!r}"
        )
    if external_data is not None and share_weights:
        raise FileError(
            target,
            "its weights can be either written to external data or shared with another file",
        )
    check_target(target)
    if is_special(target) and (data_name is not None or share_weights):
        raise FileError(target, "is not a regular file, so that no data file can be beside it")
    if data_name is not None:
        _check_data_target(real_path(target).with_name(data_name))


def _check_data_target(data: Path) -> None:
    """Refuse a data file, whose name the caller chose, if it is a folder, a device or a pipe."""
    check_kind_of_target(data)
    if is_special(data):
        raise FileError(data, "is not a regular file; name another file for the data")


def _check_holds_no_weights(target: Path, model: ir.Model) -> None:
    resolved = target.resolve()
    for file in external_files(model):
        if file.resolve() == resolved:
            raise FileError(
                target, "contains the weights of this model; write the model under another name"
            )


def _write_whole(
    copy: ir.Model, places: list[tuple[Slot, Slot]], target: Path, *, checked: bool
) -> None:
    """Write a copy of a model with all weights in its ONNX file."""
    for slot, slot_in_copy in places:
        if slot.external:
            tensor = slot.tensor
            shape = ir.Shape(tensor.shape.numpy())
            read: Callable[[], ir.TensorProtocol] = functools.partial(_itself, tensor)
            slot_in_copy.put(ir.LazyTensor(read, tensor.dtype, shape, name=tensor.name))
    put_notes(copy.metadata_props, {})
    with replace_file(target) as new:
        _write(copy, new, target if checked else None)


def _itself(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return tensor


def _write_files(
    copy: ir.Model,
    places: list[tuple[Slot, Slot]],
    plan: DataPlan,
    ways: list[tuple[SharedFile, Way]] | None,
    *,
    checked: bool,
) -> list[tuple[Slot, DataTensor]]:
    """Write a copy of a model, which may be changed, and its new data file.

    ``places``: the slots of the model, each with its counterpart in the copy. ``ways`` gets the
    shared files, and how each is in the folder of the model. Returns the slots of
    the model with their tensors in the new data file, if a file that contained some of them was
    removed or replaced; empty otherwise.
    """
    copies = {id(slot): slot_in_copy for slot, slot_in_copy in places}
    with work_folder(plan.target) as work:
        new_file, new_data = work.new / plan.target.name, work.new / plan.data.name
        moved: list[tuple[Slot, DataTensor]] = []
        if plan.moving:
            with new_data.open("xb") as stream:
                # files that replace others are synced (`WorkFolder.commit`)
                is_synced = os.path.lexists(plan.target)
                placed = place_data(
                    plan.moving, stream, plan.data, plan.target, is_synced=is_synced
                )
            moved = list(zip(plan.moving, placed, strict=True))
        for slot, tensor in moved:
            copies[id(slot)].put(tensor)
        for slot, name in plan.staying:
            copies[id(slot)].put(_named(slot.tensor, name))
        own, shared = _notes_of_staying(plan)
        if moved:
            # The data may replace the file of this name: the model must not match that file.
            replaced = usual_data_file(plan.target) if plan.free else plan.data
            own[plan.data.name] = describe_own(
                new_data, places_of(tensor for _, tensor in moved), replaced
            )
        put_notes(copy.metadata_props, own, shared)
        kept_name = _kept_name(plan, work.new) if moved else None
        _write(copy, new_file, plan.target if checked else None, kept_name)
        # Data files that are removed or replaced; `obsolete` runs when the new files are complete.
        gone = {plan.data.resolve()}

        def obsolete() -> list[Path]:
            check_data(slot.tensor for slot, _ in plan.staying)
            files = obsolete_files(plan.target, plan.needed)
            gone.update(files)
            return files

        data = [Move(new_data, plan.data, plan.free, like=plan.target)] if moved else []
        found: list[tuple[SharedFile, Way]] = []
        for file in plan.linked:
            way, moves = file.put_into(work.new)
            found.append((file, way))
            data += moves
        written = Identity.at(new_file)
        work.commit(in_safe_order(Move(new_file, plan.target), data), obsolete)
        if ways is not None:
            ways[:] = found
        if kept_name is not None and kept_name.take(work, plan.target, written):
            usual = DataFile(kept_name.usual.absolute(), plan.target, kept_name.usual)
            moved = [(slot, tensor.within(usual)) for slot, tensor in moved]
    if moved and plan.data.is_symlink():
        # The target of the link may be on another file system, where the data are a copy.
        moved[0][1].file.note()
    for slot, _ in moved:
        if slot.external and Path(slot.path).resolve() in gone:
            return moved
    return []


def _kept_name(plan: DataPlan, folder: Path) -> KeptName | None:
    """Return the usual name of a data file if the existing model may have data of that name; None otherwise."""
    usual = usual_data_file(plan.target)
    if not plan.free or plan.data == usual or not os.path.lexists(usual):
        return None
    if usual.is_symlink():  # another file, or none: a rename would go to the end of the link
        return None
    return KeptName(folder / f"kept.{plan.target.name}", plan.data, usual)


def _notes_of_staying(
    plan: DataPlan,
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the descriptions of data files that stay: the model's own, and the shared ones, by name."""
    check_data(slot.tensor for slot, _ in plan.staying)
    tensors: dict[str, list[ir.ExternalTensor]] = {}
    for slot, name in plan.staying:
        if isinstance(slot.tensor, ir.ExternalTensor):
            tensors.setdefault(name, []).append(slot.tensor)
    files = {name: Path(in_file[0].path) for name, in_file in tensors.items()}
    own: dict[str, dict[str, Any]] = {}
    for name, in_file in tensors.items():
        if name not in plan.shared:
            own[name] = describe_own(files[name], places_of(in_file))
    return own, {name: describe_shared(files[name]) for name in plan.shared}


def _named(tensor: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
    """Return an external tensor with this location."""
    if not isinstance(tensor, ir.ExternalTensor) or os.fspath(tensor.location) == name:
        return tensor
    shape = ir.Shape(tensor.shape.numpy())
    fields = descriptive_fields(tensor)
    return ir.ExternalTensor(
        name, tensor.offset, tensor.length, tensor.dtype, shape=shape, **fields
    )


def _copied(model: ir.Model) -> ir.Model:
    """Return a copy that shares the tensors, with nodes in topological order."""
    try:
        return model.clone()
    except RuntimeError:  # the nodes are not in topological order, or an input has no producer
        put_in_order(model)
    try:
        return model.clone()
    except RuntimeError as error:
        cause: BaseException = error
        while (
            cause.__cause__ is not None
        ):  # onnx_ir wraps the error, with a long text, at each level
            cause = cause.__cause__
        raise ValueError(f"nothing in the model produces an input of a node: {cause}") from error


def _write(
    copy: ir.Model, file: Path, target: Path | None, kept_name: KeptName | None = None
) -> None:
    """Write an ONNX file, its weights one at a time, from a copy that may be changed.

    ``target``: the final path, for messages of the check of the model; None for no check.
    ``kept_name``: a second version, which is written, too.
    """
    _drop_repeated_types(copy)
    if is_protobuf(file):
        proto, marks, marked = hollow_proto(copy)
    else:
        proto, marks, marked = ir.to_proto(copy), Marks(), []
    _save(proto, marks, marked, file)
    if kept_name is not None:
        kept_name.rename_in(proto)
        _save(proto, marks, marked, kept_name.file)
    if target is not None:
        check_written(proto, marks, target)


def _save(
    proto: onnx.ModelProto, marks: Marks, marked: list[ir.TensorProtocol], file: Path
) -> None:
    if not is_protobuf(file):
        onnx.save_model(proto, file)
        return
    with file.open("xb") as stream:
        write_filled(proto, marks, marked, stream)


def _drop_repeated_types(model: ir.Model) -> None:
    """Prevent onnx_ir from writing the types and shapes of weights a second time, into ``value_info``.

    A tool that transposes a weight and does not update this copy, such as ONNX Runtime's
    quantizers, would write an invalid model.
    """
    for graph in model.graphs():
        for value in graph.initializers.values():
            needs_type = value.is_graph_input() or value.is_graph_output()
            # onnx_ir writes these into ``value_info``, too, where a type is required
            is_described = value.metadata_props or value.doc_string
            if value.const_value is not None and not needs_type and not is_described:
                value.shape = value.type = None


def has_external_data(model: ir.Model) -> bool:
    """Return whether a model has external tensors."""
    return any(slot.external for slot in slots(model))


def external_files(model: ir.Model) -> set[Path]:
    """Return the data files of a model, each once, whether they exist or not."""
    return {Path(slot.path) for slot in slots(model) if slot.external}
