"""``share_weights``: a file that refers to the safetensors files of the checkpoint, in place of a copy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.files.data_files import DataTensor
from htp_export.files.linked_weights import SharedFile, Way
from htp_export.files.model_files import write_sharing
from htp_export.reporting.columns import many, si


def write_referring(
    model: ir.Model, output: Path, tensors: Iterable[ir.TensorProtocol], *, is_same_graph: bool
) -> tuple[str, ...]:
    """Write a model whose new tensors refer to the files of a checkpoint; return a note on each file.

    ``is_same_graph``: As for `write_model`.
    """
    referring = [tensor for tensor in tensors if isinstance(tensor, DataTensor)]
    by_file: dict[Path, list[DataTensor]] = {}
    for tensor in referring:
        by_file.setdefault(tensor.file.path, []).append(tensor)
    ways = write_sharing(model, output, by_file.keys(), is_same_graph=is_same_graph)
    return tuple(_note(file, way, by_file[file.source]) for file, way in ways)


def _note(file: SharedFile, way: Way, tensors: Collection[DataTensor]) -> str:
    size = sum(tensor.nbytes for tensor in tensors)
    return (
        f"{many(len(tensors), 'tensor')} ({si(size, 'B')}) stay in {file.name}, which {way.value}"
    )


def check_referring(
    output: object, entries: Mapping[str, ir.TensorProtocol], *, in_place_data: bool
) -> None:
    """Refuse ``share_weights`` without a file to write, or for weights that are in no safetensors file."""
    if output is None or in_place_data:
        raise InputError(
            "share_weights writes a file that refers to the checkpoint: give an output, and not in_place_data"
        )
    if not any(isinstance(entry, DataTensor) for entry in entries.values()):
        raise InputError(
            "share_weights refers to safetensors files: give a file, its index or a folder as weights"
        )
