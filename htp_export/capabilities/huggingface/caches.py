"""Key/value caches as arguments of a call, what ``transformers.exporters`` does for them, and padding on the right.

ONNX Runtime GenAI pads the first tokens on the right, masks the padding, and keeps it in the cache:
the next token of a short text lies behind it. Positions that are computed from the mask are right
then, and windows that count tokens.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import logging
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from htp_export.capabilities.huggingface.configs import find
from htp_export.errors import InputError
from htp_export.process.restoring import Changes, restored, set_item

if TYPE_CHECKING:
    import torch


_LEAF = re.compile(r"\w+\.(?:(self|cross)_attention_cache\.)?layers\.(\d+)\.(\w+)")
_SINGULAR = {"keys": "key", "values": "value"}
_SIDES = {None: "", "self": "decoder.", "cross": "encoder."}


def _has_exporters() -> bool:
    return importlib.util.find_spec("transformers.exporters") is not None


def register_caches(model: Any) -> None:
    """Register the caches of transformers as containers of tensors, as its own exporters do."""
    if not _has_exporters():
        import transformers

        problem = (
            "inputs and names by task need transformers.exporters, which transformers 5.23 has"
        )
        raise InputError(
            f"{problem}; installed is {transformers.__version__}: pip install -U transformers"
        )
    from transformers.exporters.exporter_dynamo import register_cache_pytrees_for_model

    register_cache_pytrees_for_model(model)


def translations() -> dict[Any, Any]:
    """What transformers' exporters, if it has some, write for operators that torch has no ONNX for, as of experts."""
    if not _has_exporters():
        return {}
    from transformers.exporters import exporter_onnx

    return dict(getattr(exporter_onnx, "_ONNX_TRANSLATION_TABLE", {}))


@contextlib.contextmanager
def tracing_as_transformers_does(model: Any) -> Iterator[None]:
    """What transformers' exporters, if it has some, replace in torch and in models to trace them, for a block."""
    if not _has_exporters():
        yield
        return
    from transformers.exporters import exporter_onnx  # noqa: F401 # registers its patches
    from transformers.exporters.exporter_dynamo import reset_model_state
    from transformers.exporters.utils import apply_patches

    with apply_patches("onnx"), apply_patches("dynamo"), reset_model_state(model):
        yield


def cache_argument(model: Any) -> str | None:
    """The argument and the result of a model, or of its class, that are a cache: ``cache`` since transformers 5.24."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in ("past_key_values", "cache") if name in taken), None)


def empty_cache(model: Any) -> Any:
    """A cache for a model that nothing is in yet, whose layers keep every token; only keys and values can be in it.

    A layer with a sliding window drops old tokens, and the counters with which it does so are
    constants in a graph. The mask applies the window, too: all tokens can be kept.
    """
    from transformers import cache_utils

    known = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
    of_keys = [getattr(cache_utils, name, None) for name in known]
    growing: Any = cache_utils.DynamicLayer

    def cache() -> Any:
        made = cache_utils.DynamicCache(config=model.config.get_text_config(decoder=True))
        other = sorted(
            {type(layer).__name__ for layer in made.layers if type(layer) not in of_keys}
        )
        if other:
            problem = f"has layers with a {' and a '.join(other)}, which hold states besides keys and values"
            raise InputError(
                f"the cache of {type(model).__name__} {problem}; choose a task without -with-past"
            )
        sliding = cache_utils.DynamicSlidingWindowLayer
        made.layers = [growing() if type(layer) is sliding else layer for layer in made.layers]
        return made

    return (
        cache_utils.EncoderDecoderCache(cache(), cache())
        if model.config.is_encoder_decoder
        else cache()
    )


def emptied(cache: Any, length: int = 0) -> Any:
    """A cache of the same layers that holds the first tokens alone, or none; the cache itself stays as it is."""
    from transformers.cache_utils import DynamicLayer

    made = copy.deepcopy(cache)
    for layer in made.layers:
        if type(layer) is DynamicLayer and layer.keys is not None and layer.values is not None:
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
    return made


def leaf_name(path: str, prefix: str) -> str:
    """The name that optimum gives a tensor at transformers' path in a cache; other paths stay as they are.

    Examples:
        >>> leaf_name("past_key_values.layers.0.keys", "present")
        'present.0.key'
        >>> leaf_name("past_key_values.cross_attention_cache.layers.3.values", "past_key_values")
        'past_key_values.3.encoder.value'
        >>> leaf_name("logits", "present")
        'logits'
    """
    match = _LEAF.fullmatch(path)
    if match is None:
        return path
    side, layer, attribute = match.groups()
    return f"{prefix}.{layer}.{_SIDES[side]}{_SINGULAR.get(attribute, attribute)}"


_PADDING = 3  # tokens: enough to shift every position, fewer than a prompt has
_WINDOWS = ("sliding_window", "window_size")  # None in the configs of models that apply none

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def windows_of_tokens() -> Iterator[list[int]]:
    """Let sliding windows of transformers count tokens that are not masked rather than places, for a ``with`` block.

    With padding on the left, or without padding, this is the same. The list gets the windows that
    were applied.
    """
    from transformers import masking_utils

    overlay, padding = masking_utils.sliding_window_overlay, masking_utils.padding_mask_function
    windows: list[int] = []
    # that of the tokens, if there is one, of the mask that is being made
    masks: list[torch.Tensor] = []

    def overlay_of_tokens(window: int) -> Callable[..., Any]:
        masks.clear()
        windows.append(window)
        places: Callable[..., Any] = overlay(window)

        def inner(batch: Any, head: Any, query: Any, key: Any) -> Any:
            if not masks:
                return places(batch, head, query, key)
            tokens = masks[-1].long().cumsum(-1)
            return places(batch, head, tokens[batch, query], tokens[batch, key])

        return inner

    def padding_that_is_noted(mask: torch.Tensor) -> Callable[..., Any]:
        masks[:] = [mask]
        made: Callable[..., Any] = padding(mask)
        return made

    def make(changes: Changes) -> None:
        set_item(changes, vars(masking_utils), "sliding_window_overlay", overlay_of_tokens)
        set_item(changes, vars(masking_utils), "padding_mask_function", padding_that_is_noted)

    with restored(make):
        yield windows


def warn_of_right_padding(model: Any, prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    """Log a warning if a decoder computes something else behind padding, as with biases by distance (ALiBi).

    The decoder is run four times. A window of its own, which transformers' masks do not apply
    (GPT-Neo), is longer than the texts of these runs: it is known by the config alone.
    """
    import torch

    with windows_of_tokens() as windows:
        alone, padded = (
            _logits_behind(model, prefill, decode, padding) for padding in (0, _PADDING)
        )
    allowed = torch.finfo(alone.dtype).eps ** 0.5 * float(alone.abs().max())
    has_own_window = not windows and find(model.config, *_WINDOWS) is not None
    if has_own_window or not torch.allclose(alone, padded, rtol=0, atol=allowed):
        _log.warning(
            "%s counts the padding between tokens: in ONNX Runtime GenAI, which pads on the right, texts of different "
            "length in one batch get wrong tokens. Run one text at a time, or texts of one length",
            type(model).__name__,
        )


def _logits_behind(
    model: Any, prefill: dict[str, Any], decode: dict[str, Any], padding: int
) -> torch.Tensor:
    """The logits of a token behind others and masked padding."""
    import torch

    from htp_export.exporter.capture.model_state import unchanged

    ids, following = prefill["input_ids"], decode["input_ids"]
    first = torch.cat([ids, ids[:, :1].expand(-1, padding)], 1)
    mask = torch.ones_like(first)
    mask[:, ids.shape[1] :] = 0
    name = str(cache_argument(model))
    cache = emptied(prefill[name])
    for new in (first, following[:, :1]):
        given = {"input_ids": new, "attention_mask": mask, name: cache}
        given["position_ids"] = (mask.cumsum(-1) - 1)[:, -new.shape[1] :]
        with unchanged(model, ()), torch.no_grad():
            returned = model(**{key: given[key] for key in prefill})
        cache, mask = returned[name], torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    logits: torch.Tensor = returned["logits"][:, -1]
    return logits
