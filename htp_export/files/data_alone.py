"""New weights in the data file of a model, whose ONNX file stays byte for byte as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from htp_export.errors import FileError, InputError
from htp_export.files.data_files import DataTensor
from htp_export.files.data_replacement import Replacement, replace_data
from htp_export.files.filesystem import Identity
from htp_export.files.write_file import clear_killed, real_path

_MOST_NAMED = 3
"""Tensors that a message names."""


@dataclass(frozen=True)
class DataAlone:
    """A model file whose data file is replaced, with the identity of the file before it was read."""

    file: Path
    state: Identity | None

    @classmethod
    def of(cls, file: Path) -> DataAlone:
        """Record the identity of a file before it is read; an interrupted replacement is completed.

        Raises:
            FileError: The file cannot be read.
        """
        try:
            real = real_path(file)
            clear_killed(real.parent)
            return cls(file, Identity.at(real))
        except OSError as error:
            raise FileError.unreadable(file, error) from error

    def write(
        self,
        model: ir.Model,
        tensors: Mapping[ir.Value, ir.TensorProtocol],
        old: Mapping[ir.Value, ir.TensorProtocol | None],
    ) -> None:
        """Replace tensors in the data file; the values then have the tensors of the new file.

        Args:
            model: The model, with the new contents.
            tensors: Initializer → its new contents.
            old: Initializer → its tensor in the file.

        Raises:
            InputError: A tensor within the ONNX file would change.
            FileError: The data file cannot be replaced.
        """
        replacements: dict[ir.Value, Replacement] = {}
        inside: list[str] = []
        for value, new in tensors.items():
            before = old[value]
            if isinstance(before, DataTensor):
                replacements[value] = Replacement(before, new)
            elif before is not None and before.tobytes() != new.tobytes():
                inside.append(f"{value.name!r} ({before.nbytes:,} bytes)")
        if inside:
            raise InputError(self._why_not(inside))
        if not replacements:
            return
        placed = replace_data(self.file, self.state, model, list(replacements.values()))
        for value, tensor in zip(replacements, placed, strict=True):
            value.const_value = tensor

    def _why_not(self, inside: list[str]) -> str:
        more = f" and {len(inside) - _MOST_NAMED} more" * (len(inside) > _MOST_NAMED)
        return (
            f"{self.file} would change, and in_place_data replaces its data file alone: it contains "
            f"{', '.join(inside[:_MOST_NAMED])}{more}; with an output, in_place_data writes a file that has "
            "all of them in its data file"
        )
