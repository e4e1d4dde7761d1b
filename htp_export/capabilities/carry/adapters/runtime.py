"""ONNX Runtime's own optimisations: those at load, and its tool for transformers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from htp_export.capabilities.carry.adapting import Tool, adapter, library
from htp_export.errors import InputError
from htp_export.runtime.sessions import OptionChanges, RunnableModel, Session, SessionSettings

__all__ = ["onnxruntime", "onnxruntime_transformers"]

_LEVELS = ("basic", "extended", "all")


@adapter
def onnxruntime(level: str = "all", providers: Sequence[str] = ("CPUExecutionProvider",)) -> Tool:
    """Write the graph that ONNX Runtime optimises when it loads a model, and restore the tags.

    Args:
        level: ``"basic"``, ``"extended"`` (with ONNX Runtime's own operators) or ``"all"`` (with layouts for the
            processor; the result is for this machine).
        providers: Execution providers, in order of preference.

    Examples:
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

    return optimize


@adapter
def onnxruntime_transformers(model_type: str = "bert", **options: Any) -> Tool:
    """Run ONNX Runtime's optimizer for transformers and restore the tags.

    Args:
        model_type: The architecture, as in ``onnxruntime.transformers.optimizer.optimize_model``.
        **options: Options of that function: ``num_heads``, ``hidden_size``, ``opt_level`` and others.

    Examples:
        >>> result = htp_export.tools.onnxruntime_transformers(program, model_type="bert")
        >>> [node.metadata_props["htp.module"] for node in result.model.graph]
        ['0', '1']
    """
    tool = library("onnxruntime.transformers.optimizer", None)

    def optimize(source: Path, target: Path) -> None:
        external = source.with_name("model.onnx.data").exists()
        optimized = tool.optimize_model(os.fspath(source), model_type=model_type, **options)
        optimized.save_model_to_file(os.fspath(target), use_external_data_format=external)

    return optimize
