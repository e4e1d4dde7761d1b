"""Batches of texts of different length that are padded on the right, as in ONNX Runtime GenAI.

GenAI pads the first tokens on the right, masks the padding, and keeps it in the cache: the next token of a short text
lies behind its padding. Positions that are computed from the mask are right then, and so are sliding windows that
count tokens.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from htp_export.capabilities.huggingface.caches import emptied
from htp_export.capabilities.huggingface.configs import find
from htp_export.process.restoring import Changes, restored, set_item

if TYPE_CHECKING:
    import torch

_PADDING = 3
_WINDOWS = ("sliding_window", "window_size")  # None in the configs of models that apply none

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def windows_of_tokens() -> Iterator[list[int]]:
    """Let sliding windows of transformers count tokens that are not masked rather than places, for a ``with`` block.

    With padding on the left, or without padding, this is the same. The list gets the windows that were applied.
    """
    from transformers import masking_utils

    overlay, padding = masking_utils.sliding_window_overlay, masking_utils.padding_mask_function
    windows: list[int] = []
    masks: list[torch.Tensor] = []  # that of the tokens, if there is one, of the mask that is being made

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

    The decoder is run four times. A window of its own, which transformers' masks do not apply (GPT-Neo), is longer than
    the texts of these runs: it is known by the config alone.
    """
    import torch

    with windows_of_tokens() as windows:
        alone, padded = (_logits_behind(model, prefill, decode, padding) for padding in (0, _PADDING))
    allowed = torch.finfo(alone.dtype).eps ** 0.5 * float(alone.abs().max())
    has_own_window = not windows and find(model.config, *_WINDOWS) is not None
    if has_own_window or not torch.allclose(alone, padded, rtol=0, atol=allowed):
        _log.warning(
            "%s counts the padding between tokens: in ONNX Runtime GenAI, which pads on the right, texts of different "
            "length in one batch get wrong tokens. Run one text at a time, or texts of one length",
            type(model).__name__,
        )


def _logits_behind(model: Any, prefill: dict[str, Any], decode: dict[str, Any], padding: int) -> torch.Tensor:
    """The logits of a token behind others and masked padding."""
    import torch

    ids, following = prefill["input_ids"], decode["input_ids"]
    first = torch.cat([ids, ids[:, :1].expand(-1, padding)], 1)
    mask = torch.ones_like(first)
    mask[:, ids.shape[1] :] = 0
    cache = emptied(prefill["past_key_values"])
    for new in (first, following[:, :1]):
        given = {"input_ids": new, "attention_mask": mask, "past_key_values": cache}
        given["position_ids"] = (mask.cumsum(-1) - 1)[:, -new.shape[1] :]
        with torch.no_grad():
            returned = model(**{name: given[name] for name in prefill})
        cache, mask = returned["past_key_values"], torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    logits: torch.Tensor = returned["logits"][:, -1]
    return logits
