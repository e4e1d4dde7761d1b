"""Graph optimisers that take a model and give one back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from htp_export.capabilities.carry.adapting import adapted, library
from htp_export.capabilities.carry.carrying import Carried
from htp_export.editing.editing import register_constants
from htp_export.errors import ToolError
from htp_export.model.tagged import ModelSource

__all__ = ["onnxoptimizer", "onnxscript", "onnxsim", "onnxslim"]


def onnxslim(model: ModelSource, output: str | os.PathLike[str] | None = None, **options: Any) -> Carried:
    """Run OnnxSlim and restore the tags.

    Args:
        model: The tagged model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed.
        output: The file to write; None to only return the model.
        **options: Options of ``onnxslim.slim``.

    Returns:
        The new model with tags, and the evidence for them.

    Raises:
        InputError: The library is not installed or rejects the model.
        UntaggedModelError: The model has no tags.
        FileError: A file cannot be read or written.
        ToolError: The tool fails.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
        >>> result = htp_export.tools.onnxslim(program)
        >>> [node.metadata_props["htp.module"] for node in result.model.graph]
        ['0', '1']
    """
    tool = library("onnxslim")
    return adapted("onnxslim", lambda source, _: tool.slim(onnx.load(source), **options), model, output)


def onnxsim(model: ModelSource, output: str | os.PathLike[str] | None = None, **options: Any) -> Carried:
    """Run onnx-simplifier and restore the tags.

    Args:
        model: The tagged model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed.
        output: The file to write; None to only return the model.
        **options: Options of ``onnxsim.simplify``.

    Returns:
        The new model with tags, and the evidence for them.

    Raises:
        InputError: The library is not installed or rejects the model.
        UntaggedModelError: The model has no tags.
        FileError: A file cannot be read or written.
        ToolError: The tool fails, or reports that the outputs of its result differ.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
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

    return adapted("onnxsim", simplify, model, output)


def onnxoptimizer(
    model: ModelSource,
    output: str | os.PathLike[str] | None = None,
    passes: Sequence[str] | None = None,
    fixed_point: bool = False,
) -> Carried:
    """Run onnxoptimizer and restore the tags.

    Args:
        model: The tagged model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed.
        output: The file to write; None to only return the model.
        passes: Names of passes; None for its fusion and elimination passes.
        fixed_point: Whether to repeat the passes until nothing changes.

    Returns:
        The new model with tags, and the evidence for them.

    Raises:
        InputError: The library is not installed or rejects the model.
        UntaggedModelError: The model has no tags.
        FileError: A file cannot be read or written.
        ToolError: The tool fails.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
        >>> result = htp_export.tools.onnxoptimizer(program, passes=["eliminate_identity"])
        >>> [node.metadata_props["htp.module"] for node in result.model.graph]
        ['0', '1']
    """
    tool = library("onnxoptimizer")
    wanted = list(passes) if passes is not None else tool.get_fuse_and_elimination_passes()
    return adapted(
        "onnxoptimizer",
        lambda source, _: tool.optimize(onnx.load(source), wanted, fixed_point),
        model,
        output,
    )


def onnxscript(
    model: ModelSource, output: str | os.PathLike[str] | None = None, fusions: bool = False, **options: Any
) -> Carried:
    """Run the optimizer and the rewriter of onnxscript and restore the tags.

    Args:
        model: The tagged model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed.
        output: The file to write; None to only return the model.
        fusions: Whether to apply its fusions for ONNX Runtime, too.
        **options: Options of ``onnxscript.optimizer.optimize``.

    Returns:
        The new model with tags, and the evidence for them.

    Raises:
        InputError: The library is not installed or rejects the model.
        UntaggedModelError: The model has no tags.
        FileError: A file cannot be read or written.
        ToolError: The tool fails.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
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

    return adapted("onnxscript", optimize, model, output)
