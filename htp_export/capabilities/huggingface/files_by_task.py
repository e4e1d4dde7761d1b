"""Which files a task has, and the call that each of them is exported from."""

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

_SIZES = {  # all different, and none is 1: torch.export takes a size of 1 for a constant
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
    """The files of a task, and the call that each is exported from, with optimum's names and dynamic axes.

    Args:
        model: A model of transformers. Its ``config.use_cache`` must be true for a task with
            ``-with-past``.
        task: The task; without it, the one that the model's class is for, with ``-with-past`` if
            its config uses a cache.
        two_files: Whether a decoder has two files, ``decoder_model`` and
            ``decoder_with_past_model``; by default, that of an encoder-decoder does. One that takes
            images has one file.
        cache_names: Whose names the tensors of the cache have: optimum's
            (``past_key_values.0.key``, ``present.0.key``) or those of ``transformers.exporters``
            (``input.cache.layers.0.keys``; ``past_key_values`` for ``cache`` before 5.24).
        sizes: Name of a dimension → its size in the example: ``batch_size``, ``sequence_length``,
            ``past_sequence_length``, ``encoder_sequence_length``.
        shapes: As for `example_inputs`, for tasks without a cache.
        seed: Of the example inputs.
        processor: As for `example_inputs`.
        right_padding: Whether a decoder of one file shall be right for batches whose texts are
            padded on the right, as in ONNX Runtime GenAI: its sliding windows count tokens rather
            than places in the cache. A warning is logged if other parts of the model count the
            padding, such as biases by distance.
        embeds_images: Whether ``embed_tokens`` takes ``image_features``, too, and puts them in the
            places of their tokens, as ONNX Runtime GenAI wants it; in transformers.js, the program
            does that.

    Returns:
        Name of the file, without ``.onnx`` → call.

    Raises:
        InputError: If the model cannot be called so, or transformers is too old for an export with
            a cache.
    """
    task = task or task_of(model)
    base, has_cache = split_task(task)
    unknown = [name for name in sizes or {} if name not in _SIZES]
    if unknown:
        raise InputError(
            f"no size {unknown[0]!r} in a call with a cache; there are {', '.join(_SIZES)}"
        )
    given: tuple[Any, ...] = (
        model,
        task,
        cache_names,
        {**_SIZES, **(sizes or {})},
        seed,
        processor,
    )
    calls = Calls(*given)
    if not has_cache:
        return {"model": _without_a_cache(calls, shapes)}
    if not calls.cache:
        raise calls.refused("takes no key-value cache")
    register_caches(model)
    if calls.model.config.is_encoder_decoder:
        return EncoderAndDecoder(*given).calls(two_files is not False)
    if base == "image-text-to-text":
        return ImagesAndText(*given).calls(embeds_images)
    return _decoder(calls, bool(two_files), right_padding)


def _without_a_cache(calls: Calls, shapes: Mapping[str, Any] | None) -> ExampleCall:
    """All that ``forward`` takes and the config describes."""
    model, sizes = calls.model, calls.sizes
    if model.can_generate() and not model.config.is_encoder_decoder and not shapes:
        return calls.call(
            {"forward": calls.tokens(sizes["past_sequence_length"] + sizes["sequence_length"])}
        )
    return calls.call({"forward": calls.inputs(shapes, sizes["batch_size"])})


def _decoder(calls: Calls, two_files: bool, right_padding: bool) -> dict[str, ExampleCall]:
    """One file for prefill and decoding, or a file without a cache among its inputs, and one with it."""
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
    """The call that the one file of a task is exported from; the arguments are those of `example_calls`.

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
