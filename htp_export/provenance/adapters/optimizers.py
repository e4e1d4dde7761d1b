"""Graph optimisers that take a model and give one back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from htp_export.errors import HtpExportError
from htp_export.model.tagged import ModelSource
from htp_export.passes.editing import register_constants
from htp_export.provenance.adapters.adapting import adapted, library
from htp_export.provenance.carrying import Carried

__all__ = ["onnxoptimizer", "onnxscript", "onnxsim", "onnxslim"]


def onnxslim(model: ModelSource, output: str | os.PathLike[str] | None = None, **options: Any) -> Carried:
    """Run OnnxSlim (``onnxslim.slim``) and carry the tags.

    Args:
        model: The tagged model.
        output: A file to write.
        **options: As of ``onnxslim.slim``.
    """
    tool = library("onnxslim")
    return adapted("onnxslim", lambda given, _: tool.slim(onnx.load(given), **options), model, output)


def onnxsim(model: ModelSource, output: str | os.PathLike[str] | None = None, **options: Any) -> Carried:
    """Run onnx-simplifier (``onnxsim.simplify``) and carry the tags.

    Args:
        model: The tagged model.
        output: A file to write.
        **options: As of ``onnxsim.simplify``.

    Raises:
        HtpExportError: The simplified model does not give what the model gave.
    """
    tool = library("onnxsim")

    def simplify(given: Path, _: Path) -> onnx.ModelProto:
        simplified, same = tool.simplify(onnx.load(given), **options)
        if not same:
            raise HtpExportError("onnxsim says that its result does not compute what the model did")
        made: onnx.ModelProto = simplified
        return made

    return adapted("onnxsim", simplify, model, output)


def onnxoptimizer(
    model: ModelSource,
    output: str | os.PathLike[str] | None = None,
    passes: Sequence[str] | None = None,
    fixed_point: bool = False,
) -> Carried:
    """Run onnxoptimizer and carry the tags.

    Args:
        model: The tagged model.
        output: A file to write.
        passes: Names of passes; its fusions and eliminations where it is None.
        fixed_point: Whether to repeat them until nothing changes.
    """
    tool = library("onnxoptimizer")
    wanted = list(passes) if passes is not None else tool.get_fuse_and_elimination_passes()
    return adapted(
        "onnxoptimizer",
        lambda given, _: tool.optimize(onnx.load(given), wanted, fixed_point),
        model,
        output,
    )


def onnxscript(
    model: ModelSource, output: str | os.PathLike[str] | None = None, fusions: bool = False, **options: Any
) -> Carried:
    """Run onnxscript's optimiser and rewriter and carry the tags.

    Args:
        model: The tagged model.
        output: A file to write.
        fusions: Whether to apply its fusions for ONNX Runtime too.
        **options: As of ``onnxscript.optimizer.optimize``.
    """
    optimizer, rewriter = library("onnxscript.optimizer", None), library("onnxscript.rewriter", None)

    def optimize(given: Path, _: Path) -> ir.Model:
        loaded = ir.load(given)
        optimizer.optimize(loaded, **options)
        rewritten: ir.Model = rewriter.rewrite(loaded)
        if fusions:
            library("onnxscript.rewriter.ort_fusions", None).optimize_for_ort(rewritten)
        register_constants(rewritten.graph)
        return rewritten

    return adapted("onnxscript", optimize, model, output)
