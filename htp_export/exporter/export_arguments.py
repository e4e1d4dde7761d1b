"""What an export is asked for that torch takes in one form alone, or not: key-value caches as arguments, and opsets.

Caches of transformers are registered with torch by ``transformers.exporters``. That it writes
another opset, torch only logs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from htp_export.errors import InputError
from htp_export.exporter.capture import torch_internals
from htp_export.format.leaves import caches_in, is_cache


def prepare_caches(args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any) -> Any:
    """Register the caches among the arguments, and return the dynamic shapes in the structure that torch takes.

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
    """Refuse caches with tensors under TorchScript (`InputError`), whose tracer would make constants of them."""
    for cache in caches_in([*args, *kwargs.values()]):
        if any(getattr(layer, "keys", None) is not None for layer in getattr(cache, "layers", ())):
            kind = type(cache).__name__
            raise InputError(
                f"the TorchScript exporter takes no {kind} as an input; use dynamo=True"
            )


@contextlib.contextmanager
def advice_on_caches(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Add to an error of a ``with`` block which caches among the arguments cannot vary in length, and what to do."""
    try:
        yield
    except Exception as error:
        for cache in caches_in([*args, *kwargs.values()]):
            layers = [
                layer
                for layer in getattr(cache, "layers", ())
                if getattr(layer, "is_sliding", False)
            ]
            if layers:
                error.add_note(
                    f"htp_export: layers of the {type(cache).__name__} are {type(layers[0]).__name__}s, which drop the "
                    "tokens before their window and count them in Python: the length of the cache is a constant. "
                    "Pass a DynamicCache() without a config, which keeps all tokens; the mask applies the window"
                )
        raise


def _register(kind: type) -> None:
    try:
        from transformers.exporters.exporter_dynamo import register_pytree_node
    except ImportError:  # transformers before 5.23: torch says what to do
        return
    register_pytree_node(kind)


def _structured(spec: Any, cache: Any) -> Any:
    """An entry of dynamic shapes, in the structure in which torch flattens the cache that it is for."""
    from torch.utils import _pytree

    node = _pytree.SUPPORTED_NODES.get(type(cache))
    if node is None or spec is None or not is_cache(cache) or not hasattr(cache, "layers"):
        return spec
    children = list(node.flatten_fn(cache)[0])
    layers = [
        (layer.keys, layer.values)
        for layer in cache.layers
        if getattr(layer, "keys", None) is not None
    ]
    entries = _of_layers(spec, len(layers))
    if entries is None:
        return spec
    given = {
        id(tensor): entry
        for pair, two in zip(layers, entries, strict=True)
        for tensor, entry in zip(pair, two, strict=True)
    }

    def rebuilt(child: Any) -> Any:
        return (
            [rebuilt(each) for each in child]
            if isinstance(child, (list, tuple))
            else given.get(id(child))
        )

    return rebuilt(children)


def _of_layers(spec: Any, count: int) -> list[Sequence[Any]] | None:
    """The entries of the key and the value of each layer; None for what is in no form that is known."""
    if isinstance(spec, dict) and set(spec) == {"key_cache", "value_cache"}:
        spec = [list(spec["key_cache"]), list(spec["value_cache"])]
    if isinstance(spec, dict):
        return [(spec, spec)] * count
    if not isinstance(spec, (list, tuple)):
        return None
    if len(spec) == 2 and all(isinstance(part, list) and len(part) == count for part in spec):
        return list(zip(*spec, strict=True))
    if len(spec) == count and all(
        isinstance(part, (list, tuple)) and len(part) == 2 for part in spec
    ):
        return list(spec)
    if len(spec) == 2 * count and not any(isinstance(part, (list, tuple)) for part in spec):
        return [spec[place : place + 2] for place in range(0, len(spec), 2)]
    return None


def check_opset(opset: int | None, *, dynamo: bool) -> None:
    """Refuse an opset that an exporter of torch cannot write, with an `InputError`; None is torch's own choice."""
    if opset is None:
        return
    lowest, highest = torch_internals.opset_range(dynamo=dynamo)
    if not lowest <= opset <= highest:
        exporter = "dynamo" if dynamo else "TorchScript"
        raise InputError(
            f"opset {opset}: torch's {exporter} exporter writes opsets {lowest} to {highest}"
        )


def other_opset(asked: int | None, written: int | None) -> str | None:
    """Say that the file has another opset than was asked for; None if it has not, or if either is unknown."""
    if asked is None or written is None or asked == written:
        return None
    return f"opset {asked} was asked for, and torch wrote opset {written}, as it could not convert the model"
