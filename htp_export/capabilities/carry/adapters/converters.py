"""Conversions: another opset, another precision, shapes written down."""

from __future__ import annotations

from typing import Any

import onnx

from htp_export.capabilities.carry.adapting import Tool, adapter, library
from htp_export.errors import InputError

__all__ = ["float16", "symbolic_shape_infer", "version_converter"]


@adapter
def version_converter(*, opset: int) -> Tool:
    """Convert a model to another opset with ``onnx.version_converter`` and restore the tags.

    Args:
        opset: The ONNX opset to convert to.

    Examples:
        >>> result = htp_export.tools.version_converter(program, opset=21)
        >>> result.model.opset_imports[""], result.model.graph[0].metadata_props["htp.module"]
        (21, '0')
    """
    latest = onnx.defs.onnx_opset_version()
    if not isinstance(opset, int) or not 1 <= opset <= latest:
        raise InputError(f"version_converter: opset {opset!r} is none of 1 to {latest}")
    tool = library("onnx.version_converter", None)
    return lambda source, _: tool.convert_version(onnx.load(source), opset)


@adapter
def float16(**options: Any) -> Tool:
    """Convert a model to half precision with ``onnxruntime.transformers.float16`` and restore the tags.

    Args:
        **options: Options of ``convert_float_to_float16``: ``keep_io_types``, ``op_block_list`` and others.

    Examples:
        >>> result = htp_export.tools.float16(program)
        >>> result.model.graph.inputs[0].dtype.name, result.nodes
        ('FLOAT16', 2)
    """
    tool = library("onnxruntime.transformers.float16", None)
    return lambda source, _: tool.convert_float_to_float16(onnx.load(source), **options)


@adapter
def symbolic_shape_infer(**options: Any) -> Tool:
    """Write the shapes of all tensors with ``onnxruntime.tools.symbolic_shape_infer`` and restore the tags.

    Args:
        **options: Options of ``SymbolicShapeInference.infer_shapes``: ``auto_merge``, ``guess_output_rank`` and others.

    Examples:
        >>> htp_export.tools.symbolic_shape_infer(program).kept
        2
    """
    library("onnxruntime.tools.symbolic_shape_infer", None)
    return lambda source, _: _infer_by_symbols(onnx.load(source), **options)


def _infer_by_symbols(
    model: onnx.ModelProto,
    int_max: int = 2**31 - 1,
    auto_merge: bool = False,
    guess_output_rank: bool = False,
    verbose: int = 0,
) -> onnx.ModelProto | None:
    """What ``SymbolicShapeInference.infer_shapes`` of ONNX Runtime gives, with the same arguments; no file is written.

    It is run step by step: where it fails, ``infer_shapes`` leaves the model in the folder that the program runs in.

    Raises:
        Exception: Whatever its many rules come across; a RuntimeError where shapes stay unknown.
    """
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference, get_opset

    if (get_opset(model) or 0) < 7:
        return None
    inference = SymbolicShapeInference(int_max, auto_merge, guess_output_rank, verbose)
    inference._preprocess(model)
    complete = False
    while inference.run_:
        complete = inference._infer_impl()
    if not complete:
        raise RuntimeError("Incomplete symbolic shape inference")
    inference._update_output_from_vi()
    result: onnx.ModelProto = inference.out_mp_
    return result
