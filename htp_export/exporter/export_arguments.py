"""Arguments of an export that torch restricts: key-value caches, and opsets.

Caches of transformers are registered with torch by ``transformers.exporters``. If torch writes
another opset, it only logs a message.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from htp_export.errors import InputError
from htp_export.exporter.capture import torch_internals
from htp_export.format.leaves import caches_in, is_cache

Run: TypeAlias = Callable[..., torch.onnx.ONNXProgram | None]

ModulesAsFunctions: TypeAlias = (
    bool | str | type[torch.nn.Module] | Collection[type[torch.nn.Module] | str]
)
"""True for every module, classes of modules, or a selector; see ``TaggedModel.select``."""


def prepare_caches(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
) -> Any:
    """Register the caches among the arguments; return the dynamic shapes in torch's structure.

    For a keyword argument that is a cache, they may have one entry for all of its keys and values,
    a pair for each layer, a list of entries ``[key, value, key, ...]``, or the keys and the values,
    as ``{"key_cache": [...], "value_cache": [...]}`` or as two lists.
    """
    from torch.utils import _pytree

    for cache in caches_in([*args, *kwargs.values()]):
        if type(cache) not in _pytree.SUPPORTED_NODES:
            _register(type(cache))
    if not isinstance(dynamic_shapes, dict):
        return dynamic_shapes
    return {name: _structured(spec, kwargs.get(name)) for name, spec in dynamic_shapes.items()}


def refuse_caches(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise an `InputError` for caches with tensors, which TorchScript's tracer makes constants."""
    for cache in caches_in([*args, *kwargs.values()]):
        if any(getattr(layer, "keys", None) is not None for layer in getattr(cache, "layers", ())):
            kind = type(cache).__name__
            raise InputError(
                f"the TorchScript exporter takes no {kind} as an input; use dynamo=True"
            )


@contextlib.contextmanager
def advice_on_caches(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Add a note to errors of a ``with`` block about cached layers with a constant length."""
    try:
        yield
    except Exception as error:
        for cache in caches_in([*args, *kwargs.values()]):
            layers = getattr(cache, "layers", ())
            sliding = [layer for layer in layers if getattr(layer, "is_sliding", False)]
            if sliding:
                kind = type(sliding[0]).__name__
                error.add_note(
                    f"htp_export: layers of the {type(cache).__name__} are {kind}s, which drop the "
                    "tokens before their window and count them in Python: the length of the cache is a constant. "
                    "Pass a DynamicCache() without a config, which keeps all tokens; the mask applies the window"
                )
        raise


def _register(kind: type) -> None:
    try:
        from transformers.exporters.exporter_dynamo import register_pytree_node
    except ImportError:  # transformers before 5.23: torch raises an error with advice
        return
    register_pytree_node(kind)


def _structured(spec: Any, cache: Any) -> Any:
    """An entry of dynamic shapes, in the structure in which torch flattens its cache."""
    from torch.utils import _pytree

    node = _pytree.SUPPORTED_NODES.get(type(cache))
    if node is None or spec is None or not is_cache(cache) or not hasattr(cache, "layers"):
        return spec
    layers = [
        (layer.keys, layer.values)
        for layer in cache.layers
        if getattr(layer, "keys", None) is not None
    ]
    entries = _of_layers(spec, len(layers))
    if entries is None:
        return spec
    entry_of = {}  # id of a key or value → its entry
    for tensors, layer_entries in zip(layers, entries, strict=True):
        for tensor, entry in zip(tensors, layer_entries, strict=True):
            entry_of[id(tensor)] = entry

    def rebuilt(child: Any) -> Any:
        if isinstance(child, (list, tuple)):
            return [rebuilt(inner) for inner in child]
        return entry_of.get(id(child))

    return rebuilt(list(node.flatten_fn(cache)[0]))


def _of_layers(spec: Any, count: int) -> list[Sequence[Any]] | None:
    """The entries of the key and the value of each layer; None for an unknown form.

    The forms are those of `prepare_caches`.
    """
    if isinstance(spec, dict) and set(spec) == {"key_cache", "value_cache"}:
        spec = [list(spec["key_cache"]), list(spec["value_cache"])]
    if isinstance(spec, dict):  # one entry for all
        return [(spec, spec)] * count
    if not isinstance(spec, (list, tuple)):
        return None
    if len(spec) == 2 and _all_lists(spec, (list,), count):  # keys, values
        return list(zip(*spec, strict=True))
    if len(spec) == count and _all_lists(spec, (list, tuple), 2):  # a pair for each layer
        return list(spec)
    has_lists = any(isinstance(part, (list, tuple)) for part in spec)
    if len(spec) == 2 * count and not has_lists:  # [key, value, key, ...]
        return [spec[begin : begin + 2] for begin in range(0, len(spec), 2)]
    return None


def _all_lists(parts: Sequence[Any], kinds: tuple[type, ...], length: int) -> bool:
    if not all(isinstance(part, kinds) for part in parts):
        return False
    return all(len(part) == length for part in parts)


def check_opset(opset: int | None, *, dynamo: bool) -> None:
    """Raise an `InputError` for an opset that torch's exporter cannot write.

    None is torch's default.
    """
    if opset is None:
        return
    lowest, highest = torch_internals.opset_range(dynamo=dynamo)
    if not lowest <= opset <= highest:
        exporter = "dynamo" if dynamo else "TorchScript"
        raise InputError(
            f"opset {opset}: torch's {exporter} exporter writes opsets {lowest} to {highest}"
        )


def other_opset(asked: int | None, written: int | None) -> str | None:
    """A message if the file has another opset than requested; None if not, or if one is unknown."""
    if asked is None or written is None or asked == written:
        return None
    return f"opset {asked} was asked for, and torch wrote opset {written}, as it could not convert the model"
