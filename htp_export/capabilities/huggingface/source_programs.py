"""The Python of a SOURCE, for ``--as-python``: the lines that load a model and create its inputs.

They follow from the options: nothing is loaded or downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from htp_export.capabilities.huggingface.files_by_task import example_calls
from htp_export.capabilities.huggingface.inputs import example_inputs
from htp_export.capabilities.huggingface.models import load_model
from htp_export.capabilities.huggingface.provides_named_models import source_of
from htp_export.capabilities.huggingface.sources import load_processor
from htp_export.command.as_python import Preparation, Written, call_text
from htp_export.command.model_options import ModelOptions
from htp_export.command.run_options import read_shapes


def prepare_source(
    program: Preparation,
    options: ModelOptions,
    *,
    shapes: Mapping[str, Any] | None = None,
    batch: int = 1,
    stream_weights: bool = False,
) -> None:
    """Write the lines for a model and example inputs of one call; ``shapes`` are those of the file's inputs."""
    processor = _prepare_model(program, options, options.task, stream_weights, "example_inputs")
    inputs = {
        "model": Written("model"),
        "shapes": {**(shapes or {}), **read_shapes(options.shapes)},
        "seed": options.seed,
        "batch": batch,
        **processor,
    }
    program.lines.append(call_text("inputs = example_inputs", example_inputs, inputs))
    program.arguments |= {"model": Written("model"), "kwargs": Written("inputs")}


def prepare_calls(
    program: Preparation, options: ModelOptions, *, stream_weights: bool = False, **settings: Any
) -> None:
    """Write the lines for a model and ``calls``, the calls of the files of its task.

    ``settings`` are further arguments of `example_calls`.
    """
    task = options.task or "auto"
    processor = _prepare_model(program, options, task, stream_weights, "example_calls")
    calls = {
        "model": Written("model"),
        "task": None if task == "auto" else task,
        "shapes": read_shapes(options.shapes),
        "seed": options.seed,
        **processor,
        **settings,
    }
    program.lines.append(call_text("calls = example_calls", example_calls, calls))


def _prepare_model(
    program: Preparation, options: ModelOptions, task: str | None, stream_weights: bool, then: str
) -> dict[str, Written]:
    """Write the lines for a model; ``then`` is the next function.

    Returns:
        Its argument ``processor``, for a model whose tokenizer and image processor are read.
    """
    model = {
        "source": options.source,
        "task": task,
        "random_weights": options.random_weights,
        "overrides": options.overrides,
        "dtype": options.dtype,
        "revision": options.revision,
        "trust_remote_code": options.trust_remote_code,
        "attn_implementation": options.attention,
        "seed": options.seed,
        "stream_weights": stream_weights,
    }
    imported = [then, "load_model"]
    program.lines.append(call_text("model = load_model", load_model, model))
    processor = {}
    if source_of(options).has_files:
        imported.append("load_processor")
        call = call_text("processor = load_processor", load_processor, model)
        program.lines.append(call)
        processor["processor"] = Written("processor")
    program.imports["htp_export.huggingface"] = imported
    return processor
