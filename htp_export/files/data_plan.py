"""Where the weights of a model go when it is written: which data file takes them, and which files stay as they are."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from htp_export.errors import FileError
from htp_export.files.replacing import Move
from htp_export.files.slots import Slot

__all__ = ["DataPlan", "in_safe_order", "is_named_by_us", "name_from", "plan_data"]

_SMALL_BYTES = 256
"""Tensors up to this size stay in the ONNX file, as onnx and onnx_ir have it: shape inference reads them."""


@dataclass(frozen=True)
class DataPlan:
    """Where the weights of a model go.

    Attributes:
        target: The ONNX file to write.
        data: Its file of weights.
        free: Whether that name has to be free, as one that we chose is: then the model is switched by one rename.
        moving: The places in the model whose tensors go there.
        staying: The other places with external tensors → the names of their files from the folder of the target.
        shared: The names of those among these files that are not the target's own.
        obsolete: Data files of the model that is there now, which nobody needs any more.
    """

    target: Path
    data: Path
    free: bool
    moving: list[Slot]
    staying: list[tuple[Slot, str]]
    shared: set[str]
    obsolete: list[Path]


def plan_data(
    places: list[Slot],
    target: Path,
    external_data: str | Literal[True] | None,
    own: Collection[Path],
    *,
    most_inside: int,
    share: bool,
    serial: bool = False,
) -> DataPlan:
    """Decide it: all external tensors move, or none of them.

    Args:
        places: The places in the model that hold tensors.
        target: The ONNX file to write.
        external_data: The name of the data file for all weights; True to have it chosen here; None for what is external
            now.
        own: The data files of the model that is there now, less those that it shares.
        most_inside: How many bytes of weights in memory may go into the ONNX file.
        share: Whether external weights stay where they are, in whatever file.
        serial: Whether the plain name, ``<name>.data``, is not to be chosen.

    Raises:
        FileError: If weights are to be shared that lie in another folder.
    """
    movable = [slot for slot in places if slot.tensor.dtype != ir.DataType.STRING]
    external = [slot for slot in movable if slot.external]
    large = [slot for slot in movable if slot.initializer and not slot.external and slot.tensor.nbytes > _SMALL_BYTES]
    data = _free_name(target, serial=serial) if external_data in (None, True) else target.with_name(str(external_data))
    free = external_data in (None, True)
    obsolete = [file for file in sorted(own) if is_named_by_us(target, file.name) and file != data.resolve()]
    if external_data is not None:
        return DataPlan(target, data, free, [*external, *large], [], set(), obsolete)
    if sum({id(slot.tensor): slot.tensor.nbytes for slot in large}.values()) <= most_inside:
        large = []
    home = target.parent.resolve()
    names = {path: name_from(home, Path(path)) for path in {slot.path for slot in external}}
    if share:
        for path, name in names.items():
            if name is None:
                raise FileError(target, f"cannot share the weights in {path}, as they lie in another folder")
    usual = _usual_name(target).resolve()
    ours = {usual} if share else {usual, *own}
    stays = all(name is not None and (share or Path(path).resolve() in ours) for path, name in names.items())
    if not stays or (large and any(Path(path).resolve() == usual for path in names)):
        return DataPlan(target, data, free, [*external, *large], [], set(), obsolete)
    kept = {Path(path).resolve() for path in names}
    shared = {name for path, name in names.items() if name and Path(path).resolve() not in ours}
    staying = [(slot, names[slot.path] or "") for slot in external]
    return DataPlan(target, data, free, large, staying, shared, [file for file in obsolete if file not in kept])


def _usual_name(target: Path) -> Path:
    return target.with_name(f"{target.name}.data")


def _free_name(target: Path, *, serial: bool) -> Path:
    """A name for a data file that nothing has yet, so that no model refers to it: the usual one, or one of its own."""
    usual = _usual_name(target)
    if not serial and not os.path.lexists(usual):
        return usual
    return target.with_name(f"{target.name}.{secrets.token_hex(4)}.data")


def is_named_by_us(target: Path, name: str) -> bool:
    """Whether a data file has one of the names that are chosen here for that of an ONNX file.

    Examples:
        >>> model = Path("a.onnx")
        >>> [is_named_by_us(model, name) for name in ("a.onnx.data", "a.onnx.01ab23cd.data", "weights.bin")]
        [True, True, False]
    """
    return re.fullmatch(rf"{re.escape(target.name)}(\.[0-9a-f]{{8}})?\.data", name) is not None


def name_from(home: Path, file: Path) -> str | None:
    """The name of a data file from a folder in which it lies; None if it lies elsewhere, or there by a link alone."""
    folder = file.parent.resolve()
    return (folder / file.name).relative_to(home).as_posix() if folder.is_relative_to(home) else None


def in_safe_order(model: Move, data: Sequence[Move]) -> list[Move]:
    """The order in which no pair of two files is a wrong one without being known as such.

    Data files come before a model that is new, and under names that are free: then the rename of the model switches
    from the old ones to the new ones. Others come after the model, as it says of itself that it does not fit the data
    that they replace (`data_notes`); of the old model, nobody can know what it says.
    """
    first = [move for move in data if not os.path.lexists(move.target) or not os.path.lexists(model.target)]
    return [*first, model, *(move for move in data if move not in first)]
