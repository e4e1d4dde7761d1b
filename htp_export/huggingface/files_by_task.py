"""Which files a task has, and the call that each of them is exported from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from htp_export.errors import InputError
from htp_export.huggingface.caches import emptied, empty_cache, let_torch_export_see_caches
from htp_export.huggingface.example_calls import CacheNames, ExampleCall, described, run, without_a_cache
from htp_export.huggingface.inputs import example_inputs, named_parameters
from htp_export.huggingface.processors import Processor
from htp_export.huggingface.task_names import Axes
from htp_export.huggingface.tasks import split_task, task_of

if TYPE_CHECKING:
    from torch import nn

__all__ = ["example_call", "example_calls"]

_SIZES = {  # all different, and none is 1: torch.export takes a size of 1 for a constant
    "batch_size": 2,
    "sequence_length": 3,
    "past_sequence_length": 5,
    "encoder_sequence_length": 7,
}
_TOTAL = "past_sequence_length + sequence_length"
_CACHE = "past_key_values."
_DECODER: dict[str, Axes] = {
    "attention_mask": {0: "batch_size", 1: _TOTAL},
    _CACHE: {0: "batch_size", 2: "past_sequence_length"},
    f"present.{_CACHE}": {0: "batch_size", 2: _TOTAL},
}
_ENCODER_TEXT: Axes = {0: "batch_size", 1: "encoder_sequence_length"}
_ENCODER: dict[str, Axes] = {
    "input_ids": _ENCODER_TEXT,
    "attention_mask": _ENCODER_TEXT,
    "last_hidden_state": _ENCODER_TEXT,
}
_NEW_TOKENS: Axes = {0: "batch_size", 1: "decoder_sequence_length"}
_FIRST_TOKENS: dict[str, Axes] = {
    "input_ids": _NEW_TOKENS,
    "logits": _NEW_TOKENS,
    "encoder_attention_mask": _ENCODER_TEXT,
    "encoder_hidden_states": _ENCODER_TEXT,
    f"present.{_CACHE}": {0: "batch_size", 2: "decoder_sequence_length"},
    f"present.{_CACHE}cross": {0: "batch_size", 2: "encoder_sequence_length"},
}
_NEXT_TOKENS: dict[str, Axes] = {
    **_FIRST_TOKENS,
    _CACHE: {0: "batch_size", 2: "past_decoder_sequence_length"},
    f"{_CACHE}cross": {0: "batch_size", 2: "encoder_sequence_length"},
    f"present.{_CACHE}": {0: "batch_size", 2: "past_decoder_sequence_length + decoder_sequence_length"},
}


@dataclass(frozen=True)
class _Maker:
    """Makes the calls of one model."""

    model: Any
    task: str
    cache_names: CacheNames
    sizes: Mapping[str, int]
    seed: int
    processor: Processor | None = None

    def forward(self, shapes: Mapping[str, Any] | None) -> ExampleCall:
        """One file without a cache: all that ``forward`` takes and the config describes."""
        if self.model.can_generate() and not self.model.config.is_encoder_decoder and not shapes:
            runs = {"forward": self._tokens(self.sizes["past_sequence_length"] + self.sizes["sequence_length"])}
        else:
            batch = self.sizes["batch_size"]
            inputs = example_inputs(self.model, shapes=shapes, batch=batch, seed=self.seed, processor=self.processor)
            runs = {"forward": dict(inputs)}
        return described(self.task, self.model, runs, self.cache_names)

    def decoder(self) -> ExampleCall:
        """One file for prefill and decoding."""
        prefill, decode = self._cached()
        return described(self.task, self.model, {"prefill": prefill, "decode": decode}, self.cache_names, axes=_DECODER)

    def two_decoders(self) -> dict[str, ExampleCall]:
        """A file without a cache among its inputs, and one with it."""
        prefill, decode = self._cached()
        del prefill["past_key_values"]
        axes = {f"present.{_CACHE}": {0: "batch_size", 2: "sequence_length"}}
        first = described(self.task, self.model, {"prefill": prefill}, self.cache_names, axes=axes)
        following = described(self.task, self.model, {"decode": decode}, self.cache_names, axes=_DECODER)
        return {"decoder_model": first, "decoder_with_past_model": following}

    def encoder_and_decoders(self) -> dict[str, ExampleCall]:
        """The encoder, the decoder for the first tokens, and the decoder for those after them."""
        import torch

        encoder, is_text = self.model.get_encoder(), self.model.main_input_name == "input_ids"
        sizes = [self.sizes["batch_size"], self.sizes["encoder_sequence_length"]]
        shapes = {"input_ids": sizes} if is_text else None
        inputs = dict(
            example_inputs(self.model, shapes=shapes, batch=sizes[0], seed=self.seed, processor=self.processor)
        )
        ids = self._decoder_ids()
        given = {name: inputs[name] for name in (self.model.main_input_name, "attention_mask") if name in inputs}
        given = {name: value for name, value in given.items() if name in named_parameters(encoder)}
        call = described(self.task, encoder, {"encode": given}, self.cache_names, axes=_ENCODER)
        hidden = run(encoder, given).last_hidden_state
        about = {"encoder_attention_mask": given["attention_mask"]} if "attention_mask" in given else {}
        split = self.sizes["past_sequence_length"]
        first = {"input_ids": ids[:, :split], **about, "encoder_hidden_states": hidden}
        cache = empty_cache(self.model)
        width, dtype = hidden.shape[-1], hidden.dtype

        def begin(forward: Callable[..., Any], arguments: dict[str, Any]) -> Any:
            returned = forward(**_own_names(arguments))
            return {"logits": returned.logits, "past_key_values": returned.past_key_values}

        def go_on(forward: Callable[..., Any], arguments: dict[str, Any]) -> Any:
            # What the encoder found is in the cache. The model asks for it again, and reads its sizes alone.
            keys = arguments["past_key_values"].cross_attention_cache.layers[0].keys
            unread = torch.zeros(keys.shape[0], keys.shape[2], width, dtype=dtype, device=keys.device)
            returned = forward(**_own_names({**arguments, "encoder_hidden_states": unread}))
            grown = returned.past_key_values.self_attention_cache
            return {"logits": returned.logits, "past_key_values.self_attention_cache": grown}

        run(self.model, {**_own_names(first), "past_key_values": cache})
        if not cache.cross_attention_cache.get_seq_length():
            raise without_a_cache(self.model)
        following = {"input_ids": ids[:, split:], **about, "past_key_values": cache}
        return {
            "encoder_model": call,
            "decoder_model": self._decoder({"prefill": first}, begin, _FIRST_TOKENS),
            "decoder_with_past_model": self._decoder({"decode": following}, go_on, _NEXT_TOKENS),
        }

    def _decoder(
        self, runs: Mapping[str, dict[str, Any]], adapt: Callable[..., Any], axes: Mapping[str, Axes]
    ) -> ExampleCall:
        return described(self.task, self.model, runs, self.cache_names, adapt=adapt, axes=axes)

    def _cached(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments with an empty cache, and arguments with a cache in which tokens are."""
        split = self.sizes["past_sequence_length"]
        whole = self._tokens(split + self.sizes["sequence_length"])
        first = {name: value[:, :split] for name, value in whole.items()}
        rest = {name: value if name == "attention_mask" else value[:, split:] for name, value in whole.items()}
        cache = empty_cache(self.model)
        run(self.model, {**first, "past_key_values": cache})
        return self._ordered(first, emptied(cache)), self._ordered(rest, cache)

    def _tokens(self, length: int) -> dict[str, Any]:
        """Tokens, their mask and their positions, as far as the model takes them.

        One token of the last text is masked. It is not the first: a token that may look at no token at all has no
        defined result, and kernels differ in it.
        """
        import torch

        shapes = {"input_ids": [self.sizes["batch_size"], length]}
        ids = example_inputs(self.model, shapes=shapes, seed=self.seed, processor=self.processor)["input_ids"]
        mask = torch.ones_like(ids)
        mask[-1, 1:2] = 0
        taken = named_parameters(self.model)
        made = {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(-1) - 1}
        return {name: made[name] for name in taken if name in made}

    def _decoder_ids(self) -> Any:
        length = self.sizes["past_sequence_length"] + self.sizes["sequence_length"]
        shapes = {"decoder_input_ids": [self.sizes["batch_size"], length]}
        return example_inputs(self.model, shapes=shapes, seed=self.seed, processor=self.processor)["decoder_input_ids"]

    def _ordered(self, kwargs: Mapping[str, Any], cache: Any) -> dict[str, Any]:
        given = {**kwargs, "past_key_values": cache}
        return {name: given[name] for name in named_parameters(self.model) if name in given}


def _own_names(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a decoder's file under the names that an encoder-decoder model has for them."""
    names = {"input_ids": "decoder_input_ids", "encoder_attention_mask": "attention_mask"}
    own = {names.get(name, name): value for name, value in arguments.items()}
    own["encoder_outputs"] = (own.pop("encoder_hidden_states"),)
    return own


def example_calls(
    model: nn.Module,
    *,
    task: str | None = None,
    two_files: bool = False,
    cache_names: CacheNames = "optimum",
    sizes: Mapping[str, int] | None = None,
    shapes: Mapping[str, Any] | None = None,
    seed: int = 0,
    processor: Processor | None = None,
) -> dict[str, ExampleCall]:
    """The files of a task, and the call that each is exported from, with optimum's names and dynamic axes.

    Models that generate with a cache have one file, ``model``, for prefill and decoding. Encoder-decoders have
    ``encoder_model``, ``decoder_model`` (no cache among its inputs) and ``decoder_with_past_model``.

    Args:
        model: A model of transformers. Its ``config.use_cache`` must be true for a task with ``-with-past``.
        task: The task; without it, the one that the model's class is for, with ``-with-past`` if its config uses a
            cache.
        two_files: Whether a decoder has two files, ``decoder_model`` and ``decoder_with_past_model``.
        cache_names: Whose names the tensors of the cache have: optimum's (``past_key_values.0.key``,
            ``present.0.key``) or those of ``transformers.exporters`` (``input.past_key_values.layers.0.keys``).
        sizes: Name of a dimension → its size in the example: ``batch_size``, ``sequence_length``,
            ``past_sequence_length``, ``encoder_sequence_length``.
        shapes: As for `example_inputs`, for tasks without a cache.
        seed: Of the example inputs.
        processor: As for `example_inputs`.

    Returns:
        Name of the file, without ``.onnx`` → call.

    Raises:
        InputError: If the model cannot be called so, or transformers is too old for an export with a cache.
    """
    task = task or task_of(model)
    _, has_cache = split_task(task)
    unknown = [name for name in sizes or {} if name not in _SIZES]
    if unknown:
        raise InputError(f"no size {unknown[0]!r} in a call with a cache; there are {', '.join(_SIZES)}")
    maker = _Maker(model, task, cache_names, {**_SIZES, **(sizes or {})}, seed, processor)
    if not has_cache:
        return {"model": maker.forward(shapes)}
    if "past_key_values" not in named_parameters(model):
        raise InputError(f"{type(model).__name__} takes no past_key_values; choose a task without -with-past")
    let_torch_export_see_caches(model)
    if maker.model.config.is_encoder_decoder:
        return maker.encoder_and_decoders()
    return maker.two_decoders() if two_files else {"model": maker.decoder()}


def example_call(
    model: nn.Module,
    *,
    task: str | None = None,
    cache_names: CacheNames = "optimum",
    sizes: Mapping[str, int] | None = None,
    shapes: Mapping[str, Any] | None = None,
    seed: int = 0,
    processor: Processor | None = None,
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
        model, task=task, cache_names=cache_names, sizes=sizes, shapes=shapes, seed=seed, processor=processor
    )
    if len(calls) > 1:
        raise InputError(f"this task has {len(calls)} files, {', '.join(calls)}: use example_calls")
    return next(iter(calls.values()))
