"""Quantizers of ONNX Runtime."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from htp_export.capabilities.carry.adapting import adapter
from htp_export.errors import InputError
from htp_export.extras import required
from htp_export.files.model_files import read_model
from htp_export.runtime.data import Data
from htp_export.runtime.processors import saturates
from htp_export.runtime.samples import Samples
from htp_export.runtime.settings import RunSettings

__all__ = ["matmul_nbits", "quantize_dynamic", "quantize_static"]

_log = logging.getLogger(__name__)

_BITS = (2, 4, 8)  # of MatMulNBits; ONNX Runtime has kernels for these


@adapter
def quantize_dynamic(_source: Path, _target: Path, /, **options: Any) -> None:
    """Quantize weights, and activations at run time, and restore the tags.

    On x86 processors without VNNI, ONNX Runtime's products of unsigned activations and signed
    weights saturate, and a warning is logged. Use ``reduce_range=True`` or
    ``weight_type=QuantType.QUInt8``; see ``docs/accuracy.md``.

    Args:
        **options: Options of ``onnxruntime.quantization.quantize_dynamic``.

    Examples:
        >>> result = htp_export.tools.quantize_dynamic(program, reduce_range=True)
        >>> {node.op_type: node.metadata_props["htp.module"] for node in result.model.graph}["MatMulInteger"]
        '0'
    """
    tool = required("onnxruntime.quantization", "this tool")
    _warn_of_saturation(options)
    tool.quantize_dynamic(_source, _target, **options)


@adapter
def quantize_static(
    _source: Path, _target: Path, /, *, data: Data | None = None, **options: Any
) -> None:
    """Quantize weights and activations, calibrated on inputs, and restore the tags.

    Args:
        data: Inputs, as for `htp_export.quantize`.
        **options: Options of ``onnxruntime.quantization.quantize_static``; its data reader is built
            from ``data``.

    Examples:
        >>> name, array = program.model.graph.inputs[0].name, torch.randn(2, 4)
        >>> result = htp_export.tools.quantize_static(program, data={name: array})
        >>> result.recovered["inserted"] > 0
        True
    """
    tool = required("onnxruntime.quantization", "this tool")
    if data is None:
        raise InputError(
            "quantize_static needs data to see activations on: data={name: array}, or an .npz file"
        )
    runs = iter(Samples.of(RunSettings(data), read_model(_source)))

    class Reader(tool.CalibrationDataReader):  # type: ignore[misc, name-defined] # it asks for this very class
        def get_next(self) -> Mapping[str, Any] | None:
            return next(runs, None)

    tool.quantize_static(_source, _target, Reader(), **options)


@adapter
def matmul_nbits(_source: Path, _target: Path, /, *, bits: int = 4, **options: Any) -> Any:
    """Quantize the weights of matrix products to a few bits and restore the tags.

    Args:
        bits: Bits of a weight: 2, 4 or 8.
        **options: Options of
            ``onnxruntime.quantization.matmul_nbits_quantizer.MatMulNBitsQuantizer``:
            ``block_size``, ``is_symmetric`` and others.

    Examples:
        >>> product = torch.nn.Linear(32, 8, bias=False).eval()
        >>> program = htp_export.export(product, (torch.randn(2, 5, 32),), verbose=False)
        >>> [node.op_type for node in htp_export.tools.matmul_nbits(program, bits=4).model.graph]
        ['MatMulNBits']
    """
    if bits not in _BITS:
        raise InputError(
            f"matmul_nbits: bits are {bits!r}, and can be {', '.join(map(str, _BITS))}"
        )
    tool = required("onnxruntime.quantization.matmul_nbits_quantizer", "this tool")
    quantizer = tool.MatMulNBitsQuantizer(onnx.load(_source), bits=bits, **options)
    quantizer.process()
    return quantizer.model.model


def _warn_of_saturation(options: Mapping[str, Any]) -> None:
    """Warn if products may saturate on this processor.

    See https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html.
    """
    signed = getattr(options.get("weight_type"), "name", "QInt8") == "QInt8"
    if signed and not options.get("reduce_range") and saturates():
        _log.warning(
            "this processor has no VNNI: ONNX Runtime's products of 8-bit integers saturate on it, and results can be "
            "far off. Quantize with reduce_range=true, or with unsigned weights"
        )
