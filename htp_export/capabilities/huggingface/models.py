"""A transformers model from what a user names: hub id, local folder, or model type."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from htp_export.capabilities.huggingface.configs import use_cache
from htp_export.capabilities.huggingface.packed.checkpoints import is_gguf, is_packed, read_packed
from htp_export.capabilities.huggingface.sources import Source
from htp_export.capabilities.huggingface.streaming import (
    check_loaded,
    find_checkpoint,
    weights_in_files,
)
from htp_export.capabilities.huggingface.tasks import (
    AUTO,
    class_for_task,
    generates,
    split_task,
    task_hint,
)
from htp_export.errors import ModelSourceError, described
from htp_export.files.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch
    from torch import nn

_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

_log = logging.getLogger(__name__)


def load_model(
    source: str,
    *,
    task: str | None = None,
    random_weights: bool = False,
    overrides: Mapping[str, object] | None = None,
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    seed: int = 0,
    stream_weights: bool = False,
) -> nn.Module:
    """A transformers model in eval mode; it uses a key/value cache only if the task ends in ``-with-past``.

    Args:
        source: A local folder with a ``config.json``, a model type (``"bert"``), or a hub id
            (``"owner/name"``); looked for in this order.
        task: What the model is for, named as in transformers' pipelines: ``"fill-mask"``; for
            models that generate, also with a cache: ``"text-generation-with-past"``. Without it, a
            model type gives the base model, and anything else the class that its config names under
            ``architectures``; with ``"auto"`` too, and if that class generates, it uses a cache.
        random_weights: Build the model from its config alone. Its parameters are spread apart, see
            ``spread_parameters``.
        overrides: Config key → value; dots lead into sub-configs:
            ``{"text_config.num_hidden_layers": 2}``.
        dtype: Of the weights, ``"float16"``, ``"fp16"`` or ``torch.float16``. Without it, as in the
            checkpoint, or float32.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run the Python code that comes with the model.
        attn_implementation: ``"eager"``, ``"sdpa"``; transformers' own choice where it is None.
        seed: Of the random weights. Torch's own generator is left as it was.
        stream_weights: Leave the weights in their safetensors files until they are used; what has
            to be converted is in a temporary file. All weights have to be there.

    Raises:
        ModelSourceError: If there is no such model, or it cannot be built as asked.
        FileError: With ``stream_weights``, if there are no safetensors files, or they are not those
            of the model.

    Examples:
        >>> model = load_model("bert", random_weights=True, overrides={"num_hidden_layers": 1, "hidden_size": 24})
        >>> type(model).__name__, len(model.encoder.layer), model.training
        ('BertModel', 1, False)
    """
    named = Source(source, random_weights, overrides or {}, revision, trust_remote_code)
    options = {"dtype": dtype, "attn_implementation": attn_implementation}
    return load(named, task, options, seed=seed, stream_weights=stream_weights)[0]


def load(
    source: Source, task: str | None, options: Mapping[str, Any], *, seed: int, stream_weights: bool
) -> tuple[nn.Module, Checkpoint | None]:
    """As `load_model`; with the files in which the weights stay, if they do."""
    config = source.config()
    packed = packed_source(source, config)
    has_cache = generates(config) if task == AUTO else split_task(task)[1]
    use_cache(config, has_cache)
    options = {**options, "dtype": _dtype(source, options["dtype"])}
    options = {name: value for name, value in options.items() if value is not None}
    model_class = _model_class(source, config, None if task == AUTO else task)
    if source.random_weights:
        if stream_weights:
            raise ModelSourceError(
                source.name, "random weights are in no files to stream them from"
            )
        return _random(source, model_class, config, options, seed).eval(), None
    if packed is not None:
        if stream_weights:
            raise ModelSourceError(
                source.name, "its weights are quantized, and dequantized in memory: not streamed"
            )
        return _dequantized(source, model_class, config, options, read_packed(packed)).eval(), None
    checkpoint = find_checkpoint(source, config) if stream_weights else None
    return _pretrained(source, model_class, config, options, checkpoint).eval(), checkpoint


def packed_source(source: Source, config: Any = None) -> Path | None:
    """The folder of a checkpoint that is quantized in a way that is read here; None for others and random weights."""
    if source.random_weights or not source.has_files:
        return None
    if is_gguf(source.name):
        return Path(source.name)
    if getattr(config or source.config(), "quantization_config", None) is None:
        return None
    folder = source.folder((".json", ".safetensors"), ())
    return folder if folder is not None and is_packed(folder) else None


def _build(model_class: Any, config: Any, **options: Any) -> Any:
    return (getattr(model_class, "from_config", None) or model_class._from_config)(
        config, **options
    )


def _dequantized(
    source: Source, model_class: Any, config: Any, options: Mapping[str, Any], packed: Any
) -> Any:
    """A model with the numbers of a quantized checkpoint in float32, or the dtype that was asked for."""
    import torch

    if hasattr(config, "quantization_config"):
        del config.quantization_config
    state = {name: torch.from_numpy(packed[name]) for name in packed}
    settings = {"dtype": torch.float32, **options, "config": config, "output_loading_info": True}
    try:
        with torch.device("meta"):
            # classes of AutoModel take no weights that are in memory
            found = type(_build(model_class, config))
        model, loading = found.from_pretrained(None, state_dict=state, **settings)
    except Exception as error:  # transformers raises dozens of kinds, some of them bare
        raise ModelSourceError(
            source.name, f"the weights cannot be loaded: {described(error, lines=2)}"
        ) from error
    unplaced = set(loading["unexpected_keys"]) & set(packed.layers)
    for problem, names in (
        ("checkpoint lacks", loading["missing_keys"]),
        ("model has no place for", unplaced),
    ):
        if names:
            raise ModelSourceError(source.name, f"the {problem} {min(names)!r}")
    return model


def spread_parameters(model: nn.Module, generator: torch.Generator, scale: float = 0.02) -> None:
    """Give every parameter and running statistic values of its own, as training would, in place.

    Freshly built models are full of equal tensors (zeros, ones), which exporters merge. The scale
    is the standard deviation of what is added to parameters.
    """
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator) * scale
                parameter.add_(noise.to(parameter.dtype))
        for name, buffer in model.named_buffers():
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith("running_mean"):
                buffer.uniform_(-0.5, 0.5, generator=generator)


def _model_class(source: Source, config: Any, task: str | None) -> Any:
    """The class with ``from_pretrained`` and, for configs, ``from_config`` or ``_from_config``."""
    import transformers

    if task is not None:
        return class_for_task(source.name, config, task)
    auto_map = getattr(config, "auto_map", None) or {}
    for name in config.architectures or ():
        model_class = getattr(transformers, name, None)
        if model_class is not None:
            return model_class
        if not (auto_map and source.trust_remote_code):
            problem = f"transformers has no class {name!r}, which its config names; name a --task"
            raise ModelSourceError(source.name, problem)
    if type(config) not in transformers.AutoModel._model_mapping and "AutoModel" not in auto_map:
        problem = f"there is no base model for {config.model_type!r}{task_hint(config)}"
        raise ModelSourceError(source.name, problem)
    return transformers.AutoModel


def _random(
    source: Source, model_class: Any, config: Any, options: Mapping[str, Any], seed: int
) -> Any:
    import torch

    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = _build(model_class, config, **options)
    except Exception as error:
        # whatever a model's own code raises on numbers that do not fit together
        raise ModelSourceError(
            source.name, f"the model cannot be built: {described(error, lines=2)}"
        ) from error
    spread_parameters(model, torch.Generator().manual_seed(seed))
    return model


def _pretrained(
    source: Source,
    model_class: Any,
    config: Any,
    options: Mapping[str, Any],
    checkpoint: Checkpoint | None,
) -> Any:
    """The model with its weights; with a checkpoint, they stay in its files."""
    options = {**options, **source.options, "config": config, "output_loading_info": True}
    if checkpoint is not None:
        options |= {"use_safetensors": True, "ignore_mismatched_sizes": True}
    try:
        with weights_in_files(checkpoint) if checkpoint is not None else contextlib.nullcontext():
            model, loading = model_class.from_pretrained(source.name, **options)
    except Exception as error:
        # transformers and its hub client raise dozens of kinds, some of them bare
        hint = (
            "; add --random-weights to go without them"
            if checkpoint is None and isinstance(error, OSError)
            else ""
        )
        problem = f"the weights cannot be loaded: {described(error, lines=2)}{hint}"
        raise ModelSourceError(source.name, problem) from error
    if checkpoint is not None:
        check_loaded(checkpoint, loading)
    elif loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])
        text = "%s: %d parameters are not in the checkpoint and have random values: %s"
        _log.warning(
            text,
            source.name,
            len(missing),
            ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else ""),
        )
    return model


def _dtype(source: Source, dtype: str | torch.dtype | None) -> torch.dtype | None:
    import torch

    torch_dtype = (
        getattr(torch, _SHORT.get(dtype, dtype), None) if isinstance(dtype, str) else dtype
    )
    if dtype is None or (isinstance(torch_dtype, torch.dtype) and torch_dtype.is_floating_point):
        return torch_dtype
    raise ModelSourceError(
        source.name, f"no floating-point dtype: {dtype!r}; one of float32, float16, bfloat16"
    )
