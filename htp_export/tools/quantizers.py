"""Quantizers of ONNX Runtime."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from htp_export.errors import FileError, InputError
from htp_export.provenance.carrying import Carried
from htp_export.tagged import ModelSource
from htp_export.tools.adapting import adapted, library

if TYPE_CHECKING:
    import numpy as np

__all__ = ["matmul_nbits", "quantize_dynamic", "quantize_static"]


def quantize_dynamic(model: ModelSource, output: str | os.PathLike[str] | None = None, **options: Any) -> Carried:
    """Quantize weights, and activations as they come, and carry the tags.

    Args:
        model: The tagged model.
        output: A file to write.
        **options: As of ``onnxruntime.quantization.quantize_dynamic``.
    """
    tool = library("onnxruntime.quantization", None)
    return adapted("quantize_dynamic", lambda given, made: tool.quantize_dynamic(given, made, **options), model, output)


def quantize_static(
    model: ModelSource,
    output: str | os.PathLike[str] | None = None,
    inputs: Iterable[Mapping[str, np.ndarray[Any, Any]]] | str | os.PathLike[str] | None = None,
    **options: Any,
) -> Carried:
    """Quantize weights and activations by what activations are on some inputs, and carry the tags.

    Args:
        model: The tagged model.
        output: A file to write.
        inputs: Inputs of the model by name, one mapping for each run; or an ``.npz`` file with those of one run.
        **options: As of ``onnxruntime.quantization.quantize_static``; its data reader is made of ``inputs``.

    Raises:
        InputError: There are no inputs.
        FileError: The file of inputs cannot be read, or holds no arrays.
    """
    tool = library("onnxruntime.quantization", None)
    runs = iter(_runs(inputs))

    class Reader(tool.CalibrationDataReader):  # type: ignore[misc, name-defined] # it asks for this very class
        def get_next(self) -> Mapping[str, Any] | None:
            return next(runs, None)

    return adapted(
        "quantize_static", lambda given, made: tool.quantize_static(given, made, Reader(), **options), model, output
    )


def _runs(inputs: Iterable[Mapping[str, Any]] | str | os.PathLike[str] | None) -> list[Mapping[str, Any]]:
    import numpy as np

    if isinstance(inputs, str | os.PathLike):
        try:
            with np.load(inputs, allow_pickle=False) as arrays:
                run = dict(arrays)
        except (OSError, ValueError) as error:
            raise FileError(os.fspath(inputs), f"no inputs can be read from it: {error}") from error
        if not run:
            raise FileError(os.fspath(inputs), "holds no arrays")
        return [run]
    runs = list(inputs or ())
    if not runs:
        raise InputError("quantize_static needs inputs to see activations on: inputs=[{name: array}, ...]")
    return runs


def matmul_nbits(
    model: ModelSource, output: str | os.PathLike[str] | None = None, bits: int = 4, **options: Any
) -> Carried:
    """Quantize the weights of matrix products to a few bits and carry the tags.

    Args:
        model: The tagged model.
        output: A file to write.
        bits: Bits of a weight.
        **options: As of ``onnxruntime.quantization.matmul_nbits_quantizer.MatMulNBitsQuantizer``: ``block_size``,
            ``is_symmetric`` and more.
    """
    tool = library("onnxruntime.quantization.matmul_nbits_quantizer", None)

    def quantize(given: Path, _: Path) -> onnx.ModelProto:
        quantizer = tool.MatMulNBitsQuantizer(onnx.load(given), bits=bits, **options)
        quantizer.process()
        made: onnx.ModelProto = quantizer.model.model
        return made

    return adapted("matmul_nbits", quantize, model, output)
