"""A transformers model from what a user names: hub id, local folder, or model type."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from htp_export.capabilities.huggingface.configs import (
    apply_overrides,
    nearest,
    tokens_outside,
    with_cache,
    without_cache,
)
from htp_export.capabilities.huggingface.reaching import why_unreachable
from htp_export.capabilities.huggingface.streaming import check_loaded, find_checkpoint, weights_in_files
from htp_export.capabilities.huggingface.tasks import AUTO, class_for_task, generates, split_task, task_hint
from htp_export.errors import ModelSourceError, described

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["has_files", "hub_options", "load_model", "names_a_generating_class", "spread_parameters"]

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
        source: A local folder with a ``config.json``, a model type (``"bert"``), or a hub id (``"owner/name"``); looked
            for in this order.
        task: What the model is for, named as in transformers' pipelines: ``"fill-mask"``; for models that generate,
            also with a cache: ``"text-generation-with-past"``. Without it, a model type gives the base model, and
            anything else the class that its config names under ``architectures``; with ``"auto"`` too, and if that
            class generates, it uses a cache.
        random_weights: Build the model from its config alone. Its parameters are spread apart, see
            ``spread_parameters``.
        overrides: Config key → value; dots lead into sub-configs: ``{"text_config.num_hidden_layers": 2}``.
        dtype: Of the weights, ``"float16"``, ``"fp16"`` or ``torch.float16``. Without it, as in the checkpoint, or
            float32.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run the Python code that comes with the model.
        attn_implementation: ``"eager"``, ``"sdpa"``; transformers' own choice where it is None.
        seed: Of the random weights. Torch's own generator is left as it was.
        stream_weights: Leave the weights in their safetensors files until they are used; what has to be converted is
            in a temporary file. All weights have to be there.

    Raises:
        ModelSourceError: If there is no such model, or it cannot be built as asked.
        FileError: With ``stream_weights``, if there are no safetensors files, or they are not those of the model.

    Examples:
        >>> model = load_model("bert", random_weights=True, overrides={"num_hidden_layers": 1, "hidden_size": 24})
        >>> type(model).__name__, len(model.encoder.layer), model.training
        ('BertModel', 1, False)
    """
    config, hub = _source_config(source, overrides, random_weights, revision, trust_remote_code)
    has_cache = split_task(task)[1]
    if task == AUTO:
        task, has_cache = None, generates(config)
    config = with_cache(config) if has_cache else without_cache(config)
    options: dict[str, Any] = {"dtype": _dtype(source, dtype), "attn_implementation": attn_implementation}
    options = {name: value for name, value in options.items() if value is not None}
    model_class = _model_class(source, config, task, hub)
    model: nn.Module
    if random_weights and stream_weights:
        raise ModelSourceError(source, "random weights are in no files to stream them from")
    if random_weights:
        model = _random(source, model_class, config, options, seed)
    elif stream_weights:
        model = _streamed(source, model_class, config, options, hub)
    else:
        model = _pretrained(source, model_class, config, options | hub)
    return model.eval()


def names_a_generating_class(
    source: str,
    *,
    random_weights: bool = False,
    overrides: Mapping[str, object] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> bool:
    """Whether the config of a folder or hub id names a class that generates tokens; false for a model type.

    Args:
        source: As for `load_model`, like all that follow.
        random_weights: Whether a model type may be named.
        overrides: Config key → value.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run the Python code that comes with the model.

    Raises:
        ModelSourceError: If there is no such model.
    """
    config, _ = _source_config(source, overrides, random_weights, revision, trust_remote_code)
    return generates(config)


def _source_config(
    source: str,
    overrides: Mapping[str, object] | None,
    random_weights: bool,
    revision: str | None,
    trust_remote_code: bool,
) -> tuple[Any, dict[str, Any]]:
    """The config of a model, and the options with which its files are read from the hub."""
    hub, offline = hub_options(source, random_weights, revision, trust_remote_code)
    return _config(source, overrides or {}, random_weights, hub, offline), hub


def hub_options(
    source: str, random_weights: bool, revision: str | None, trust_remote_code: bool
) -> tuple[dict[str, Any], str]:
    """The options with which the files of a model are read, and why the hub cannot be reached, if it is needed.

    Args:
        source: As for `load_model`, like all that follow.
        random_weights: Whether a model type may be named.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run the Python code that comes with the model.
    """
    hub: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    offline = why_unreachable() if _is_hub_id(source, random_weights) else ""
    if offline:  # what is in the cache of this machine can be had
        hub["local_files_only"] = True
    return hub, offline


def has_files(source: str) -> bool:
    """Whether a source is a folder or a hub id; a model type has no files."""
    return Path(source).is_dir() or _is_hub_id(source, True)


def spread_parameters(model: nn.Module, generator: torch.Generator, scale: float = 0.02) -> None:
    """Give every parameter and running statistic values of its own, as training would.

    Freshly built models are full of equal tensors (zeros, ones), which exporters merge.

    Args:
        model: The model, changed in place.
        generator: Where the noise comes from.
        scale: Standard deviation of what is added to parameters. Running variances are drawn from 0.5 to 1.5, running
            means from -0.5 to 0.5.
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


def _is_hub_id(source: str, random_weights: bool) -> bool:
    """Whether the hub has to be asked for a model; what is wrong with other names is said without it."""
    from transformers import CONFIG_MAPPING

    if source.startswith((".", "/", "~")) or Path(source).exists():
        return False
    return source not in CONFIG_MAPPING and ("/" in source or not random_weights)


def _config(
    source: str, overrides: Mapping[str, object], random_weights: bool, hub: dict[str, Any], offline: str
) -> Any:
    """The config of the model that ``source`` names."""
    from transformers import CONFIG_MAPPING, AutoConfig

    folder = Path(source)
    is_folder = folder.is_dir()
    if is_folder and not (folder / "config.json").is_file():
        raise ModelSourceError(source, "the folder has no config.json")
    if not is_folder and (source.startswith((".", "/", "~")) or folder.exists()):
        raise ModelSourceError(source, "is no folder; give a folder with a config.json, a hub id or a model type")
    try:
        if not is_folder and source in CONFIG_MAPPING:
            if not random_weights:
                problem = "is a model type and has no weights; add --random-weights (random_weights=True), "
                raise ModelSourceError(source, problem + "or name a hub id (owner/name) or a folder")
            config = AutoConfig.for_model(source)
        elif not is_folder and random_weights and "/" not in source:
            hint = nearest(source, CONFIG_MAPPING.keys(), "model types")
            raise ModelSourceError(source, f"transformers has no such model type, and a hub id is owner/name{hint}")
        else:
            config = AutoConfig.from_pretrained(source, **hub)
    except ModelSourceError:
        raise
    except Exception as error:  # transformers and its hub client raise dozens of kinds, some of them bare
        hint = "" if is_folder or "/" in source else nearest(source, CONFIG_MAPPING.keys(), "model types")
        if offline:
            problem = f"the hub cannot be reached ({offline}), and the model is not in the cache of this machine{hint}"
            raise ModelSourceError(source, problem) from error
        raise ModelSourceError(source, f"no model found: {described(error, lines=2)}{hint}") from error
    return apply_overrides(source, config, overrides)


def _model_class(source: str, config: Any, task: str | None, hub: dict[str, Any]) -> Any:
    """The class with ``from_pretrained`` and, for configs, ``from_config`` or ``_from_config``."""
    import transformers

    if task is not None:
        return class_for_task(source, config, task)
    for name in config.architectures or ():
        model_class = getattr(transformers, name, None)
        if model_class is not None:
            return model_class
        if not (getattr(config, "auto_map", None) and hub["trust_remote_code"]):
            raise ModelSourceError(source, f"transformers has no class {name!r}, which its config names; name a --task")
    auto_map = getattr(config, "auto_map", None) or {}
    if type(config) not in transformers.AutoModel._model_mapping and "AutoModel" not in auto_map:
        raise ModelSourceError(source, f"there is no base model for {config.model_type!r}" + task_hint(config))
    return transformers.AutoModel


def _random(source: str, model_class: Any, config: Any, options: dict[str, Any], seed: int) -> Any:
    import torch

    build = getattr(model_class, "from_config", None) or model_class._from_config
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = build(config, **options)
    except Exception as error:  # whatever a model's own code raises on numbers that do not fit together
        problem = f"the model cannot be built: {described(error, lines=2)}{tokens_outside(config)}"
        raise ModelSourceError(source, problem) from error
    spread_parameters(model, torch.Generator().manual_seed(seed))
    return model


def _pretrained(source: str, model_class: Any, config: Any, options: dict[str, Any]) -> Any:
    try:
        model, loading = model_class.from_pretrained(source, config=config, output_loading_info=True, **options)
    except Exception as error:  # as in _config
        hint = "; add --random-weights to go without them" if isinstance(error, OSError) else ""
        raise ModelSourceError(source, f"the weights cannot be loaded: {described(error, lines=2)}{hint}") from error
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])
        text = "%s: %d parameters are not in the checkpoint and have random values: %s"
        _log.warning(text, source, len(missing), ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else ""))
    return model


def _streamed(source: str, model_class: Any, config: Any, options: dict[str, Any], hub: dict[str, Any]) -> Any:
    checkpoint = find_checkpoint(source, config, hub)
    options = options | hub | {"use_safetensors": True, "ignore_mismatched_sizes": True}
    try:
        with weights_in_files(checkpoint):
            model, loading = model_class.from_pretrained(source, config=config, output_loading_info=True, **options)
    except Exception as error:  # as in _config
        raise ModelSourceError(source, f"the weights cannot be loaded: {described(error, lines=2)}") from error
    check_loaded(checkpoint, loading)
    checkpoint.check()
    return model


def _dtype(source: str, dtype: str | torch.dtype | None) -> torch.dtype | None:
    import torch

    torch_dtype = getattr(torch, _SHORT.get(dtype, dtype), None) if isinstance(dtype, str) else dtype
    if dtype is None or (isinstance(torch_dtype, torch.dtype) and torch_dtype.is_floating_point):
        return torch_dtype
    raise ModelSourceError(source, f"no floating-point dtype: {dtype!r}; one of float32, float16, bfloat16")
