"""ONNX Runtime's own optimisations: those at load, and its tool for transformers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from htp_export.capabilities.carry.adapting import adapted, library
from htp_export.capabilities.carry.carrying import Carried
from htp_export.errors import InputError
from htp_export.model.tagged import ModelSource
from htp_export.runtime.sessions import OptionChanges, RunnableModel, Session, SessionSettings

__all__ = ["onnxruntime", "onnxruntime_transformers"]

_LEVELS = ("basic", "extended", "all")


def onnxruntime(
    model: ModelSource,
    output: str | os.PathLike[str] | None = None,
    level: str = "all",
    providers: Sequence[str] = ("CPUExecutionProvider",),
) -> Carried:
    """Write the graph that ONNX Runtime optimises when it loads a model, and restore the tags.

    Args:
        model: The tagged model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed.
        output: The file to write; None to only return the model.
        level: ``"basic"``, ``"extended"`` (with ONNX Runtime's own operators) or ``"all"`` (with layouts for the
            processor; the result is for this machine).
        providers: Execution providers, in order of preference.

    Returns:
        The new model with tags, and the evidence for them.

    Raises:
        InputError: There is no such level, or ONNX Runtime cannot load the model.
        UntaggedModelError: The model has no tags.
        FileError: A file cannot be read or written.
        ToolError: The tool fails.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
        >>> result = htp_export.tools.onnxruntime(program, level="extended")
        >>> [(node.op_type, node.metadata_props["htp.owners"]) for node in result.model.graph]
        [('FusedGemm', '["0","1"]')]
    """
    if level not in _LEVELS:
        raise InputError(f"level {level!r} is none of {', '.join(_LEVELS)}")
    settings = SessionSettings(tuple(providers))
    settings.check()
    tool = library("onnxruntime", None)

    def optimize(source: Path, target: Path) -> None:
        chosen = getattr(tool.GraphOptimizationLevel, f"ORT_ENABLE_{level.upper()}")
        changes = OptionChanges({"graph_optimization_level": chosen, "optimized_model_filepath": os.fspath(target)})
        Session(RunnableModel(source, "onnxruntime: the model"), settings, changes)

    return adapted("onnxruntime", optimize, model, output)


def onnxruntime_transformers(
    model: ModelSource, output: str | os.PathLike[str] | None = None, model_type: str = "bert", **options: Any
) -> Carried:
    """Run ONNX Runtime's optimizer for transformers and restore the tags.

    Args:
        model: The tagged model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed.
        output: The file to write; None to only return the model.
        model_type: The architecture, as in ``onnxruntime.transformers.optimizer.optimize_model``.
        **options: Options of that function: ``num_heads``, ``hidden_size``, ``opt_level`` and others.

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
        >>> result = htp_export.tools.onnxruntime_transformers(program, model_type="bert")
        >>> [node.metadata_props["htp.module"] for node in result.model.graph]
        ['0', '1']
    """
    tool = library("onnxruntime.transformers.optimizer", None)

    def optimize(source: Path, target: Path) -> None:
        optimized = tool.optimize_model(os.fspath(source), model_type=model_type, **options)
        optimized.save_model_to_file(
            os.fspath(target), use_external_data_format=source.with_name("model.onnx.data").exists()
        )

    return adapted("onnxruntime_transformers", optimize, model, output)
