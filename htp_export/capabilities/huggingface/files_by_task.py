"""The files of a task, and the call that each file is exported from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from htp_export.capabilities.huggingface.caches import register_caches, warn_of_right_padding
from htp_export.capabilities.huggingface.encoder_decoders import EncoderAndDecoder
from htp_export.capabilities.huggingface.example_calls import (
    CACHE,
    DECODER,
    CacheNames,
    Calls,
    ExampleCall,
)
from htp_export.capabilities.huggingface.images_and_text import ImagesAndText
from htp_export.capabilities.huggingface.sources import Processor
from htp_export.capabilities.huggingface.tasks import split_task, task_of
from htp_export.errors import InputError

if TYPE_CHECKING:
    from torch import nn

# All different, because torch.export may take equal sizes for one; none is 1, a constant for it.
_SIZES = {
    "batch_size": 2,
    "sequence_length": 3,
    "past_sequence_length": 5,
    "encoder_sequence_length": 7,
}


def example_calls(
    model: nn.Module,
    *,
    task: str | None = None,
    two_files: bool | None = None,
    cache_names: CacheNames = "optimum",
    sizes: Mapping[str, int] | None = None,
    shapes: Mapping[str, Any] | None = None,
    seed: int = 0,
    processor: Processor | None = None,
    right_padding: bool = False,
    embeds_images: bool = False,
) -> dict[str, ExampleCall]:
    """Create the calls that the files of a task are exported from, with optimum's names and dynamic axes.

    Args:
        model: A model of transformers. Its ``config.use_cache`` must be true for a task with
            ``-with-past``.
        task: The task; the default is that of the model's class, with ``-with-past`` if its config
            uses a cache.
        two_files: Whether a decoder has two files, ``decoder_model`` and
            ``decoder_with_past_model``. This is the default for an encoder-decoder; the decoder of
            a model for images and text always has one file.
        cache_names: The names of the tensors of the cache: optimum's (``past_key_values.0.key``,
            ``present.0.key``) or those of ``transformers.exporters``
            (``input.cache.layers.0.keys``; ``past_key_values`` for ``cache`` before 5.24).
        sizes: Name of a dimension → its size in the example: ``batch_size``, ``sequence_length``,
            ``past_sequence_length``, ``encoder_sequence_length``.
        shapes: As for `example_inputs`, for tasks without a cache.
        seed: Seed of the example inputs.
        processor: As for `example_inputs`.
        right_padding: Whether a decoder of one file has to be right for batches of texts with
            padding on the right, as in ONNX Runtime GenAI: its sliding windows then count tokens,
            not positions in the cache. A warning is logged if other parts of the model, such as
            biases by distance, count the padding.
        embeds_images: Whether ``embed_tokens`` has an input ``image_features``, and replaces image
            tokens by it, as ONNX Runtime GenAI expects; transformers.js replaces them itself.

    Returns:
        Name of the file, without ``.onnx`` → call.

    Raises:
        InputError: If the model does not support such calls, or transformers is too old for an
            export with a cache.
    """
    task = task or task_of(model)
    base, has_cache = split_task(task)
    unknown = [name for name in sizes or {} if name not in _SIZES]
    if unknown:
        raise InputError(
            f"no size {unknown[0]!r} in a call with a cache; there are {', '.join(_SIZES)}"
        )
    all_sizes = {**_SIZES, **(sizes or {})}
    arguments: tuple[Any, ...] = (model, task, cache_names, all_sizes, seed, processor)
    calls = Calls(*arguments)
    if not has_cache:
        return {"model": _without_a_cache(calls, shapes)}
    if not calls.cache:
        raise calls.refused("takes no key-value cache")
    register_caches(model)
    if calls.model.config.is_encoder_decoder:
        return EncoderAndDecoder(*arguments).calls(two_files is not False)
    if base == "image-text-to-text":
        return ImagesAndText(*arguments).calls(embeds_images)
    return _decoder(calls, bool(two_files), right_padding)


def _without_a_cache(calls: Calls, shapes: Mapping[str, Any] | None) -> ExampleCall:
    """The call with all arguments of ``forward`` that the config describes; of a decoder, with tokens alone."""
    model, sizes = calls.model, calls.sizes
    if model.can_generate() and not model.config.is_encoder_decoder and not shapes:
        length = sizes["past_sequence_length"] + sizes["sequence_length"]
        return calls.call({"forward": calls.tokens(length)})
    return calls.call({"forward": calls.inputs(shapes, sizes["batch_size"])})


def _decoder(calls: Calls, two_files: bool, right_padding: bool) -> dict[str, ExampleCall]:
    """One file for prefill and decode, or two files: without a cache as input, and with one."""
    split = calls.sizes["past_sequence_length"]
    runs = calls.prefill_and_decode(calls.tokens(split + calls.sizes["sequence_length"]), split)
    if not two_files:
        call = calls.call(runs, axes=DECODER, right_padding=right_padding)
        if right_padding:
            warn_of_right_padding(calls.model, **runs)
        return {"model": call}
    del runs["prefill"][calls.cache]
    axes = {f"present.{CACHE}": {0: "batch_size", 2: "sequence_length"}}
    return {
        "decoder_model": calls.call({"prefill": runs["prefill"]}, axes=axes),
        "decoder_with_past_model": calls.call({"decode": runs["decode"]}, axes=DECODER),
    }


def example_call(
    model: nn.Module,
    *,
    task: str | None = None,
    cache_names: CacheNames = "optimum",
    sizes: Mapping[str, int] | None = None,
    shapes: Mapping[str, Any] | None = None,
    seed: int = 0,
    processor: Processor | None = None,
    right_padding: bool = False,
) -> ExampleCall:
    """Create the call that the only file of a task is exported from; the arguments are those of `example_calls`.

    Examples:
        >>> from htp_export.huggingface import load_model
        >>> tiny = {"vocab_size": 32, "n_embd": 8, "n_layer": 1, "n_head": 2}
        >>> model = load_model("gpt2", task="text-generation-with-past", random_weights=True, overrides=tiny)
        >>> call = example_call(model)
        >>> call.input_names
        ('input_ids', 'past_key_values.0.key', 'past_key_values.0.value', 'attention_mask', 'position_ids')
        >>> call.output_names
        ('logits', 'present.0.key', 'present.0.value')
        >>> call.axes["present.0.key"]
        {0: 'batch_size', 2: 'past_sequence_length + sequence_length'}
    """
    calls = example_calls(
        model,
        task=task,
        cache_names=cache_names,
        sizes=sizes,
        shapes=shapes,
        seed=seed,
        processor=processor,
        right_padding=right_padding,
    )
    if len(calls) > 1:
        raise InputError(f"this task has {len(calls)} files, {', '.join(calls)}: use example_calls")
    return next(iter(calls.values()))
