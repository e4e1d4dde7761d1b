"""Tasks: which there are, which classes of transformers do them, and which one a model is for."""

from __future__ import annotations

import inspect
from typing import Any

from htp_export.capabilities.huggingface.configs import nearest
from htp_export.errors import ModelSourceError

__all__ = ["AUTO", "class_for_task", "generates", "split_task", "task_hint", "task_of"]

AUTO = "auto"
_WITH_PAST = "-with-past"
_GENERATING = {
    "text-generation": "AutoModelForCausalLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
    "automatic-speech-recognition": "AutoModelForSpeechSeq2Seq",
}
_CACHING = {*_GENERATING.values(), "AutoModelForImageTextToText"}
"""Classes whose models can be exported with a cache; those above are, if no task is given."""

_MORE_TASKS = {
    # Names in wide use that transformers' pipelines no longer have, or never had.
    "summarization": ("AutoModelForSeq2SeqLM",),
    "text2text-generation": ("AutoModelForSeq2SeqLM",),
    "translation": ("AutoModelForSeq2SeqLM",),
    "semantic-segmentation": ("AutoModelForSemanticSegmentation",),
    "question-answering": ("AutoModelForQuestionAnswering",),
    "visual-question-answering": ("AutoModelForVisualQuestionAnswering",),
}


def split_task(task: str | None) -> tuple[str | None, bool]:
    """A task without its ``-with-past``, and whether it had one.

    Examples:
        >>> split_task("text-generation-with-past"), split_task("fill-mask")
        (('text-generation', True), ('fill-mask', False))
    """
    return (task.removesuffix(_WITH_PAST), task.endswith(_WITH_PAST)) if task is not None else (None, False)


def _tasks() -> dict[str, tuple[str, ...]]:
    """Task → names of the Auto classes that can make a model for it, best first; also with ``-with-past``."""
    from transformers.pipelines import SUPPORTED_TASKS

    entries: dict[str, Any] = SUPPORTED_TASKS
    known = {**_MORE_TASKS, **{name: tuple(auto.__name__ for auto in entry["pt"]) for name, entry in entries.items()}}
    return known | {task + _WITH_PAST: names for task, names in known.items() if set(names) & _CACHING}


def class_for_task(source: str, config: Any, task: str) -> Any:
    """The Auto class that makes a model for a task; the source is the name of the model, for messages.

    Raises:
        ModelSourceError: If there is no such task, or the model cannot do it.
    """
    import transformers

    known = _tasks()
    if split_task(task)[0] not in known:
        hint = nearest(task, known, "tasks") or task_hint(config)
        raise ModelSourceError(source, f"unknown task {task!r}{hint}")
    for name in known.get(task, ()):
        if _makes(name, config):
            return getattr(transformers, name)
    raise ModelSourceError(source, f"a {config.model_type!r} model cannot do {task!r}" + task_hint(config))


def _makes(auto_name: str, config: Any) -> bool:
    """Whether an Auto class has a model for a config."""
    import transformers

    auto = getattr(transformers, auto_name, None)
    in_code = auto_name in (getattr(config, "auto_map", None) or {})
    return in_code or (auto is not None and type(config) in auto._model_mapping)


def task_hint(config: Any) -> str:
    """The tasks that a model can do, as the end of a message."""
    possible = sorted(task for task, names in _tasks().items() if any(_makes(name, config) for name in names))
    return f"; its tasks: {', '.join(possible)}" if possible else "; it has no task that htp-export knows"


def generates(config: Any) -> bool:
    """Whether the class that a config names under ``architectures`` generates tokens, with a cache."""
    import transformers

    classes = [getattr(transformers, name, None) for name in config.architectures or ()]
    return any(model_class is not None and _generating_task(model_class) is not None for model_class in classes)


def task_of(model: Any) -> str:
    """The task that a model is for, guessed from its class; with ``-with-past`` if its config uses a cache.

    Examples:
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> task_of(BertForMaskedLM(BertConfig(num_hidden_layers=1, hidden_size=12)))
        'fill-mask'
    """
    generating = _generating_task(type(model))
    if generating is not None:
        decoder = model.config.get_text_config(decoder=True)
        return generating + (_WITH_PAST if getattr(decoder, "use_cache", False) else "")
    able = (task for task, names in _tasks().items() if any(_has_class(name, type(model)) for name in names))
    return next(able, "feature-extraction")


def _generating_task(model_class: Any) -> str | None:
    if "past_key_values" not in inspect.signature(model_class.forward).parameters or not model_class.can_generate():
        return None
    return next((task for task, auto in _GENERATING.items() if _has_class(auto, model_class)), None)


def _has_class(auto_name: str, model_class: Any) -> bool:
    """Whether an Auto class makes models of a class."""
    import transformers

    auto = getattr(transformers, auto_name, None)
    listed = [] if auto is None else auto._model_mapping._model_mapping.values()
    return any(model_class.__name__ in ((names,) if isinstance(names, str) else names) for names in listed)
