"""Graph optimisers that take a model and give one back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from htp_export.capabilities.carry.adapting import Tool, adapter, library
from htp_export.editing.editing import register_constants
from htp_export.errors import ToolError

__all__ = ["onnxoptimizer", "onnxscript", "onnxsim", "onnxslim"]


@adapter
def onnxslim(**options: Any) -> Tool:
    """Run OnnxSlim and restore the tags.

    Args:
        **options: Options of ``onnxslim.slim``.

    Examples:
        >>> result = htp_export.tools.onnxslim(program)
        >>> [node.metadata_props["htp.module"] for node in result.model.graph]
        ['0', '1']
    """
    tool = library("onnxslim")
    return lambda source, _: tool.slim(onnx.load(source), **options)


@adapter
def onnxsim(**options: Any) -> Tool:
    """Run onnx-simplifier and restore the tags.

    Args:
        **options: Options of ``onnxsim.simplify``.

    Examples:
        >>> result = htp_export.tools.onnxsim(program)
        >>> [node.metadata_props["htp.module"] for node in result.model.graph]
        ['0', '1']
    """
    tool = library("onnxsim")

    def simplify(source: Path, _: Path) -> onnx.ModelProto:
        simplified, same = tool.simplify(onnx.load(source), **options)
        if not same:
            raise ToolError("onnxsim", "says that its result does not compute what the model did")
        result: onnx.ModelProto = simplified
        return result

    return simplify


@adapter
def onnxoptimizer(passes: Sequence[str] | None = None, fixed_point: bool = False) -> Tool:
    """Run onnxoptimizer and restore the tags.

    Args:
        passes: Names of passes; None for its fusion and elimination passes.
        fixed_point: Whether to repeat the passes until nothing changes.

    Examples:
        >>> result = htp_export.tools.onnxoptimizer(program, passes=["eliminate_identity"])
        >>> [node.metadata_props["htp.module"] for node in result.model.graph]
        ['0', '1']
    """
    tool = library("onnxoptimizer")
    wanted = list(passes) if passes is not None else tool.get_fuse_and_elimination_passes()
    return lambda source, _: tool.optimize(onnx.load(source), wanted, fixed_point)


@adapter
def onnxscript(fusions: bool = False, **options: Any) -> Tool:
    """Run the optimizer and the rewriter of onnxscript and restore the tags.

    Args:
        fusions: Whether to apply its fusions for ONNX Runtime, too.
        **options: Options of ``onnxscript.optimizer.optimize``.

    Examples:
        >>> result = htp_export.tools.onnxscript(program)
        >>> [node.metadata_props["htp.module"] for node in result.model.graph]
        ['0', '1']
    """
    optimizer, rewriter = library("onnxscript.optimizer", None), library("onnxscript.rewriter", None)

    def optimize(source: Path, _: Path) -> ir.Model:
        loaded = ir.load(source)
        optimizer.optimize(loaded, **options)
        rewritten: ir.Model = rewriter.rewrite(loaded)
        if fusions:
            library("onnxscript.rewriter.ort_fusions", None).optimize_for_ort(rewritten)
        register_constants(rewritten.graph)
        return rewritten

    return optimize
