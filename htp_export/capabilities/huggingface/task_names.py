"""Names of inputs, outputs and dimensions by task, as optimum has them in the files that it writes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Axes", "input_axes", "output_axes", "wanted_outputs"]

Axes = dict[int, str]

_BATCH: Axes = {0: "batch_size"}
_TOKENS: Axes = {0: "batch_size", 1: "sequence_length"}
_IMAGE: Axes = {0: "batch_size", 1: "num_channels", 2: "height", 3: "width"}
_QUERIES: Axes = {0: "batch_size", 1: "num_queries"}
_PAIRS: dict[str, Axes] = {
    "logits_per_image": {0: "image_batch_size", 1: "text_batch_size"},
    "logits_per_text": {0: "text_batch_size", 1: "image_batch_size"},
    "text_embeds": {0: "text_batch_size"},
    "image_embeds": {0: "image_batch_size"},
}
_OUTPUTS: dict[str, dict[str, Axes]] = {
    "audio-classification": {"logits": _BATCH},
    "automatic-speech-recognition": {"logits": _TOKENS},
    "depth-estimation": {"predicted_depth": {0: "batch_size", 1: "height", 2: "width"}},
    "document-question-answering": {"logits": _TOKENS},
    "feature-extraction": {"last_hidden_state": _TOKENS, **_PAIRS},
    "fill-mask": {"logits": _TOKENS},
    "image-classification": {"logits": _BATCH},
    "image-feature-extraction": {"last_hidden_state": _TOKENS, "pooler_output": _BATCH},
    "image-segmentation": {
        "logits": {0: "batch_size", 1: "num_queries"},
        "pred_boxes": _QUERIES,
        "pred_masks": {0: "batch_size", 1: "num_queries", 2: "height", 3: "width"},
        "class_queries_logits": _QUERIES,
        "masks_queries_logits": {0: "batch_size", 1: "num_queries", 2: "height", 3: "width"},
    },
    "image-text-to-text": {"logits": _TOKENS},
    "object-detection": {"logits": _QUERIES, "pred_boxes": _QUERIES},
    "question-answering": {"start_logits": _TOKENS, "end_logits": _TOKENS},
    "semantic-segmentation": {"logits": {0: "batch_size", 1: "num_labels", 2: "height", 3: "width"}},
    "text-classification": {"logits": _BATCH},
    "text-generation": {"logits": _TOKENS},
    "text2text-generation": {"logits": {0: "batch_size", 1: "decoder_sequence_length"}},
    "token-classification": {"logits": _TOKENS},
    "visual-question-answering": {"logits": _TOKENS},
    "zero-shot-classification": {"logits": _BATCH},
    "zero-shot-image-classification": _PAIRS,
    "zero-shot-object-detection": {"logits": _QUERIES, "pred_boxes": _QUERIES, **_PAIRS},
}


def wanted_outputs(task: str, names: Iterable[str]) -> list[str]:
    """Which of a model's outputs a file for a task has: optimum's, and all where it knows none of them.

    Examples:
        >>> wanted_outputs("feature-extraction", ["last_hidden_state", "pooler_output"])
        ['last_hidden_state']
        >>> wanted_outputs("mask-generation", ["iou_scores", "pred_masks"])
        ['iou_scores', 'pred_masks']
    """
    names = list(names)
    return [name for name in names if name in _OUTPUTS.get(task, {})] or names


def input_axes(task: str, name: str, tensor: torch.Tensor) -> Axes:
    """Dimension → name, of an input that is in no cache.

    Examples:
        >>> import torch
        >>> input_axes("zero-shot-image-classification", "input_ids", torch.ones(2, 5, dtype=torch.int64))
        {0: 'text_batch_size', 1: 'sequence_length'}
    """
    if not tensor.dim():
        return {}
    if name.startswith("pixel"):
        axes = _IMAGE if tensor.dim() == 4 and not name.endswith("mask") else _BATCH
    elif tensor.dim() >= 2 and (not tensor.is_floating_point() or name == "input_values"):
        axes = _TOKENS
    else:
        axes = _BATCH
    if set(_OUTPUTS.get(task, {})) >= set(_PAIRS) and task != "feature-extraction":
        kind = "image" if name.startswith("pixel") else "text"
        axes = {**axes, 0: f"{kind}_batch_size"}
    return {place: axis for place, axis in axes.items() if place < tensor.dim()}


def output_axes(task: str, name: str) -> Axes:
    """Dimension → name, of an output that is in no cache.

    Examples:
        >>> output_axes("fill-mask", "logits")
        {0: 'batch_size', 1: 'sequence_length'}
    """
    return _OUTPUTS.get(task, {}).get(name, _BATCH)
