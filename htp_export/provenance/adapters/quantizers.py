"""Quantizers of ONNX Runtime."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from htp_export.errors import InputError
from htp_export.files.npz_file import read_npz
from htp_export.model.tagged import ModelSource
from htp_export.provenance.adapters.adapting import adapted, library
from htp_export.provenance.carrying import Carried

if TYPE_CHECKING:
    import numpy as np

__all__ = ["matmul_nbits", "quantize_dynamic", "quantize_static"]

_log = logging.getLogger(__name__)

_BITS = (2, 4, 8)
_PROCESSORS = Path("/proc/cpuinfo")


def quantize_dynamic(model: ModelSource, output: str | os.PathLike[str] | None = None, **options: Any) -> Carried:
    """Quantize weights, and activations as they come, and carry the tags.

    Args:
        model: The tagged model.
        output: A file to write.
        **options: As of ``onnxruntime.quantization.quantize_dynamic``.

    On processors of x86 without VNNI, ONNX Runtime's products of 8-bit integers saturate for signed weights, and a
    warning is logged: give ``reduce_range=True``, or ``weight_type=QuantType.QUInt8``. See ``docs/accuracy.md``.
    """
    tool = library("onnxruntime.quantization", None)
    _warn_of_saturation(options)
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


def _warn_of_saturation(options: Mapping[str, Any]) -> None:
    """Say that products may saturate here: https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html"""
    signed = getattr(options.get("weight_type"), "name", "QInt8") == "QInt8"
    if signed and not options.get("reduce_range") and _saturates():
        _log.warning(
            "this processor has no VNNI: ONNX Runtime's products of 8-bit integers saturate on it, and results can be "
            "far off. Quantize with reduce_range=true, or with unsigned weights"
        )


def _saturates() -> bool:
    """Whether it is an x86 processor without VNNI; not known, and so False, where Linux does not say."""
    try:
        lines = _PROCESSORS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set[str]())
    return "avx2" in flags and not flags & {"avx512_vnni", "avx_vnni"}


def _runs(inputs: Iterable[Mapping[str, Any]] | str | os.PathLike[str] | None) -> list[Mapping[str, Any]]:
    if isinstance(inputs, str | os.PathLike):
        return [read_npz(inputs)]
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
        bits: Bits of a weight: 2, 4 or 8.
        **options: As of ``onnxruntime.quantization.matmul_nbits_quantizer.MatMulNBitsQuantizer``: ``block_size``,
            ``is_symmetric`` and more.

    Raises:
        InputError: Weights cannot have so many bits.
    """
    if bits not in _BITS:
        raise InputError(f"matmul_nbits: bits are {bits!r}, and can be {', '.join(map(str, _BITS))}")
    tool = library("onnxruntime.quantization.matmul_nbits_quantizer", None)

    def quantize(given: Path, _: Path) -> onnx.ModelProto:
        quantizer = tool.MatMulNBitsQuantizer(onnx.load(given), bits=bits, **options)
        quantizer.process()
        made: onnx.ModelProto = quantizer.model.model
        return made

    return adapted("matmul_nbits", quantize, model, output)
