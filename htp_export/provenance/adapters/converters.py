"""Conversions: another opset, another precision, shapes written down."""

from __future__ import annotations

import os
from typing import Any

import onnx

from htp_export.errors import InputError
from htp_export.model.shapes import infer_by_symbols
from htp_export.model.tagged import ModelSource
from htp_export.provenance.adapters.adapting import adapted, library
from htp_export.provenance.carrying import Carried

__all__ = ["float16", "symbolic_shape_infer", "version_converter"]


def version_converter(model: ModelSource, output: str | os.PathLike[str] | None = None, *, opset: int) -> Carried:
    """Convert to another opset with ``onnx.version_converter`` and carry the tags.

    Args:
        model: The tagged model.
        output: A file to write.
        opset: The ONNX opset to convert to.

    Raises:
        InputError: onnx has no such opset.
    """
    latest = onnx.defs.onnx_opset_version()
    if not isinstance(opset, int) or not 1 <= opset <= latest:
        raise InputError(f"version_converter: opset {opset!r} is none of 1 to {latest}")
    tool = library("onnx.version_converter", None)
    return adapted("version_converter", lambda given, _: tool.convert_version(onnx.load(given), opset), model, output)


def float16(model: ModelSource, output: str | os.PathLike[str] | None = None, **options: Any) -> Carried:
    """Convert to half precision with ``onnxruntime.transformers.float16`` and carry the tags.

    Args:
        model: The tagged model.
        output: A file to write.
        **options: As of ``convert_float_to_float16``: ``keep_io_types``, ``op_block_list`` and more.
    """
    tool = library("onnxruntime.transformers.float16", None)
    return adapted(
        "float16", lambda given, _: tool.convert_float_to_float16(onnx.load(given), **options), model, output
    )


def symbolic_shape_infer(model: ModelSource, output: str | os.PathLike[str] | None = None, **options: Any) -> Carried:
    """Write the shapes of all tensors with ``onnxruntime.tools.symbolic_shape_infer`` and carry the tags.

    Args:
        model: The tagged model.
        output: A file to write.
        **options: As of ``SymbolicShapeInference.infer_shapes``: ``auto_merge``, ``guess_output_rank`` and more.
    """
    library("onnxruntime.tools.symbolic_shape_infer", None)
    return adapted(
        "symbolic_shape_infer", lambda given, _: infer_by_symbols(onnx.load(given), **options), model, output
    )
