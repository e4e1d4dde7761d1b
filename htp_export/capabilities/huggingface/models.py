"""Load a transformers model by hub id, local folder, or model type."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from htp_export.capabilities.huggingface.configs import use_batched_experts, use_cache
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
from htp_export.extras import required
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
    """Load a transformers model in eval mode; it uses a key-value cache only if the task ends in ``-with-past``.

    Mixtures of experts run as batched products, which both exporters of torch translate;
    ``model.set_experts_implementation`` chooses another implementation.

    Args:
        source: A local folder with a ``config.json``, a model type (``"bert"``), or a hub id
            (``"owner/name"``); searched in this order.
        task: The task, by its name in transformers' pipelines: ``"fill-mask"``; for models that
            generate, also with a cache: ``"text-generation-with-past"``. The default for a model
            type is the base model, otherwise the class that the config names under
            ``architectures``. With ``"auto"``, the class is the same, and uses a cache if it
            generates.
        random_weights: Build the model from its config alone. Random noise is added to its
            parameters, see ``spread_parameters``.
        overrides: Config key → value; dots lead into sub-configs:
            ``{"text_config.num_hidden_layers": 2}``.
        dtype: The dtype of the weights, ``"float16"``, ``"fp16"`` or ``torch.float16``. The default
            is that of the checkpoint, or float32.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run the Python code in the model's repository.
        attn_implementation: ``"eager"``, ``"sdpa"``; None for transformers' own choice.
        seed: Seed of the random weights. Torch's own generator is not changed.
        stream_weights: Keep the weights in their safetensors files until they are used, and
            converted weights in a temporary file. The files have to contain all weights.

    Raises:
        ModelSourceError: If there is no such model, or it cannot be built with these arguments.
        FileError: With ``stream_weights``, if there are no safetensors files, or they do not fit
            the model.

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
    """Like `load_model`; also return the files of streamed weights, None without ``stream_weights``."""
    config = source.config()
    packed = packed_source(source, config)
    has_cache = generates(config) if task == AUTO else split_task(task)[1]
    use_cache(config, has_cache)
    use_batched_experts(config)
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
    """The folder or file of a checkpoint with a supported quantization; None for others and for random weights."""
    if source.random_weights or not source.has_files:
        return None
    if is_gguf(source.name):
        return Path(source.name)
    if getattr(config or source.config(), "quantization_config", None) is None:
        return None
    folder = source.folder((".json", ".safetensors"), ())
    return folder if folder is not None and is_packed(folder) else None


def _build(model_class: Any, config: Any, **options: Any) -> Any:
    """Build a model with random weights; Auto classes have ``from_config``, others ``_from_config``."""
    from_config = getattr(model_class, "from_config", None) or model_class._from_config
    return from_config(config, **options)


def _dequantized(
    source: Source, model_class: Any, config: Any, options: Mapping[str, Any], packed: Any
) -> Any:
    """Load a model with the dequantized weights of a checkpoint, in float32 or the requested dtype."""
    import torch

    if hasattr(config, "quantization_config"):
        del config.quantization_config
    state = {name: torch.from_numpy(packed[name]) for name in packed}
    settings = {"dtype": torch.float32, **options, "config": config, "output_loading_info": True}
    try:
        with torch.device("meta"):
            # Auto classes do not accept a state_dict: find the class that they select.
            own_class = type(_build(model_class, config))
        model, loading = own_class.from_pretrained(None, state_dict=state, **settings)
    except Exception as error:  # transformers raises errors of dozens of types, some without a text
        raise ModelSourceError(
            source.name, f"the weights cannot be loaded: {described(error, lines=2)}"
        ) from error
    if loading["missing_keys"]:
        raise ModelSourceError(
            source.name, f"the checkpoint lacks {min(loading['missing_keys'])!r}"
        )
    unexpected = set(loading["unexpected_keys"]) & set(packed.layers)
    if unexpected:
        raise ModelSourceError(source.name, f"the model has no parameter {min(unexpected)!r}")
    return model


def spread_parameters(model: nn.Module, generator: torch.Generator, scale: float = 0.02) -> None:
    """Make the values of every parameter and running statistic different, as training would, in place.

    Newly built models contain many equal tensors (zeros, ones), which exporters merge. ``scale`` is
    the standard deviation of the noise that is added to parameters.
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
    """The class that loads the model: a model class of transformers, or an Auto class."""
    transformers = required("transformers")

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
    """Build a model with random weights."""
    import torch

    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = _build(model_class, config, **options)
    except Exception as error:
        # from the model's own code, on sizes that do not fit together
        changes = ", ".join(f"{key}={value}" for key, value in source.overrides.items())
        changed = f" with {changes}" if changes else ""
        raise ModelSourceError(
            source.name, f"the model cannot be built{changed}: {described(error, lines=2)}"
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
    """Load a model with its weights; with a checkpoint, the weights stay in its files."""
    options = {**options, **source.options, "config": config, "output_loading_info": True}
    streaming: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if checkpoint is not None:
        # `check_loaded` reports wrong sizes with the name of the file.
        options |= {"use_safetensors": True, "ignore_mismatched_sizes": True}
        streaming = weights_in_files(checkpoint)
    try:
        with streaming:
            model, loading = model_class.from_pretrained(source.name, **options)
    except Exception as error:
        # transformers and its hub client raise errors of dozens of types, some without a text
        problem = f"the weights cannot be loaded: {described(error, lines=2)}"
        if checkpoint is None and isinstance(error, OSError):
            problem += "; add --random-weights to go without them"
        raise ModelSourceError(source.name, problem) from error
    if checkpoint is not None:
        check_loaded(checkpoint, loading)
    elif loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])
        names = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        text = "%s: %d parameters are not in the checkpoint and have random values: %s"
        _log.warning(text, source.name, len(missing), names)
    return model


def _dtype(source: Source, dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype by its name in torch or a short one; an error for other types than floats."""
    import torch

    torch_dtype = dtype
    if isinstance(dtype, str):
        torch_dtype = getattr(torch, _SHORT.get(dtype, dtype), None)
    if dtype is None:
        return None
    if isinstance(torch_dtype, torch.dtype) and torch_dtype.is_floating_point:
        return torch_dtype
    raise ModelSourceError(
        source.name, f"no floating-point dtype: {dtype!r}; one of float32, float16, bfloat16"
    )
