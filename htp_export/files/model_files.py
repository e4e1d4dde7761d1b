"""Read ONNX files without their weights, and write them completely or not at all.

External data and large weights stay in their files until they are used, and are written one at a
time (`stored`). Everything is written into a work folder beside its target and renamed
(`replacing`), from a copy that shares the tensors: other threads can read the model meanwhile. What
is not valid is not written (`written_check`).
"""

from __future__ import annotations

import contextlib
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
    is_named_by_us,
    plan_data,
    put_notes,
    shared_files,
)
from htp_export.files.filesystem import Identity, check_kind_of_target, is_special
from htp_export.files.lazy_tensor import Slot, about, slots, write_filled
from htp_export.files.parsing import is_protobuf, parsed, parsed_or_none, put_in_order
from htp_export.files.protobuf_bytes import Marks
from htp_export.files.targets import check_target
from htp_export.files.write_file import Move, real_path, replace_file, work_folder
from htp_export.files.written_check import check_written, hollow_proto
from htp_export.format import tags
from htp_export.process.forking import Mutex

_LARGE_BYTES = 1_800_000_000
"""Models with more in them get external data; protobuf refuses messages of 2 GiB."""


_ONE_AT_A_TIME = Mutex()
"""Held while a model is written: one thread may replace the file from which another one copies weights."""


def read_model(path: str | os.PathLike[str]) -> ir.Model:
    """Read an ONNX file; external data and large weights stay in their files until their values are used.

    Its extension says the format, as in ``onnx.load``. The file may be replaced or deleted
    meanwhile, by `write_model` and whoever else renames, but not written over. A data file has to
    be the one that is there now, inside the folder.
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
        # parsers of four formats raise whatever they like on bytes that are not theirs
        raise FileError(file, f"not an ONNX model: {first_line(error)}") from error
    if model is None:  # what protobuf makes of an empty file, and of some that are not ONNX
        raise FileError(file, "not an ONNX model")
    _find_weights(model, file)
    return model


def _find_weights(model: ir.Model, file: Path) -> None:
    """Bind external tensors to their files, and check shared files against their descriptions."""
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
        slot.put(
            DataTensor(
                name, tensor.offset, tensor.length, tensor.dtype, shape, about(tensor), data, folder
            )
        )
        placed.setdefault(location, []).append(tensor)
    files = {location: data.path for location, (*_, data) in data_files.items()}
    check_notes(file, model.metadata_props, files, lambda location: places_of(placed[location]))


def places_of(tensors: Iterable[ir.ExternalTensor]) -> list[Place]:
    """Return the places of tensors in a data file, for `data_notes`."""
    return [(tensor.offset or 0, tensor.length or tensor.nbytes) for tensor in tensors]


def write_model(
    model: ir.Model,
    path: str | os.PathLike[str],
    external_data: str | Literal[True] | None = None,
    *,
    share_weights: bool = False,
) -> None:
    """Write an ONNX file and its external data completely or not at all.

    The file has its weights for itself. What is external is streamed into ``<name>.data`` beside
    it, or, if there is such a file, into ``<name>.<serial>.data``, unless ``path`` is the file that
    it belongs to. Weights in memory go into the file, unless together they are too large for one.

    Args:
        model: The model; left as it was, except that weights whose file is overwritten are read
            from the new one, and that nodes that stand in no order in which they can run are put in
            one.
        path: The file to write; its extension says the format, as in ``onnx.save``. A symbolic link
            is followed; a device or a pipe is written to, with all weights.
        external_data: Name of a file beside ``path`` that takes all weights of more than 256 bytes;
            True for a name that is chosen as above.
        share_weights: Leave external weights where they are, in the file of another model in the
            same folder. Its size and contents are written down, and a model whose weights were
            changed meanwhile is not read any more.

    Raises:
        FileError: If either file cannot be written, external data cannot be read, weights in
            another folder are to be shared, or the model is a graph for inspection; what was there
            is untouched.
        ResultError: If the model is not valid ONNX, and that of which it was made is
            (`written_check`).
    """
    _write_model(model, Path(path), external_data, share_weights=share_weights, checked=True)


def write_for_tool(model: ir.Model, path: str | os.PathLike[str]) -> None:
    """Write a model that only a tool or a runtime reads, into a temporary folder; its validity is not checked."""
    _write_model(model, Path(path), None, share_weights=False, checked=False)


def _write_model(
    model: ir.Model,
    target: Path,
    external_data: str | Literal[True] | None,
    *,
    share_weights: bool,
    checked: bool,
) -> None:
    if way := model.metadata_props.get(tags.WAY):
        raise FileError(
            target,
            f"is not written: this graph of torch's operators, by {way}, is for inspection only",
        )
    if isinstance(external_data, str) and (
        Path(external_data).name != external_data or external_data == target.name
    ):
        raise FileError(
            target,
            f"external data goes into another file in the same folder, not {external_data!r}",
        )
    if external_data is not None and share_weights:
        raise FileError(
            target, "its weights are either written to external data or shared with another file"
        )
    check_target(target)
    if is_special(target) and (isinstance(external_data, str) or share_weights):
        raise FileError(target, "is no plain file; no weights can lie beside it")
    if isinstance(external_data, str):
        _check_data_target(real_path(target).with_name(external_data))
    with _ONE_AT_A_TIME.lock:
        if any(
            slot.external and Path(slot.path).resolve() == target.resolve() for slot in slots(model)
        ):
            raise FileError(
                target, "holds the weights of this model; write the model under another name"
            )
        try:
            copy = _copied(model)
            places = list(zip(slots(model), slots(copy), strict=True))
            if is_special(target):
                _write_whole(copy, places, target, checked=checked)
                return
            target = real_path(target)
            choose = functools.partial(
                plan_data, [slot for slot, _ in places], target, external_data,
                lambda: own_files(target), most_inside=_LARGE_BYTES, share=share_weights,
            )  # fmt: skip
            try:
                moved = _write_files(copy, places, choose(), checked=checked)
            except FileExistsError:  # another process has just taken the name of the data file
                moved = _write_files(copy, places, choose(serial=True), checked=checked)
        except (FileError, ResultError):
            raise
        except Exception as error:  # whatever it was, the caller's files are as they were
            # without the names of work folders
            said = getattr(error, "strerror", None) or first_line(error)
            problem = "; ".join((said, *getattr(error, "__notes__", ())))
            raise FileError(target, f"cannot be written: {problem}") from error
        for slot, tensor in moved:
            slot.put(tensor)


def _check_data_target(data: Path) -> None:
    """Refuse to replace what is no file by data whose name the caller chose."""
    check_kind_of_target(data)
    if is_special(data):
        raise FileError(data, "is no plain file; name another file for the data")


def _write_whole(
    copy: ir.Model, places: list[tuple[Slot, Slot]], target: Path, *, checked: bool
) -> None:
    for slot, same in places:
        if slot.external:
            tensor, shape = slot.tensor, ir.Shape(slot.tensor.shape.numpy())
            read: Callable[[], ir.TensorProtocol] = functools.partial(_itself, tensor)
            same.put(ir.LazyTensor(read, tensor.dtype, shape, name=tensor.name))
    put_notes(copy.metadata_props, {})
    with replace_file(target) as new:
        _write(copy, new, target if checked else None)


def own_files(target: Path) -> set[Path]:
    """Return the data files of an ONNX file, resolved, without shared ones; none if it cannot be read."""
    if not target.is_file():
        return set()
    try:
        model = read_model(target)
        shared = shared_files(target, model.metadata_props)
    except FileError:
        return set()
    others = {(target.parent / name).resolve() for name in shared}
    return {file.resolve() for file in external_files(model)} - others


def obsolete_files(target: Path, needed: Collection[Path]) -> list[Path]:
    """Return the data files of the ONNX file at a target that we named, and that the new model does not need.

    A data file behind a link is not removed.
    """
    names = [
        file
        for file in sorted(own_files(target))
        if is_named_by_us(target, file.name) and file not in needed
    ]
    return [file for file in names if not (target.parent / file.name).is_symlink()]


def _itself(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return tensor


def replaceable_data(target: Path) -> Callable[[Path], bool]:
    """Return a function that tells whether data of a new model at a target may replace a file.

    It may if the file is empty, or has data of the model that is there. A model that does not fit
    its data, as an interrupted export leaves it, names its data, too. Data that it shares with
    another model are those of the other.

    The model is read once, however many files are asked for, and again if it was replaced
    meanwhile.
    """
    known: dict[Identity | None, set[Path]] = {}

    def may_replace(data: Path) -> bool:
        if not data.is_file():
            return not os.path.lexists(data)
        if data.stat().st_size == 0:
            return True
        state = Identity.at(target.resolve())
        if state not in known:
            known[state] = _named_data(target)
        return data.resolve() in known[state]

    return may_replace


def _named_data(target: Path) -> set[Path]:
    """The data files that a model names, resolved, without shared ones; none if it cannot be read."""
    model = parsed_or_none(target) if target.is_file() else None
    if model is None:
        return set()
    try:
        shared = shared_files(target, model.metadata_props)
    except FileError:
        return set()
    tensors = [slot.tensor for slot in slots(model)]
    names = {
        os.fspath(tensor.location) for tensor in tensors if isinstance(tensor, ir.ExternalTensor)
    }
    found: set[Path] = set()
    for name in names - shared.keys():
        with contextlib.suppress(FileError):  # it lies elsewhere
            folder, inside = find_data(target, name)
            found.add((folder / inside).resolve())
    return found


def _write_files(
    copy: ir.Model, places: list[tuple[Slot, Slot]], plan: DataPlan, *, checked: bool
) -> list[tuple[Slot, DataTensor]]:
    """Write a copy of a model, which may be changed, and a file with the weights that need a new place.

    ``places``: each place of a tensor in the model, with the same place in the copy. Returned are
    the places in the model whose tensors were in a file that was removed, with the tensors in the
    new file.
    """
    copies = {id(slot): same for slot, same in places}
    with work_folder(plan.target) as work:
        new_file, new_data = work.new / plan.target.name, work.new / plan.data.name
        moved: list[tuple[Slot, DataTensor]] = []
        if plan.moving:
            with new_data.open("xb") as stream:
                moved = list(
                    zip(
                        plan.moving,
                        place_data(plan.moving, stream, plan.data, plan.target),
                        strict=True,
                    )
                )
        for slot, tensor in moved:
            copies[id(slot)].put(tensor)
        for slot, name in plan.staying:
            copies[id(slot)].put(_named(slot.tensor, name))
        own, shared = _notes_of_staying(plan)
        if moved:
            own[plan.data.name] = describe_own(
                new_data, places_of(tensor for _, tensor in moved), plan.data
            )
        put_notes(copy.metadata_props, own, shared)
        _write(copy, new_file, plan.target if checked else None)
        gone = {plan.data.resolve()}

        def obsolete() -> list[Path]:
            check_data(slot.tensor for slot, _ in plan.staying)
            files = obsolete_files(plan.target, plan.needed)
            gone.update(files)
            return files

        data = [Move(new_data, plan.data, plan.free, like=plan.target)] if moved else []
        work.commit(in_safe_order(Move(new_file, plan.target), data), obsolete)
    if moved and plan.data.is_symlink():  # it may have been copied to another file system
        moved[0][1].file.note()
    return (
        moved
        if any(slot.external and Path(slot.path).resolve() in gone for slot, _ in moved)
        else []
    )


def _notes_of_staying(
    plan: DataPlan,
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    check_data(slot.tensor for slot, _ in plan.staying)
    tensors: dict[str, list[ir.ExternalTensor]] = {}
    for slot, name in plan.staying:
        if isinstance(slot.tensor, ir.ExternalTensor):
            tensors.setdefault(name, []).append(slot.tensor)
    files = {name: Path(stored[0].path) for name, stored in tensors.items()}
    own = {
        name: describe_own(files[name], places_of(stored))
        for name, stored in tensors.items()
        if name not in plan.shared
    }
    return own, {name: describe_shared(files[name]) for name in plan.shared}


def _named(tensor: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
    if not isinstance(tensor, ir.ExternalTensor) or os.fspath(tensor.location) == name:
        return tensor
    shape = ir.Shape(tensor.shape.numpy())
    return ir.ExternalTensor(
        name, tensor.offset, tensor.length, tensor.dtype, shape=shape, **about(tensor)
    )


def _copied(model: ir.Model) -> ir.Model:
    """Return a copy that shares the tensors, with nodes in topological order."""
    try:
        return model.clone()
    except RuntimeError:  # a node comes before one that it reads, or it reads what nothing makes
        put_in_order(model)
    try:
        return model.clone()
    except RuntimeError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # onnx_ir wraps it at each level, with all that is there
            cause = cause.__cause__
        raise ValueError(f"a node reads what nothing in the model makes: {cause}") from error


def _write(copy: ir.Model, file: Path, target: Path | None) -> None:
    """Write the ONNX file itself from a copy that may be changed, its weights one at a time; check it for a target."""
    _say_once(copy)
    if is_protobuf(file):
        proto, marks, marked = hollow_proto(copy)
        with file.open("xb") as stream:
            write_filled(proto, marks, marked, stream)
    else:
        proto, marks = ir.to_proto(copy), Marks()
        onnx.save_model(proto, file)
    if target is not None:
        check_written(proto, marks, target)


def _say_once(model: ir.Model) -> None:
    """Prevent onnx_ir from writing the shapes of weights a second time, into ``value_info``.

    A tool that transposes a weight and does not update them, such as ONNX Runtime's quantizers,
    writes an invalid model.
    """
    for graph in model.graphs():
        for value in graph.initializers.values():
            said_elsewhere = (
                value.metadata_props
                or value.doc_string
                or value.is_graph_input()
                or value.is_graph_output()
            )
            if value.const_value is not None and not said_elsewhere:
                value.shape = value.type = None


def has_external_data(model: ir.Model) -> bool:
    """Return whether a model has external tensors."""
    return any(slot.external for slot in slots(model))


def external_files(model: ir.Model) -> set[Path]:
    """Return the data files of a model, each once, whether they exist or not."""
    return {Path(slot.path) for slot in slots(model) if slot.external}
