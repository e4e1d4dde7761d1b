"""Key/value caches as arguments of a call, and what ``transformers.exporters`` (transformers 5.23) does for them."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import re
from collections.abc import Iterator
from typing import Any

from htp_export.errors import InputError

_LEAF = re.compile(r"\w+\.(?:(self|cross)_attention_cache\.)?layers\.(\d+)\.(\w+)")
_SINGULAR = {"keys": "key", "values": "value"}
_SIDES = {None: "", "self": "decoder.", "cross": "encoder."}


def _has_exporters() -> bool:
    return importlib.util.find_spec("transformers.exporters") is not None


def register_caches(model: Any) -> None:
    """Register the caches of transformers as containers of tensors, as its own exporters do."""
    if not _has_exporters():
        import transformers

        problem = "inputs and names by task need transformers.exporters, which transformers 5.23 has"
        raise InputError(f"{problem}; installed is {transformers.__version__}: pip install -U transformers")
    from transformers.exporters.exporter_dynamo import register_cache_pytrees_for_model

    register_cache_pytrees_for_model(model)


def translations() -> dict[Any, Any]:
    """What transformers' exporters, if it has some, write for operators that torch has no ONNX for, as of experts."""
    if not _has_exporters():
        return {}
    from transformers.exporters import exporter_onnx

    return dict(getattr(exporter_onnx, "_ONNX_TRANSLATION_TABLE", {}))


@contextlib.contextmanager
def tracing_as_transformers_does(model: Any) -> Iterator[None]:
    """What transformers' exporters, if it has some, replace in torch and in models to trace them, for a block."""
    if not _has_exporters():
        yield
        return
    from transformers.exporters import exporter_onnx  # noqa: F401 # registers its patches
    from transformers.exporters.exporter_dynamo import reset_model_state
    from transformers.exporters.utils import apply_patches

    with apply_patches("onnx"), apply_patches("dynamo"), reset_model_state(model):
        yield


def empty_cache(model: Any) -> Any:
    """A cache for a model that nothing is in yet, whose layers keep every token; only keys and values can be in it.

    A layer with a sliding window drops old tokens, and the counters with which it does so are constants in a graph. The
    mask applies the window, too: all tokens can be kept.
    """
    from transformers import cache_utils

    known = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
    of_keys = [getattr(cache_utils, name, None) for name in known]
    growing: Any = cache_utils.DynamicLayer

    def cache() -> Any:
        made = cache_utils.DynamicCache(config=model.config.get_text_config(decoder=True))
        other = sorted({type(layer).__name__ for layer in made.layers if type(layer) not in of_keys})
        if other:
            problem = f"has layers with a {' and a '.join(other)}, which hold states besides keys and values"
            raise InputError(f"the cache of {type(model).__name__} {problem}; choose a task without -with-past")
        sliding = cache_utils.DynamicSlidingWindowLayer
        made.layers = [growing() if type(layer) is sliding else layer for layer in made.layers]
        return made

    return cache_utils.EncoderDecoderCache(cache(), cache()) if model.config.is_encoder_decoder else cache()


def emptied(cache: Any, length: int = 0) -> Any:
    """A cache of the same layers that holds the first tokens alone, or none; the cache itself stays as it is."""
    from transformers.cache_utils import DynamicLayer

    made = copy.deepcopy(cache)
    for layer in made.layers:
        if type(layer) is DynamicLayer and layer.keys is not None and layer.values is not None:
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
    return made


def leaf_name(path: str, prefix: str) -> str:
    """The name that optimum gives a tensor at transformers' path in a cache; other paths stay as they are.

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
