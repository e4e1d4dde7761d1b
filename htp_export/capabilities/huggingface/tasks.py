"""Tasks: their classes in transformers, the task of a model, and optimum's names of dimensions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from htp_export.capabilities.huggingface.caches import cache_argument
from htp_export.capabilities.huggingface.configs import nearest
from htp_export.errors import ModelSourceError
from htp_export.extras import required

if TYPE_CHECKING:
    import torch

AUTO = "auto"
_WITH_PAST = "-with-past"
_GENERATING = {
    "text-generation": "AutoModelForCausalLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
    "automatic-speech-recognition": "AutoModelForSpeechSeq2Seq",
}
_CACHING = {*_GENERATING.values(), "AutoModelForImageTextToText"}
"""Auto classes whose models can be exported with a cache; models of `_GENERATING` are, if there is no task."""

_MORE_TASKS = {
    # Names in wide use that transformers' pipelines lack, or have dropped.
    "summarization": ("AutoModelForSeq2SeqLM",),
    "text2text-generation": ("AutoModelForSeq2SeqLM",),
    "translation": ("AutoModelForSeq2SeqLM",),
    "semantic-segmentation": ("AutoModelForSemanticSegmentation",),
    "question-answering": ("AutoModelForQuestionAnswering",),
    "visual-question-answering": ("AutoModelForVisualQuestionAnswering",),
}


def split_task(task: str | None) -> tuple[str | None, bool]:
    """Split a task into its name without ``-with-past``, and whether it had this suffix.

    Examples:
        >>> split_task("text-generation-with-past"), split_task("fill-mask")
        (('text-generation', True), ('fill-mask', False))
    """
    if task is None:
        return None, False
    return task.removesuffix(_WITH_PAST), task.endswith(_WITH_PAST)


def _tasks() -> dict[str, tuple[str, ...]]:
    """Task, also with ``-with-past`` → names of its Auto classes, best first."""
    from transformers.pipelines import SUPPORTED_TASKS

    entries: dict[str, Any] = SUPPORTED_TASKS
    tasks: dict[str, tuple[str, ...]] = dict(_MORE_TASKS)
    for task, entry in entries.items():
        tasks[task] = tuple(auto.__name__ for auto in entry["pt"])
    with_past = {}
    for task, names in tasks.items():
        if not _CACHING.isdisjoint(names):
            with_past[task + _WITH_PAST] = names
    return tasks | with_past


def class_for_task(source: str, config: Any, task: str) -> Any:
    """The Auto class for a task and a config; ``source`` is the name of the model, for messages."""
    transformers = required("transformers")

    tasks = _tasks()
    if split_task(task)[0] not in tasks:
        hint = nearest(task, tasks, "tasks") or task_hint(config)
        raise ModelSourceError(source, f"unknown task {task!r}{hint}")
    for name in tasks.get(task, ()):
        if _has_model(name, config):
            return getattr(transformers, name)
    raise ModelSourceError(
        source, f"a {config.model_type!r} model cannot do {task!r}" + task_hint(config)
    )


def _has_model(auto_name: str, config: Any) -> bool:
    """Whether an Auto class has a model for a config."""
    transformers = required("transformers")

    auto = getattr(transformers, auto_name, None)
    in_code = auto_name in (getattr(config, "auto_map", None) or {})
    return in_code or (auto is not None and type(config) in auto._model_mapping)


def task_hint(config: Any) -> str:
    """The tasks that a model can do, as the end of a message."""
    possible = []
    for task, names in _tasks().items():
        if any(_has_model(name, config) for name in names):
            possible.append(task)
    if not possible:
        return "; it has no task that htp-export supports"
    return f"; its tasks: {', '.join(sorted(possible))}"


def generates(config: Any) -> bool:
    """Whether the class that a config names under ``architectures`` generates tokens, with a cache."""
    transformers = required("transformers")

    for name in config.architectures or ():
        model_class = getattr(transformers, name, None)
        if model_class is not None and _generating_task(model_class) is not None:
            return True
    return False


def task_of(model: Any) -> str:
    """The task of a model by its class, with ``-with-past`` if its config uses a cache."""
    generating = _generating_task(type(model))
    if generating is not None:
        decoder = model.config.get_text_config(decoder=True)
        return generating + (_WITH_PAST if getattr(decoder, "use_cache", False) else "")
    for task, names in _tasks().items():
        if any(_has_class(name, type(model)) for name in names):
            return task
    return "feature-extraction"


def _generating_task(model_class: Any) -> str | None:
    """The task of a class that generates with a key-value cache; None for others."""
    # A stateful model caches other states than keys and values.
    is_stateful = getattr(model_class, "_is_stateful", False)
    if cache_argument(model_class) is None or is_stateful or not model_class.can_generate():
        return None
    for task, auto_name in _GENERATING.items():
        if _has_class(auto_name, model_class):
            return task
    return None


def _has_class(auto_name: str, model_class: Any) -> bool:
    """Whether an Auto class can select a class."""
    transformers = required("transformers")

    auto = getattr(transformers, auto_name, None)
    if auto is None:
        return False
    for names in auto._model_mapping._model_mapping.values():
        # One name, or several for one config.
        if model_class.__name__ in ((names,) if isinstance(names, str) else names):
            return True
    return False


# --- names of outputs and dimensions in optimum's files ---

Axes = dict[int, str]

_BATCH: Axes = {0: "batch_size"}
_TOKENS: Axes = {0: "batch_size", 1: "sequence_length"}
_IMAGE: Axes = {0: "batch_size", 1: "num_channels", 2: "height", 3: "width"}
_QUERIES: Axes = {0: "batch_size", 1: "num_queries"}
_MASKS: Axes = {**_QUERIES, 2: "height", 3: "width"}
_PAIRS: dict[str, Axes] = {
    "logits_per_image": {0: "image_batch_size", 1: "text_batch_size"},
    "logits_per_text": {0: "text_batch_size", 1: "image_batch_size"},
    "text_embeds": {0: "text_batch_size"},
    "image_embeds": {0: "image_batch_size"},
}
_LOGITS: dict[str, Axes] = {"logits": _BATCH}
_LOGITS_OF_TOKENS: dict[str, Axes] = {"logits": _TOKENS}
_OUTPUTS: dict[str, dict[str, Axes]] = {
    **dict.fromkeys(
        ("audio-classification", "image-classification", "text-classification"), _LOGITS
    ),
    **dict.fromkeys(
        ("automatic-speech-recognition", "document-question-answering", "fill-mask"),
        _LOGITS_OF_TOKENS,
    ),
    **dict.fromkeys(
        ("image-text-to-text", "text-generation", "token-classification"), _LOGITS_OF_TOKENS
    ),
    "depth-estimation": {"predicted_depth": {0: "batch_size", 1: "height", 2: "width"}},
    "feature-extraction": {"last_hidden_state": _TOKENS, **_PAIRS},
    "image-feature-extraction": {"last_hidden_state": _TOKENS, "pooler_output": _BATCH},
    "image-segmentation": {
        "logits": _QUERIES,
        "pred_boxes": _QUERIES,
        "pred_masks": _MASKS,
        "class_queries_logits": _QUERIES,
        "masks_queries_logits": _MASKS,
    },
    "object-detection": {"logits": _QUERIES, "pred_boxes": _QUERIES},
    "question-answering": {"start_logits": _TOKENS, "end_logits": _TOKENS},
    "semantic-segmentation": {
        "logits": {0: "batch_size", 1: "num_labels", 2: "height", 3: "width"}
    },
    "text2text-generation": {"logits": {0: "batch_size", 1: "decoder_sequence_length"}},
    "visual-question-answering": _LOGITS_OF_TOKENS,
    "zero-shot-classification": _LOGITS,
    "zero-shot-image-classification": _PAIRS,
    "zero-shot-object-detection": {"logits": _QUERIES, "pred_boxes": _QUERIES, **_PAIRS},
}


def wanted_outputs(task: str, names: Iterable[str]) -> list[str]:
    """The outputs of a model that a file for a task has: optimum's, or all if optimum has none of them."""
    names = list(names)
    return [name for name in names if name in _OUTPUTS.get(task, {})] or names


def input_axes(task: str, name: str, tensor: torch.Tensor) -> Axes:
    """Dimension → name, for an input outside of a cache.

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
    """Dimension → name, for an output outside of a cache."""
    return _OUTPUTS.get(task, {}).get(name, _BATCH)
