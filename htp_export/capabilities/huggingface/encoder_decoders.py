"""The files of a model with an encoder and a decoder: the encoder, and its decoder as two files or as one."""

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
# states of the encoder: torch.export takes 0 and 1 for constants, and half of them are in the cache
_SHORTEST = 4


class EncoderAndDecoder(Calls):
    """The calls of the files of a model with an encoder and a decoder."""

    def calls(self, two_files: bool) -> dict[str, ExampleCall]:
        """The encoder, and a decoder for the first tokens and one for those after them, or one for both."""
        if (
            "image" in (self.model.input_modalities or ())
            and self.model.main_input_name == "input_ids"
        ):
            raise self.refused("reads texts and images in its encoder")
        cache = self._cache_of_the_first()
        encoder = self.call(
            {"encode": self._encoder_inputs}, model=self.model.get_encoder(), axes=_ENCODER
        )
        return {
            "encoder_model": encoder,
            **(self._two_decoders(cache) if two_files else self._merged_decoder(cache)),
        }

    @cached_property
    def _encoder_inputs(self) -> dict[str, Any]:
        encoder, main = self.model.get_encoder(), self.model.main_input_name
        sizes = [self.sizes["batch_size"], self.sizes["encoder_sequence_length"]]
        inputs = self.inputs({"input_ids": sizes} if main == "input_ids" else None, sizes[0])
        taken = named_parameters(encoder)
        return {
            name: inputs[name]
            for name in (main, "attention_mask")
            if name in inputs and name in taken
        }

    @cached_property
    def _encoded(self) -> Any:
        """What the encoder returns."""
        encoder = self.model.get_encoder()
        returned = run(encoder, self._encoder_inputs)
        if getattr(returned, "last_hidden_state", None) is None:
            named = f"{type(encoder).__name__} of {type(self.model).__name__}"
            raise InputError(f"the encoder {named} has no last_hidden_state")
        return returned

    @property
    def _mask(self) -> dict[str, Any]:
        """The mask of the states: the encoder's own where it shortens what it reads."""
        mask = getattr(self._encoded, "attention_mask", self._encoder_inputs.get("attention_mask"))
        return {} if mask is None else {"encoder_attention_mask": mask}

    @cached_property
    def _ids(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first tokens of the decoder, and those after them."""
        split = self.sizes["past_sequence_length"]
        shape = [self.sizes["batch_size"], split + self.sizes["sequence_length"]]
        ids = self.inputs({"decoder_input_ids": shape})["decoder_input_ids"]
        return ids[:, :split], ids[:, split:]

    @property
    def _first(self) -> dict[str, Any]:
        """The arguments of a decoder's file for the first tokens."""
        return {
            "input_ids": self._ids[0],
            **self._mask,
            "encoder_hidden_states": self._encoded.last_hidden_state,
        }

    def _cache_of_the_first(self) -> Any:
        """The cache after the first tokens."""
        cache = empty_cache(self.model)
        try:
            run(self.model, {**self._own_names(self._first), self.cache: cache})
        except InputError:
            raise
        except Exception as error:  # whatever a model raises that wants other states
            raise self.refused(
                f"cannot be called with the states of its encoder ({described(error)})", ""
            ) from error
        if not cache.cross_attention_cache.get_seq_length():
            raise self.without_a_cache()
        return cache

    def _two_decoders(self, cache: Any) -> dict[str, ExampleCall]:
        following = {"input_ids": self._ids[1], **self._mask, self.cache: cache}
        return {
            "decoder_model": self.call(
                {"prefill": self._first}, adapt=self._begin, axes=_FIRST_TOKENS
            ),
            "decoder_with_past_model": self.call(
                {"decode": following}, adapt=self._go_on, axes=_NEXT_TOKENS
            ),
        }

    def _merged_decoder(self, cache: Any) -> dict[str, ExampleCall]:
        """One decoder for all tokens, without a branch: of both caches, it computes what is not in them yet."""
        length = self._encoded.last_hidden_state.shape[1]
        if length < _SHORTEST:
            raise InputError(
                f"the example of a merged decoder needs an encoder_sequence_length of {_SHORTEST} or more"
            )
        nothing, some = copy.copy(cache), copy.copy(cache)
        nothing.self_attention_cache = emptied(cache.self_attention_cache)
        nothing.cross_attention_cache = emptied(cache.cross_attention_cache)
        some.cross_attention_cache = emptied(cache.cross_attention_cache, length // 2)
        following = {**self._first, "input_ids": self._ids[1]}
        runs = {
            "prefill": {**self._first, self.cache: nothing},
            "decode": {**following, self.cache: cache},
        }
        self._check_merged(runs)
        example = {**following, self.cache: some}
        call = self.call(runs, adapt=self._all_missing, axes=_ANY_TOKENS, example=example)
        return {"decoder_model_merged": call}

    def _check_merged(self, runs: Mapping[str, dict[str, Any]]) -> None:
        """Compare one decoder with the model itself, without a cache and with one."""
        own = [self._own_names(self._first), self._own_names(runs["decode"])]
        wanted = [run(self.model, copy.deepcopy(kwargs)).logits for kwargs in own]
        try:
            with adapted(self.model, self._all_missing, runs["prefill"]):
                logits = [
                    run(self.model, copy.deepcopy(kwargs))["logits"] for kwargs in runs.values()
                ]
            why = "" if all(map(is_same, logits, wanted)) else "the logits differ"
        except Exception as error:  # whatever a model raises that does not know such a cache
            why = described(error)
        if why:
            problem = "does not compute the keys and values of an encoder from a part of its states"
            raise self.refused(f"{problem} ({why})", ": export its decoder as two files")

    def _own_names(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a decoder's file under the names that an encoder-decoder model has for them.

        Some models read the mask of an encoder's states from its result: it has the class that
        their encoder returns.
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
        return "attention_mask" in inspect.signature(type(self._encoded)).parameters

    def _begin(self, forward: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """The first tokens: nothing is in a cache."""
        returned = forward(**self._own_names(arguments))
        return {"logits": returned.logits, self.cache: returned[self.cache]}

    def _go_on(self, forward: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """The tokens after the first ones: what the encoder found is in the cache.

        The model asks for the states of the encoder again, and reads their sizes alone.
        """
        keys = arguments[self.cache].cross_attention_cache.layers[0].keys
        hidden = self._encoded.last_hidden_state
        unread = hidden.new_zeros(
            keys.shape[0], keys.shape[2], hidden.shape[-1], device=keys.device
        )
        returned = forward(**self._own_names({**arguments, "encoder_hidden_states": unread}))
        grown = returned[self.cache].self_attention_cache
        return {"logits": returned.logits, f"{self.cache}.self_attention_cache": grown}

    def _all_missing(self, forward: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Any tokens: the model computes what the cache does not have of the encoder's states.

        If the cache has all of them, the last one is computed again: models reshape their keys, and
        no keys at all have no shape to reshape.
        """
        import torch

        cache, hidden = arguments[self.cache], arguments["encoder_hidden_states"]
        layers = cache.cross_attention_cache.layers
        known, length = layers[0].keys.shape[2], hidden.shape[1]
        kept = known - known // length
        check: Callable[[bool], None] = torch._check  # torch has typed it since 2.14
        for bound in (kept >= 0, kept <= known, kept <= length):
            check(bound)  # torch.export does not know it of a quotient
        for layer in layers:
            layer.keys, layer.values = layer.keys[:, :, :kept], layer.values[:, :, :kept]
        # otherwise, the model computes nothing
        cache.is_updated = dict.fromkeys(range(len(layers)), False)
        arguments["encoder_hidden_states"] = hidden[:, kept:]
        # without one, a model makes a mask of the states that it is given, and not of all
        if self._mask_in_result:
            every = torch.ones(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
            arguments.setdefault("encoder_attention_mask", every)
        returned = forward(**self._own_names(arguments))
        return {"logits": returned.logits, self.cache: returned[self.cache]}
