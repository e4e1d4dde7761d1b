"""Models that are named on the command line, by hub id, folder or model type, with the calls that their files need."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from htp_export.capabilities.huggingface.files_by_task import example_calls
from htp_export.capabilities.huggingface.inputs import example_inputs, named_parameters
from htp_export.capabilities.huggingface.models import load_model, names_a_generating_class
from htp_export.capabilities.huggingface.processors import load_processor
from htp_export.capabilities.huggingface.streaming import find_checkpoint, released_when_read
from htp_export.command.model_options import ModelOptions
from htp_export.command.sources import SourceCall, read_shapes
from htp_export.files.checkpoint import Checkpoint

__all__ = ["calls_by_task", "has_guessed_task", "one_call"]

_AUTO = "auto"


def one_call(
    options: ModelOptions, *, batch: int, shapes: Mapping[str, Any] | None, stream_weights: bool
) -> SourceCall:
    """The model and example inputs; see ``ModelOptions.call``."""
    task = None if options.task == _AUTO else options.task
    model = _model(options, task, stream_weights)
    taken = named_parameters(model)
    fitting = {name: shape for name, shape in (shapes or {}).items() if name in taken}
    wanted = {**fitting, **read_shapes(options.inputs)}
    kwargs = example_inputs(
        model, task=task, shapes=wanted, batch=batch, seed=options.seed, processor=_processor(options)
    )
    return SourceCall(model, (), dict(kwargs), checkpoint=_checkpoint(options, model, stream_weights))


def calls_by_task(
    options: ModelOptions,
    *,
    two_files: bool | None,
    cache_names: str,
    sizes: Mapping[str, int] | None,
    stream_weights: bool,
) -> dict[str, SourceCall]:
    """The files of the task, and the call that each is exported from; see ``ModelOptions.calls_by_task``."""
    model = _model(options, options.task or _AUTO, stream_weights)
    checkpoint = _checkpoint(options, model, stream_weights)
    with released_when_read(model) if stream_weights else contextlib.nullcontext():
        found = example_calls(
            model,
            task=None if options.task in (None, _AUTO) else options.task,
            two_files=two_files,
            cache_names=cache_names,  # type: ignore[arg-type] # it was checked
            sizes=sizes,
            shapes=read_shapes(options.inputs) or None,
            seed=options.seed,
            processor=_processor(options),
        )
    return {name: SourceCall(each.model, (), each.kwargs, each, checkpoint) for name, each in found.items()}


def has_guessed_task(options: ModelOptions) -> bool:
    """Whether the config of the folder or hub id names a class that generates."""
    return names_a_generating_class(
        str(options.source),
        random_weights=options.random_weights,
        overrides=options.overrides,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
    )


def _model(options: ModelOptions, task: str | None, stream_weights: bool) -> Any:
    return load_model(
        str(options.source),
        task=task,
        random_weights=options.random_weights,
        overrides=options.overrides,
        dtype=options.dtype,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        attn_implementation=options.attention,
        seed=options.seed,
        stream_weights=stream_weights,
    )


def _processor(options: ModelOptions) -> Any:
    """The tokenizer and the image processor that lie beside the model."""
    return load_processor(
        str(options.source),
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        overrides=options.overrides,
    )


def _checkpoint(options: ModelOptions, model: Any, stream_weights: bool) -> Checkpoint | None:
    """The files of the weights, if those stay in them."""
    if not stream_weights:
        return None
    return find_checkpoint(str(options.source), model.config, {"revision": options.revision, "local_files_only": True})
