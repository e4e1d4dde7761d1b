"""Sliding windows of transformers that count tokens rather than places in the cache."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from htp_export.process.restoring import Changes, restored

if TYPE_CHECKING:
    import torch

__all__ = ["windows_of_tokens"]


@contextlib.contextmanager
def windows_of_tokens() -> Iterator[None]:
    """Let sliding windows of transformers count the tokens that are not masked, as long as a ``with`` block runs.

    With padding on the left, or without padding, this is the same.
    """
    from transformers import masking_utils

    overlay, padding = masking_utils.sliding_window_overlay, masking_utils.padding_mask_function
    masks: list[torch.Tensor] = []  # that of the tokens, if there is one, of the mask that is being made

    def overlay_of_tokens(window: int) -> Callable[..., Any]:
        masks.clear()
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
        for original, replacement in ((overlay, overlay_of_tokens), (padding, padding_that_is_noted)):
            changes.will_undo(functools.partial(setattr, masking_utils, original.__name__, original))
            setattr(masking_utils, original.__name__, replacement)

    with restored(make):
        yield
