"""The usual name of a data file, ``<name>.data``, for a model that replaces one with this data file.

No rename replaces two files at once, and the old model reads the file of that name until it is
replaced. The new model therefore refers to its data under a temporary name first. Then the data
gets the usual name as a second name (a hard link), a second version of the model, which refers to
that name, replaces the first one, and the temporary name is removed. At each moment, the model
refers to a file with its own data; a killed process leaves the old or the new pair.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import onnx

from htp_export.files.data_plan import rename_note
from htp_export.files.filesystem import Identity
from htp_export.files.own_data import external_tensors
from htp_export.files.write_file import Move, WorkFolder


@dataclass(frozen=True)
class KeptName:
    """A second version of a new model, with the usual name of its data file.

    ``file``: the path of the second version in the work folder. ``data``: the data file under its
    temporary name; ``usual``: the path with the usual name.
    """

    file: Path
    data: Path
    usual: Path

    def rename_in(self, proto: onnx.ModelProto) -> None:
        """Make the message of the model refer to the usual name."""
        rename_data(external_tensors(proto).get(self.data.name, ()), self.usual.name)
        rename_note(proto.metadata_props, self.data.name, self.usual.name)

    def take(self, work: WorkFolder, model: Path, first: Identity | None) -> bool:
        """Give the data of a written model their usual name; return whether this was possible.

        If not, the model stays as it is: if the usual name belongs to another file, if another
        process has replaced the model, or on a file system without hard links.

        Args:
            work: The work folder from which the first version was renamed to its target.
            model: The path of the model.
            first: The identity of the first version.
        """
        second_name = work.new / self.usual.name
        moves = [
            Move(second_name, self.usual, free=True),
            Move(self.file, model, may_replace=lambda file: Identity.at(file) == first),
        ]
        try:
            os.link(self.data, second_name)
            work.commit(moves, lambda: [self.data])
        except OSError:
            return False
        return True


def rename_data(tensors: Iterable[onnx.TensorProto], name: str) -> None:
    """Make external tensors refer to a data file by another name."""
    for tensor in tensors:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = name
