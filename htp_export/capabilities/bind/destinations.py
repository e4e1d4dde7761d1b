"""The place of the new tensors of `bind`: a file, one that refers to the checkpoint, a part, or a data file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from htp_export.capabilities.bind.parts import Parts, Selector
from htp_export.capabilities.bind.referring_files import check_referring, write_referring
from htp_export.errors import InputError
from htp_export.files.data_alone import DataAlone
from htp_export.files.model_files import has_external_data, write_model
from htp_export.files.targets import check_target
from htp_export.model.tagged import ModelSource, TaggedModel
from htp_export.weights.fitting import Needed
from htp_export.weights.unchanged_entries import as_they_are

Tensors = Mapping[ir.Value, ir.TensorProtocol]


@dataclass(frozen=True)
class Destination:
    """The place of the new tensors.

    Attributes:
        model: The model that gets new weights.
        output: The file to write; None for none.
        in_place_data: Whether all tensors have to be in the data file.
        share_weights: Whether ``output`` refers to the files of the checkpoint.
        only: Selector of the modules whose weights are written; None for all.
        alone: The model file whose data file is replaced; None if ``output`` is written.
    """

    model: ModelSource
    output: Path | None
    in_place_data: bool
    share_weights: bool
    only: Selector | None
    alone: DataAlone | None

    @classmethod
    def of(
        cls,
        model: ModelSource,
        output: str | os.PathLike[str] | None,
        *,
        reads: Sequence[Path],
        in_place_data: bool,
        share_weights: bool,
        only: Selector | None,
    ) -> Destination:
        """Check that the output can be written.

        Args:
            model: The model that gets new weights.
            output: The file to write.
            reads: Files that the output must not replace.
            in_place_data: As in `bind`.
            share_weights: As in `bind`.
            only: As in `bind`.
        """
        alone = _data_alone(model, output) if in_place_data else None
        if alone is None:
            check_target(output, reads=reads)
        file = None if output is None else Path(output)
        return cls(model, file, in_place_data, share_weights, only, alone)

    def check(self, entries: Mapping[str, ir.TensorProtocol]) -> None:
        """Refuse ``share_weights`` for entries that are in no file."""
        if self.share_weights:
            check_referring(self.output, entries, in_place_data=self.in_place_data)

    def placed(
        self,
        tagged: TaggedModel,
        needed: Needed,
        tensors: Tensors,
        entries: Mapping[str, ir.TensorProtocol],
    ) -> Tensors:
        """Return the new tensors; unchanged entries refer to the files of the checkpoint.

        A model with all weights in its ONNX file keeps them there.
        """
        refers = self.share_weights or self.only is not None
        if refers or has_external_data(tagged.model):
            return as_they_are(tensors, needed.recipes, entries)
        return tensors

    def write(
        self,
        tagged: TaggedModel,
        needed: Needed,
        tensors: Tensors,
        old: Mapping[ir.Value, ir.TensorProtocol | None],
        entries: Mapping[str, ir.TensorProtocol],
        *,
        is_same_graph: bool,
    ) -> tuple[str, ...]:
        """Write the model or its data; return notes on the files.

        Args:
            tagged: The model with its new tensors.
            needed: The recipes of the model.
            tensors: Initializer → its new contents.
            old: Initializer → its tensor before.
            entries: Entry of the weights → tensor.
            is_same_graph: Whether the graph is that of the model that was read.
        """
        if self.alone is not None:
            self.alone.write(tagged.model, tensors, old)
            return ()
        if self.only is not None:
            parts = Parts.of(self.model, self.output, needed, tensors, entries)
            return (parts.write(self.only, tagged),)
        if self.output is None:
            return ()
        if self.share_weights:
            contents = tensors.values()
            return write_referring(tagged.model, self.output, contents, is_same_graph=is_same_graph)
        outside = tensors.values() if self.in_place_data else ()
        is_outside = bool(outside) or has_external_data(tagged.model) or _are_outside(old)
        external: Literal[True] | None = True if is_outside else None
        write_model(
            tagged.model, self.output, external, outside=outside, is_same_graph=is_same_graph
        )
        return ()


def _data_alone(model: ModelSource, output: str | os.PathLike[str] | None) -> DataAlone | None:
    """Return the file whose data are replaced; None if another file is written."""
    if not isinstance(model, str | os.PathLike):
        if output is not None:
            return None
        raise InputError("in_place_data replaces the data of a file: give the path of a model")
    file = Path(model)
    if output is not None and Path(output).absolute() != file.absolute():
        return None
    return DataAlone.of(file)


def _are_outside(old: Mapping[ir.Value, ir.TensorProtocol | None]) -> bool:
    """Whether the model had weights in a data file."""
    return any(isinstance(tensor, ir.ExternalTensor) for tensor in old.values())
