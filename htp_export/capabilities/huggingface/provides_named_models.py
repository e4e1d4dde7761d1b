"""Models by the hub id, folder or model type of a command line, with the calls of their files."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from htp_export.capabilities.huggingface.files_by_task import example_calls
from htp_export.capabilities.huggingface.inputs import example_inputs, named_parameters
from htp_export.capabilities.huggingface.models import load, packed_source
from htp_export.capabilities.huggingface.sources import Source, processor_of
from htp_export.capabilities.huggingface.streaming import released_when_read
from htp_export.capabilities.huggingface.tasks import AUTO, generates
from htp_export.command.model_options import ModelOptions, SourceCall
from htp_export.command.run_options import read_shapes
from htp_export.files.checkpoint import Checkpoint


def one_call(
    options: ModelOptions, *, batch: int, shapes: Mapping[str, Any] | None, stream_weights: bool
) -> SourceCall:
    """Load the model, and create example inputs; see ``ModelOptions.call``."""
    task = None if options.task == AUTO else options.task
    source = source_of(options)
    model, checkpoint = _load(source, options, task, stream_weights)
    parameters = named_parameters(model)
    all_shapes = {name: shape for name, shape in (shapes or {}).items() if name in parameters}
    all_shapes |= read_shapes(options.shapes)
    kwargs = example_inputs(
        model, shapes=all_shapes, batch=batch, seed=options.seed, processor=processor_of(source)
    )
    return SourceCall(model, (), dict(kwargs), checkpoint=checkpoint, packed=packed_source(source))


def calls_by_task(
    options: ModelOptions, *, stream_weights: bool, for_genai: bool = False, **settings: Any
) -> dict[str, SourceCall]:
    """Create the calls that the files of the task are exported from; ``settings`` are passed to `example_calls`.

    ``for_genai``: sliding windows count tokens, and ``embed_tokens`` replaces image tokens.
    """
    source = source_of(options)
    model, checkpoint = _load(source, options, options.task or AUTO, stream_weights)
    with released_when_read(model) if stream_weights else contextlib.nullcontext():
        calls = example_calls(
            model,
            task=None if options.task == AUTO else options.task,
            shapes=read_shapes(options.shapes) or None,
            seed=options.seed,
            processor=processor_of(source),
            right_padding=for_genai,
            embeds_images=for_genai,
            **settings,
        )
    packed = packed_source(source)
    return {
        name: SourceCall(call.model, (), call.kwargs, call, checkpoint, packed)
        for name, call in calls.items()
    }


def has_guessed_task(options: ModelOptions) -> bool:
    """Whether the config of the folder or hub id names a class that generates."""
    return generates(source_of(options).config())


def source_of(options: ModelOptions) -> Source:
    """Return the SOURCE of the options, which is checked."""
    revision, trusted = options.revision, options.trust_remote_code
    return Source(str(options.source), options.random_weights, options.overrides, revision, trusted)


def _load(
    source: Source, options: ModelOptions, task: str | None, stream_weights: bool
) -> tuple[Any, Checkpoint | None]:
    settings = {"dtype": options.dtype, "attn_implementation": options.attention}
    return load(source, task, settings, seed=options.seed, stream_weights=stream_weights)
