"""Conversions to another opset or precision, and inferred shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx

from htp_export.capabilities.carry.adapting import adapter
from htp_export.errors import InputError
from htp_export.extras import required

__all__ = ["float16", "symbolic_shape_infer", "version_converter"]


@adapter
def version_converter(_source: Path, _target: Path, /, *, opset: int) -> Any:
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
    return required("onnx.version_converter", "this tool").convert_version(
        onnx.load(_source), opset
    )


@adapter
def float16(_source: Path, _target: Path, /, **options: Any) -> Any:
    """Convert a model to half precision with ``onnxruntime.transformers.float16`` and restore the tags.

    Args:
        **options: Options of ``convert_float_to_float16``: ``keep_io_types``, ``op_block_list`` and
            others.

    Examples:
        >>> result = htp_export.tools.float16(program)
        >>> result.model.graph.inputs[0].dtype.name, result.nodes
        ('FLOAT16', 2)
    """
    return required("onnxruntime.transformers.float16", "this tool").convert_float_to_float16(
        onnx.load(_source), **options
    )


@adapter
def symbolic_shape_infer(
    _source: Path,
    _target: Path,
    /,
    *,
    int_max: int = 2**31 - 1,
    auto_merge: bool = False,
    guess_output_rank: bool = False,
    verbose: int = 0,
) -> Any:
    """Write the shapes of all tensors with ``onnxruntime.tools.symbolic_shape_infer`` and restore the tags.

    Args:
        int_max: The value of an unknown size; all options are those of
            ``SymbolicShapeInference.infer_shapes``.
        auto_merge: Whether sizes of different names are merged if operators need equal ones.
        guess_output_rank: Whether an operator of unknown shape has the rank of its first input.
        verbose: The level of logging.

    Examples:
        >>> htp_export.tools.symbolic_shape_infer(program).kept
        2
    """
    tool, model = (
        required("onnxruntime.tools.symbolic_shape_infer", "this tool"),
        onnx.load(_source),
    )
    if (tool.get_opset(model) or 0) < 7:
        raise ValueError("opsets before 7 are not supported")
    # Step by step: if ``infer_shapes`` fails, it leaves the model in the working folder.
    inference = tool.SymbolicShapeInference(int_max, auto_merge, guess_output_rank, verbose)
    complete = False
    inference._preprocess(model)
    while inference.run_:
        complete = inference._infer_impl()
    if not complete:
        raise RuntimeError("Incomplete symbolic shape inference")
    inference._update_output_from_vi()
    return inference.out_mp_
