"""Key-value caches as arguments of a call, the patches of ``transformers.exporters``, and padding on the right.

ONNX Runtime GenAI pads the first tokens on the right, masks the padding, and keeps it in the cache:
the next token of a short text follows the padding. Positions that are computed from the mask are
still right, and so are windows that count tokens.
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
from htp_export.extras import is_installed, required
from htp_export.process.restoring import Changes, restored, set_item

if TYPE_CHECKING:
    import torch


_LEAF = re.compile(r"\w+\.(?:(self|cross)_attention_cache\.)?layers\.(\d+)\.(\w+)")
_SINGULAR = {"keys": "key", "values": "value"}
_SIDES = {None: "", "self": "decoder.", "cross": "encoder."}


def _has_exporters() -> bool:
    """Whether the installed transformers has exporters."""
    if not is_installed("transformers"):
        return False
    return importlib.util.find_spec("transformers.exporters") is not None


def register_caches(model: Any) -> None:
    """Register the caches of transformers with torch's pytree, as its own exporters do."""
    if not _has_exporters():
        transformers = required("transformers")

        problem = (
            "inputs and names by task need transformers.exporters, which transformers 5.23 has"
        )
        raise InputError(
            f"{problem}; installed is {transformers.__version__}: pip install -U transformers"
        )
    from transformers.exporters.exporter_dynamo import register_cache_pytrees_for_model

    register_cache_pytrees_for_model(model)


def translations() -> dict[Any, Any]:
    """ONNX translations of transformers' exporters for operators that torch cannot convert; empty without exporters."""
    if not _has_exporters():
        return {}
    from transformers.exporters import exporter_onnx

    return dict(getattr(exporter_onnx, "_ONNX_TRANSLATION_TABLE", {}))


@contextlib.contextmanager
def tracing_as_transformers_does(model: Any) -> Iterator[None]:
    """Inside the block, apply the patches of transformers' exporters for a trace; none without exporters."""
    if not _has_exporters():
        yield
        return
    from transformers.exporters import exporter_onnx  # noqa: F401 # registers its patches
    from transformers.exporters.exporter_dynamo import reset_model_state
    from transformers.exporters.utils import apply_patches

    with apply_patches("onnx"), apply_patches("dynamo"), reset_model_state(model):
        yield


def cache_argument(model: Any) -> str | None:
    """The name of the cache among arguments and results of a model or its class; ``cache`` since transformers 5.24."""
    parameters = inspect.signature(model.forward).parameters
    for name in ("past_key_values", "cache"):
        if name in parameters:
            return name
    return None


def empty_cache(model: Any) -> Any:
    """An empty cache for a model, whose layers keep all tokens.

    A layer with a sliding window drops old tokens, and would use counters that are constants in a
    graph. The mask applies the window, too, so that all tokens can be kept.

    Raises:
        InputError: The cache of the model contains other states than keys and values.
    """
    if not model.config.is_encoder_decoder:
        return _dynamic_cache(model)
    from transformers.cache_utils import EncoderDecoderCache

    return EncoderDecoderCache(_dynamic_cache(model), _dynamic_cache(model))


def _dynamic_cache(model: Any) -> Any:
    """An empty cache for the attention of a decoder to one sequence."""
    from transformers import cache_utils

    names = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
    classes = [getattr(cache_utils, name, None) for name in names]
    cache: Any = cache_utils.DynamicCache(config=model.config.get_text_config(decoder=True))
    others = {type(layer).__name__ for layer in cache.layers if type(layer) not in classes}
    if others:
        problem = f"has layers with a {' and a '.join(sorted(others))}, which hold states besides keys and values"
        raise InputError(
            f"the cache of {type(model).__name__} {problem}; choose a task without -with-past"
        )
    growing: Any = cache_utils.DynamicLayer
    for number, layer in enumerate(cache.layers):
        if type(layer) is cache_utils.DynamicSlidingWindowLayer:
            cache.layers[number] = growing()
    return cache


def emptied(cache: Any, length: int = 0) -> Any:
    """A copy of a cache with the first ``length`` tokens."""
    from transformers.cache_utils import DynamicLayer

    new = copy.deepcopy(cache)
    for layer in new.layers:
        if type(layer) is DynamicLayer and layer.keys is not None and layer.values is not None:
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
    return new


def leaf_name(path: str, prefix: str) -> str:
    """Optimum's name for a tensor at transformers' path in a cache; other paths are returned unchanged.

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
    """Inside the block, sliding windows of transformers count unmasked tokens, not positions in the cache.

    Without padding, or with padding on the left, both are the same. The yielded list receives the
    sizes of the windows that were applied.
    """
    from transformers import masking_utils

    overlay, padding = masking_utils.sliding_window_overlay, masking_utils.padding_mask_function
    windows: list[int] = []
    # The mask of the tokens, if there is one, for the attention mask that is computed now.
    masks: list[torch.Tensor] = []

    def overlay_of_tokens(window: int) -> Callable[..., Any]:
        masks.clear()
        windows.append(window)
        is_in_window: Callable[..., Any] = overlay(window)

        def by_tokens(batch: Any, head: Any, query: Any, key: Any) -> Any:
            if not masks:
                return is_in_window(batch, head, query, key)
            tokens = masks[-1].long().cumsum(-1)
            return is_in_window(batch, head, tokens[batch, query], tokens[batch, key])

        return by_tokens

    def recording_padding(mask: torch.Tensor) -> Callable[..., Any]:
        masks[:] = [mask]
        function: Callable[..., Any] = padding(mask)
        return function

    def make(changes: Changes) -> None:
        set_item(changes, vars(masking_utils), "sliding_window_overlay", overlay_of_tokens)
        set_item(changes, vars(masking_utils), "padding_mask_function", recording_padding)

    with restored(make):
        yield windows


def warn_of_right_padding(model: Any, prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    """Log a warning if padding on the right changes the logits of a decoder, as with biases by distance (ALiBi).

    The decoder runs four times. A window of the model's own, which is no mask of transformers
    (GPT-Neo), is longer than these texts: only the config shows it.
    """
    import torch

    with windows_of_tokens() as windows:
        alone = _logits_after_padding(model, prefill, decode, 0)
        padded = _logits_after_padding(model, prefill, decode, _PADDING)
    tolerance = torch.finfo(alone.dtype).eps ** 0.5 * float(alone.abs().max())
    has_own_window = not windows and find(model.config, *_WINDOWS) is not None
    if has_own_window or not torch.allclose(alone, padded, rtol=0, atol=tolerance):
        _log.warning(
            "%s counts the padding between tokens: in ONNX Runtime GenAI, which pads on the right, texts of different "
            "length in one batch get wrong tokens. Run one text at a time, or texts of one length",
            type(model).__name__,
        )


def _logits_after_padding(
    model: Any, prefill: dict[str, Any], decode: dict[str, Any], padding: int
) -> torch.Tensor:
    """The logits of a token after other tokens and masked padding."""
    import torch

    from htp_export.exporter.capture.model_state import unchanged

    ids, following = prefill["input_ids"], decode["input_ids"]
    first = torch.cat([ids, ids[:, :1].expand(-1, padding)], 1)
    mask = torch.ones_like(first)
    mask[:, ids.shape[1] :] = 0
    name = str(cache_argument(model))
    cache = emptied(prefill[name])
    for new in (first, following[:, :1]):
        arguments = {"input_ids": new, "attention_mask": mask, name: cache}
        arguments["position_ids"] = (mask.cumsum(-1) - 1)[:, -new.shape[1] :]
        with unchanged(model, ()), torch.no_grad():
            returned = model(**{key: arguments[key] for key in prefill})
        cache, mask = returned[name], torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    logits: torch.Tensor = returned["logits"][:, -1]
    return logits
