"""The files of an encoder-decoder model: the encoder, and the decoder as two files or one."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from htp_export.capabilities.huggingface.caches import emptied, empty_cache
from htp_export.capabilities.huggingface.example_calls import (
    CACHE,
    Calls,
    ExampleCall,
    adapted,
    is_same,
    run,
)
from htp_export.capabilities.huggingface.inputs import named_parameters
from htp_export.capabilities.huggingface.tasks import Axes
from htp_export.errors import InputError, described

if TYPE_CHECKING:
    import torch

_CROSS = f"{CACHE}cross"
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
    f"present.{CACHE}": {0: "batch_size", 2: "decoder_sequence_length"},
    f"present.{_CROSS}": {0: "batch_size", 2: "encoder_sequence_length"},
}
_NEXT_TOKENS: dict[str, Axes] = {
    **_FIRST_TOKENS,
    CACHE: {0: "batch_size", 2: "past_decoder_sequence_length"},
    _CROSS: {0: "batch_size", 2: "encoder_sequence_length"},
    f"present.{CACHE}": {
        0: "batch_size",
        2: "past_decoder_sequence_length + decoder_sequence_length",
    },
}
_ANY_TOKENS: dict[str, Axes] = {
    **_NEXT_TOKENS,
    _CROSS: {0: "batch_size", 2: "past_encoder_sequence_length"},
}
_SHORTEST = 4
"""Fewest encoder states of an example: half of them are in the cache, and torch.export makes sizes 0 and 1 constant."""


class EncoderAndDecoder(Calls):
    """The calls of the files of an encoder-decoder model."""

    def calls(self, two_files: bool) -> dict[str, ExampleCall]:
        """The calls of the encoder, and of two decoders, for the first and for following tokens, or of one decoder."""
        modalities = self.model.input_modalities or ()
        if "image" in modalities and self.model.main_input_name == "input_ids":
            raise self.refused("has an encoder for both texts and images")
        cache = self._cache_after_first_tokens()
        encoder = self.call(
            {"encode": self._encoder_inputs}, model=self.model.get_encoder(), axes=_ENCODER
        )
        decoders = self._two_decoders(cache) if two_files else self._merged_decoder(cache)
        return {"encoder_model": encoder, **decoders}

    @cached_property
    def _encoder_inputs(self) -> dict[str, Any]:
        """Example arguments of the encoder."""
        encoder, main = self.model.get_encoder(), self.model.main_input_name
        sizes = [self.sizes["batch_size"], self.sizes["encoder_sequence_length"]]
        inputs = self.inputs({"input_ids": sizes} if main == "input_ids" else None, sizes[0])
        parameters = named_parameters(encoder)
        names = [name for name in (main, "attention_mask") if name in parameters]
        return {name: inputs[name] for name in names if name in inputs}

    @cached_property
    def _encoded(self) -> Any:
        """The result of the encoder."""
        encoder = self.model.get_encoder()
        returned = run(encoder, self._encoder_inputs)
        if getattr(returned, "last_hidden_state", None) is None:
            named = f"{type(encoder).__name__} of {type(self.model).__name__}"
            raise InputError(f"the encoder {named} has no last_hidden_state")
        return returned

    @property
    def _mask(self) -> dict[str, Any]:
        """The mask of the encoder states: a mask in the encoder's result, if it shortens its input."""
        mask = getattr(self._encoded, "attention_mask", self._encoder_inputs.get("attention_mask"))
        return {} if mask is None else {"encoder_attention_mask": mask}

    @cached_property
    def _ids(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first tokens of the decoder, and the following tokens."""
        split = self.sizes["past_sequence_length"]
        shape = [self.sizes["batch_size"], split + self.sizes["sequence_length"]]
        ids = self.inputs({"decoder_input_ids": shape})["decoder_input_ids"]
        return ids[:, :split], ids[:, split:]

    @property
    def _first(self) -> dict[str, Any]:
        """The arguments of a decoder for the first tokens, under the names of the file."""
        return {
            "input_ids": self._ids[0],
            **self._mask,
            "encoder_hidden_states": self._encoded.last_hidden_state,
        }

    def _cache_after_first_tokens(self) -> Any:
        """The cache after the first tokens."""
        cache = empty_cache(self.model)
        try:
            run(self.model, {**self._own_names(self._first), self.cache: cache})
        except InputError:
            raise
        except Exception as error:  # from a model that requires other states
            raise self.refused(
                f"cannot be called with the states of its encoder ({described(error)})", ""
            ) from error
        if not cache.cross_attention_cache.get_seq_length():
            raise self.without_a_cache()
        return cache

    def _two_decoders(self, cache: Any) -> dict[str, ExampleCall]:
        """A decoder without a cache as input for the first tokens, and one with a cache."""
        following = {"input_ids": self._ids[1], **self._mask, self.cache: cache}
        first = self.call({"prefill": self._first}, adapt=self._begin, axes=_FIRST_TOKENS)
        second = self.call({"decode": following}, adapt=self._continue, axes=_NEXT_TOKENS)
        return {"decoder_model": first, "decoder_with_past_model": second}

    def _merged_decoder(self, cache: Any) -> dict[str, ExampleCall]:
        """One decoder for all tokens, without a branch: it computes the keys and values that a cache lacks."""
        length = self._encoded.last_hidden_state.shape[1]
        if length < _SHORTEST:
            raise InputError(
                f"the example of a merged decoder needs an encoder_sequence_length of {_SHORTEST} or more"
            )
        empty, partial = copy.copy(cache), copy.copy(cache)
        empty.self_attention_cache = emptied(cache.self_attention_cache)
        empty.cross_attention_cache = emptied(cache.cross_attention_cache)
        partial.cross_attention_cache = emptied(cache.cross_attention_cache, length // 2)
        following = {**self._first, "input_ids": self._ids[1]}
        runs = {
            "prefill": {**self._first, self.cache: empty},
            "decode": {**following, self.cache: cache},
        }
        self._check_merged(runs)
        # In the exported call, no size is that of an empty or a full cache: torch.export would make
        # it a constant.
        example = {**following, self.cache: partial}
        call = self.call(runs, adapt=self._complete, axes=_ANY_TOKENS, example=example)
        return {"decoder_model_merged": call}

    def _check_merged(self, runs: Mapping[str, dict[str, Any]]) -> None:
        """Compare the merged decoder with the model itself, with an empty and with a full cache."""
        own = [self._own_names(self._first), self._own_names(runs["decode"])]
        expected = [run(self.model, copy.deepcopy(kwargs)).logits for kwargs in own]
        try:
            with adapted(self.model, self._complete, runs["prefill"]):
                logits = [
                    run(self.model, copy.deepcopy(kwargs))["logits"] for kwargs in runs.values()
                ]
            failure = "" if all(map(is_same, logits, expected)) else "the logits differ"
        except Exception as error:  # from a model that does not support such a cache
            failure = described(error)
        if failure:
            problem = "does not compute the keys and values of an encoder from a part of its states"
            raise self.refused(f"{problem} ({failure})", ": export its decoder as two files")

    def _own_names(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Rename the arguments of a decoder's file as in the encoder-decoder model.

        The states are passed as a result of the encoder, in the class that it returns: some models
        take the mask of the states from there.
        """
        names = {"input_ids": "decoder_input_ids", "encoder_attention_mask": "attention_mask"}
        own = {names.get(name, name): value for name, value in arguments.items()}
        states = {"last_hidden_state": own.pop("encoder_hidden_states")}
        if "attention_mask" in own and self._mask_in_result:
            states["attention_mask"] = own["attention_mask"]
        own["encoder_outputs"] = type(self._encoded)(**states)
        return own

    @property
    def _mask_in_result(self) -> bool:
        """Whether the result of the encoder may contain a mask."""
        return "attention_mask" in inspect.signature(type(self._encoded)).parameters

    def _begin(self, forward: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Compute the first tokens, without a cache."""
        returned = forward(**self._own_names(arguments))
        return {"logits": returned.logits, self.cache: returned[self.cache]}

    def _continue(self, forward: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Compute following tokens, with the keys and values of the encoder in the cache.

        The model still requires the states of the encoder, but uses only their sizes.
        """
        keys = arguments[self.cache].cross_attention_cache.layers[0].keys
        hidden = self._encoded.last_hidden_state
        unused = hidden.new_zeros(
            keys.shape[0], keys.shape[2], hidden.shape[-1], device=keys.device
        )
        returned = forward(**self._own_names({**arguments, "encoder_hidden_states": unused}))
        own_cache = returned[self.cache].self_attention_cache
        return {"logits": returned.logits, f"{self.cache}.self_attention_cache": own_cache}

    def _complete(self, forward: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Compute any tokens, and the keys and values of encoder states that the cache lacks.

        If the cache contains all states, the last one is computed again: models reshape the new
        keys, which fails without any.
        """
        import torch

        cache, hidden = arguments[self.cache], arguments["encoder_hidden_states"]
        layers = cache.cross_attention_cache.layers
        cached, length = layers[0].keys.shape[2], hidden.shape[1]
        # One state less if all are in the cache.
        kept = cached - cached // length
        check: Callable[[bool], None] = torch._check  # torch has typed it since 2.14
        # torch.export does not derive these bounds of a quotient.
        for bound in (kept >= 0, kept <= cached, kept <= length):
            check(bound)
        for layer in layers:
            layer.keys, layer.values = layer.keys[:, :, :kept], layer.values[:, :, :kept]
        # With an updated cache, the model would not compute new keys and values.
        cache.is_updated = dict.fromkeys(range(len(layers)), False)
        arguments["encoder_hidden_states"] = hidden[:, kept:]
        # A model's default is a mask of the passed states; the cache contains others.
        if self._mask_in_result:
            every = torch.ones(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
            arguments.setdefault("encoder_attention_mask", every)
        returned = forward(**self._own_names(arguments))
        return {"logits": returned.logits, self.cache: returned[self.cache]}
