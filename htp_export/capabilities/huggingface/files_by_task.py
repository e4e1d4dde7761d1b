"""Which files a task has, and the call that each of them is exported from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from htp_export.capabilities.huggingface.caches import let_torch_export_see_caches
from htp_export.capabilities.huggingface.call_maker import CACHE, DECODER, CallMaker
from htp_export.capabilities.huggingface.encoder_decoders import EncoderAndDecoder
from htp_export.capabilities.huggingface.example_calls import CacheNames, ExampleCall
from htp_export.capabilities.huggingface.images_and_text import ImagesAndText
from htp_export.capabilities.huggingface.inputs import named_parameters
from htp_export.capabilities.huggingface.processors import Processor
from htp_export.capabilities.huggingface.right_padding import warn_of_right_padding
from htp_export.capabilities.huggingface.tasks import split_task, task_of
from htp_export.errors import InputError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["example_call", "example_calls"]

_SIZES = {  # all different, and none is 1: torch.export takes a size of 1 for a constant
    "batch_size": 2,
    "sequence_length": 3,
    "past_sequence_length": 5,
    "encoder_sequence_length": 7,
}


def _without_a_cache(maker: CallMaker, shapes: Mapping[str, Any] | None) -> dict[str, ExampleCall]:
    """One file: all that ``forward`` takes and the config describes."""
    sizes = maker.sizes
    if maker.model.can_generate() and not maker.model.config.is_encoder_decoder and not shapes:
        runs = {"forward": maker.tokens(sizes["past_sequence_length"] + sizes["sequence_length"])}
    else:
        runs = {"forward": maker.inputs(shapes, sizes["batch_size"])}
    return {"model": maker.call(runs)}


def _decoder(maker: CallMaker, two_files: bool, right_padding: bool) -> dict[str, ExampleCall]:
    """One file for prefill and decoding, or a file without a cache among its inputs, and one with it."""
    split = maker.sizes["past_sequence_length"]
    prefill, decode = maker.prefill_and_decode(maker.tokens(split + maker.sizes["sequence_length"]), split)
    if not two_files:
        made = maker.call({"prefill": prefill, "decode": decode}, axes=DECODER)
        made = dataclasses.replace(made, right_padding=right_padding)
        if right_padding:
            warn_of_right_padding(made)
        return {"model": made}
    del prefill["past_key_values"]
    axes = {f"present.{CACHE}": {0: "batch_size", 2: "sequence_length"}}
    first, following = maker.call({"prefill": prefill}, axes=axes), maker.call({"decode": decode}, axes=DECODER)
    return {"decoder_model": first, "decoder_with_past_model": following}


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
) -> dict[str, ExampleCall]:
    """The files of a task, and the call that each is exported from, with optimum's names and dynamic axes.

    Models that generate with a cache have one file, ``model``, for prefill and decoding. Encoder-decoders have
    ``encoder_model``, and a decoder in two files, ``decoder_model`` (no cache among its inputs) and
    ``decoder_with_past_model``, or in one, ``decoder_model_merged``. For ``image-text-to-text``, models that put images
    in the places of tokens have ``vision_encoder``, ``embed_tokens`` and ``decoder_model_merged``.

    Args:
        model: A model of transformers. Its ``config.use_cache`` must be true for a task with ``-with-past``.
        task: The task; without it, the one that the model's class is for, with ``-with-past`` if its config uses a
            cache.
        two_files: Whether a decoder has two files, ``decoder_model`` and ``decoder_with_past_model``; by default, that
            of an encoder-decoder does. One that takes images has one file.
        cache_names: Whose names the tensors of the cache have: optimum's (``past_key_values.0.key``,
            ``present.0.key``) or those of ``transformers.exporters`` (``input.past_key_values.layers.0.keys``).
        sizes: Name of a dimension → its size in the example: ``batch_size``, ``sequence_length``,
            ``past_sequence_length``, ``encoder_sequence_length``.
        shapes: As for `example_inputs`, for tasks without a cache.
        seed: Of the example inputs.
        processor: As for `example_inputs`.
        right_padding: Whether a decoder of one file shall be right for batches whose texts are padded on the right, as
            in ONNX Runtime GenAI: its sliding windows count tokens rather than places in the cache. A warning is
            logged if other parts of the model count the padding, such as biases by distance.

    Returns:
        Name of the file, without ``.onnx`` → call.

    Raises:
        InputError: If the model cannot be called so, or transformers is too old for an export with a cache.
    """
    task = task or task_of(model)
    base, has_cache = split_task(task)
    unknown = [name for name in sizes or {} if name not in _SIZES]
    if unknown:
        raise InputError(f"no size {unknown[0]!r} in a call with a cache; there are {', '.join(_SIZES)}")
    maker = CallMaker(model, task, cache_names, {**_SIZES, **(sizes or {})}, seed, processor)
    if not has_cache:
        return _without_a_cache(maker, shapes)
    taken = named_parameters(model)
    if "past_key_values" not in taken:
        own = next((f", but {name}" for name in ("cache_params", "state") if name in taken), "")
        raise InputError(f"{type(model).__name__} takes no past_key_values{own}; choose a task without -with-past")
    let_torch_export_see_caches(model)
    if not maker.model.config.is_encoder_decoder:
        return (
            ImagesAndText(maker).calls()
            if base == "image-text-to-text"
            else _decoder(maker, bool(two_files), right_padding)
        )
    both = EncoderAndDecoder(maker)
    decoders = both.merged_decoder() if two_files is False else both.two_decoders()
    return {"encoder_model": both.encoder(), **decoders}


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
    """The call that the one file of a task is exported from; see `example_calls`.

    Args:
        model: As for `example_calls`, like all that follow.
        task: The task.
        cache_names: Whose names the tensors of the cache have.
        sizes: Name of a dimension → its size in the example.
        shapes: As for `example_inputs`, for tasks without a cache.
        seed: Of the example inputs.
        processor: As for `example_inputs`.
        right_padding: Whether sliding windows count tokens rather than places.

    Raises:
        InputError: If the task has several files, or the model cannot be called so.

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
