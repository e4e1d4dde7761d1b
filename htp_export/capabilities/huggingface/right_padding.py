"""Batches of texts of different length that are padded on the right, as in ONNX Runtime GenAI.

GenAI pads the first tokens on the right, masks the padding, and keeps it in the cache: the next token of a short text
lies behind its padding. Positions that are computed from the mask are right then, and so are sliding windows that
count tokens (`windows`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from htp_export.capabilities.huggingface.caches import emptied
from htp_export.capabilities.huggingface.example_calls import ExampleCall, run

if TYPE_CHECKING:
    import torch

__all__ = ["warn_of_right_padding"]

_PADDING = 3

_log = logging.getLogger(__name__)


def warn_of_right_padding(call: ExampleCall) -> None:
    """Log a warning if a decoder computes something else behind padding, as with biases by distance (ALiBi).

    Args:
        call: Of a decoder with a cache in one file; it is run four times.
    """
    import torch

    with call.adapted():
        alone, padded = (_logits_behind(call, padding) for padding in (0, _PADDING))
    allowed = torch.finfo(alone.dtype).eps ** 0.5 * float(alone.abs().max())
    if not torch.allclose(alone, padded, rtol=0, atol=allowed):
        _log.warning(
            "%s counts the padding between tokens: in ONNX Runtime GenAI, which pads on the right, texts of different "
            "length in one batch get wrong tokens. Run one text at a time, or texts of one length",
            type(call.model).__name__,
        )


def _logits_behind(call: ExampleCall, padding: int) -> torch.Tensor:
    """The logits of a token behind others and masked padding."""
    import torch

    ids, following = (call.runs[name]["input_ids"] for name in ("prefill", "decode"))
    first = torch.cat([ids, ids[:, :1].expand(-1, padding)], 1)
    mask = torch.ones_like(first)
    mask[:, ids.shape[1] :] = 0
    cache = emptied(call.runs["prefill"]["past_key_values"])
    for new in (first, following[:, :1]):
        given = {"input_ids": new, "attention_mask": mask, "past_key_values": cache}
        given["position_ids"] = (mask.cumsum(-1) - 1)[:, -new.shape[1] :]
        returned = run(call.model, {name: given[name] for name in call.kwargs})
        cache, mask = returned["past_key_values"], torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    logits: torch.Tensor = returned["logits"][:, -1]
    return logits
