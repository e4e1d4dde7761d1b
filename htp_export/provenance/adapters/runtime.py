"""ONNX Runtime's own optimisations: those at load, and its tool for transformers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from htp_export.errors import InputError
from htp_export.model.tagged import ModelSource
from htp_export.provenance.adapters.adapting import adapted, library
from htp_export.provenance.carrying import Carried
from htp_export.runtime.sessions import Changes, RunnableModel, Session, SessionSettings

__all__ = ["onnxruntime", "onnxruntime_transformers"]

_LEVELS = ("basic", "extended", "all")


def onnxruntime(
    model: ModelSource,
    output: str | os.PathLike[str] | None = None,
    level: str = "all",
    providers: Sequence[str] = ("CPUExecutionProvider",),
) -> Carried:
    """Save the graph that ONNX Runtime optimises at load, and carry the tags.

    Args:
        model: The tagged model.
        output: A file to write. With ``level="all"`` it is for this machine: layouts depend on the processor.
        level: ``basic``, ``extended`` (with its own operators) or ``all`` (with its own layouts).
        providers: Execution providers, the preferred first.

    Raises:
        InputError: There is no such level.
    """
    if level not in _LEVELS:
        raise InputError(f"level {level!r} is none of {', '.join(_LEVELS)}")
    settings = SessionSettings(tuple(providers))
    settings.check()
    tool = library("onnxruntime", None)

    def optimize(given: Path, made: Path) -> None:
        chosen = getattr(tool.GraphOptimizationLevel, f"ORT_ENABLE_{level.upper()}")
        changes = Changes({"graph_optimization_level": chosen, "optimized_model_filepath": os.fspath(made)})
        Session(RunnableModel(given, "onnxruntime: the model"), settings, changes)

    return adapted("onnxruntime", optimize, model, output)


def onnxruntime_transformers(
    model: ModelSource, output: str | os.PathLike[str] | None = None, model_type: str = "bert", **options: Any
) -> Carried:
    """Run ONNX Runtime's optimiser for transformers and carry the tags.

    Args:
        model: The tagged model.
        output: A file to write.
        model_type: What kind of model it is, as of ``onnxruntime.transformers.optimizer.optimize_model``.
        **options: As of that function: ``num_heads``, ``hidden_size``, ``opt_level`` and more.
    """
    tool = library("onnxruntime.transformers.optimizer", None)

    def optimize(given: Path, made: Path) -> None:
        optimized = tool.optimize_model(os.fspath(given), model_type=model_type, **options)
        optimized.save_model_to_file(
            os.fspath(made), use_external_data_format=given.with_name("model.onnx.data").exists()
        )

    return adapted("onnxruntime_transformers", optimize, model, output)
