"""Graph optimizers: tools that return a model that computes the same."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from htp_export.capabilities.carry.adapting import adapter
from htp_export.editing.editing import register_constants
from htp_export.errors import InputError, ToolError
from htp_export.extras import required
from htp_export.runtime.sessions import OptionChanges, RunnableModel, Session
from htp_export.runtime.settings import RunSettings

__all__ = [
    "onnxoptimizer",
    "onnxruntime",
    "onnxruntime_transformers",
    "onnxscript",
    "onnxsim",
    "onnxslim",
]

_LEVELS = ("basic", "extended", "all")


@adapter
def onnxslim(_source: Path, _target: Path, /, **options: Any) -> Any:
    """Run OnnxSlim and restore the tags.

    Args:
        **options: Options of ``onnxslim.slim``.

    Examples:
        >>> result = htp_export.tools.onnxslim(program)
        >>> [node.metadata_props["htp.module"] for node in result.model.graph]
        ['0', '1']
    """
    return required("onnxslim", "this tool").slim(onnx.load(_source), **options)


@adapter
def onnxsim(_source: Path, _target: Path, /, **options: Any) -> Any:
    """Run onnx-simplifier and restore the tags.

    Args:
        **options: Options of ``onnxsim.simplify``.

    Examples:
        >>> htp_export.tools.onnxsim(program).recovered
        {'tensor': 2}
    """
    simplified, same = required("onnxsim", "this tool").simplify(onnx.load(_source), **options)
    if not same:
        raise ToolError("onnxsim", "says that its result does not compute what the model did")
    return simplified


@adapter
def onnxoptimizer(
    _source: Path,
    _target: Path,
    /,
    *,
    passes: Sequence[str] | None = None,
    fixed_point: bool = False,
) -> Any:
    """Run onnxoptimizer and restore the tags.

    Args:
        passes: Names of passes; None for its fusion and elimination passes.
        fixed_point: Whether to repeat the passes until nothing changes.

    Examples:
        >>> htp_export.tools.onnxoptimizer(program, passes=["eliminate_identity"]).nodes
        2
    """
    tool = required("onnxoptimizer", "this tool")
    wanted = list(passes) if passes is not None else tool.get_fuse_and_elimination_passes()
    return tool.optimize(onnx.load(_source), wanted, fixed_point)


@adapter
def onnxscript(_source: Path, _target: Path, /, *, fusions: bool = False, **options: Any) -> Any:
    """Run the optimizer and the rewriter of onnxscript and restore the tags.

    Args:
        fusions: Whether to apply its fusions for ONNX Runtime, too.
        **options: Options of ``onnxscript.optimizer.optimize``.

    Examples:
        >>> htp_export.tools.onnxscript(program).nodes
        2
    """
    loaded = ir.load(_source)
    required("onnxscript.optimizer", "this tool").optimize(loaded, **options)
    rewritten: ir.Model = required("onnxscript.rewriter", "this tool").rewrite(loaded)
    if fusions:
        required("onnxscript.rewriter.ort_fusions", "this tool").optimize_for_ort(rewritten)
    register_constants(rewritten.graph)
    return rewritten


@adapter
def onnxruntime(
    _source: Path,
    _target: Path,
    /,
    *,
    level: str = "all",
    providers: Sequence[str] = ("CPUExecutionProvider",),
) -> None:
    """Write the graph that ONNX Runtime optimises when it loads a model, and restore the tags.

    Args:
        level: ``"basic"``, ``"extended"`` (with ONNX Runtime's own operators) or ``"all"`` (with
            layouts for the processor; the result is for this machine).
        providers: Execution providers, in order of preference.

    Examples:
        >>> result = htp_export.tools.onnxruntime(program, level="extended")
        >>> [(node.op_type, node.metadata_props["htp.owners"]) for node in result.model.graph]
        [('FusedGemm', '["0","1"]')]
    """
    if level not in _LEVELS:
        raise InputError(f"level {level!r} is none of {', '.join(_LEVELS)}")
    settings = RunSettings(providers=providers)
    settings.check_providers()
    chosen = getattr(
        required("onnxruntime", "this tool").GraphOptimizationLevel, f"ORT_ENABLE_{level.upper()}"
    )
    changes = OptionChanges(
        {"graph_optimization_level": chosen, "optimized_model_filepath": os.fspath(_target)}
    )
    Session(RunnableModel(_source, "onnxruntime: the model"), settings, changes)


@adapter
def onnxruntime_transformers(
    _source: Path, _target: Path, /, *, model_type: str = "bert", **options: Any
) -> None:
    """Run ONNX Runtime's optimizer for transformers and restore the tags.

    Args:
        model_type: The architecture, as in ``onnxruntime.transformers.optimizer.optimize_model``.
        **options: Options of that function: ``num_heads``, ``hidden_size``, ``opt_level`` and
            others.

    Examples:
        >>> htp_export.tools.onnxruntime_transformers(program, model_type="bert").nodes
        2
    """
    external = _source.with_name("model.onnx.data").exists()
    tool = required("onnxruntime.transformers.optimizer", "this tool")
    optimized = tool.optimize_model(os.fspath(_source), model_type=model_type, **options)
    optimized.save_model_to_file(os.fspath(_target), use_external_data_format=external)
