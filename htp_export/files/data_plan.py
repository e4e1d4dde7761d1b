"""The plan for the weights of a model that is written: the new data file, and the files that stay."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from htp_export.errors import FileError
from htp_export.files.replacing import Move
from htp_export.files.slots import Slot

_SMALL_BYTES = 256
"""Tensors up to this size stay in the ONNX file, as onnx and onnx_ir have it: shape inference reads them."""


@dataclass(frozen=True)
class DataPlan:
    """The plan for the weights of a model: places whose tensors move into the data file, and those that stay.

    ``free``: whether the name of the data file must not exist, because it was chosen here: one rename then replaces the
    model. Names of files that stay are relative to the folder of the target; ``shared`` are those that are not the
    target's own.
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

    ``external_data`` names the data file for all weights; True to choose the name here; None to keep external what is
    external. ``own`` returns the data files of the model that is replaced, without shared ones. At most ``most_inside``
    bytes of weights in memory go into the ONNX file. ``share``: external weights stay where they are; a `FileError` if
    they are in another folder. ``serial``: the plain name, ``<name>.data``, is not to be chosen.
    """
    movable = [slot for slot in places if slot.tensor.dtype != ir.DataType.STRING]
    external = [slot for slot in movable if slot.external]
    large = [slot for slot in movable if slot.initializer and not slot.external and slot.tensor.nbytes > _SMALL_BYTES]
    data = _free_name(target, serial=serial) if external_data in (None, True) else target.with_name(str(external_data))
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
                raise FileError(target, f"cannot share the weights in {path}: they lie in another folder; {advice}")
    usual = target.with_name(f"{target.name}.data").resolve()
    ours = {usual} if share or not names else {usual, *own()}
    stays = all(name is not None and (share or Path(path).resolve() in ours) for path, name in names.items())
    if not stays or (large and any(Path(path).resolve() == usual for path in names)):
        return DataPlan(target, data, free, [*external, *large], [], set())
    shared = {name for path, name in names.items() if name and Path(path).resolve() not in ours}
    staying = [(slot, names[slot.path] or "") for slot in external]
    return DataPlan(target, data, free, large, staying, shared)


def _free_name(target: Path, *, serial: bool) -> Path:
    """Return a name for a data file that does not exist, so that no model refers to it."""
    usual = target.with_name(f"{target.name}.data")
    if not serial and not os.path.lexists(usual):
        return usual
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
    return (folder / file.name).relative_to(home).as_posix() if folder.is_relative_to(home) else None


def in_safe_order(model: Move, data: Sequence[Move]) -> list[Move]:
    """Return the files in an order in which every wrong pair of model and data is detected.

    Data files come before a new model, and if their names are new: the rename of the model then switches from the old
    files to the new ones. Others come after the model, because the new model describes that it does not match the data
    that they replace (`data_notes`); the old model may have no description.
    """
    first = [move for move in data if not os.path.lexists(move.target) or not os.path.lexists(model.target)]
    return [*first, model, *(move for move in data if move not in first)]
