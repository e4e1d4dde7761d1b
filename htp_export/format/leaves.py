"""The leaves of arguments and results, with the keys that lead to them.

Tuples, lists, mappings and dataclasses are taken apart, and so are containers that torch knows as
such: classes registered with ``torch.utils._pytree`` and the key/value caches of transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def is_cache(value: Any) -> bool:
    """Whether a value is a cache of transformers."""
    known = sys.modules.get("transformers.cache_utils")
    return known is not None and isinstance(value, known.Cache)


def named_leaves(
    tree: Any, name: str = "", above: tuple[int, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Everything in nested containers (transformers' outputs are mappings), with the keys that lead to it.

    A key that is no word and no number counts by its place: a tensor must not be looked at, while
    it is being traced. A named tuple has the names of its fields. What contains itself is taken
    apart once; ``above`` are the containers around.

    Examples:
        >>> list(named_leaves({"x": 1, "states": (None, 2)}))
        [('x', 1), ('states.0', None), ('states.1', 2)]
    """
    for place, leaf in _in_plain(tree, name):
        parts = None if id(leaf) in above else _parts(leaf)
        if parts is None:
            yield place, leaf
            continue
        for key, part in parts:
            yield from named_leaves(part, _joined(place, key), (*above, id(leaf)))


def named_tensors_in(tree: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the tensors among the leaves, in order, with the keys that lead to them, joined by dots."""
    import torch

    return ((name, leaf) for name, leaf in named_leaves(tree) if isinstance(leaf, torch.Tensor))


def tensors_in(tree: Any) -> Iterator[Any]:
    """Iterate over the tensors among the leaves, in order."""
    return (tensor for _, tensor in named_tensors_in(tree))


def containers_in(tree: Any, name: str = "") -> Iterator[str]:
    """The names of the containers that are no tuples, lists or mappings: caches, and others that torch knows."""
    return (
        place
        for place, leaf in _in_plain(tree, name)
        if is_cache(leaf) or _node_of(leaf) is not None
    )


def caches_in(tree: Any) -> Iterator[Any]:
    """The caches of transformers in tuples, lists and mappings."""
    return (leaf for _, leaf in _in_plain(tree, "") if is_cache(leaf))


def _in_plain(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Everything in tuples, lists and mappings that is none of these, with the keys that lead to it."""
    items = _items(tree)
    if items is None:
        yield name, tree
        return
    for key, item in items:
        yield from _in_plain(item, _joined(name, key))


def _joined(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _items(tree: Any) -> Iterator[tuple[Any, Any]] | None:
    if isinstance(tree, Mapping):
        named = (key if isinstance(key, (str, int)) else place for place, key in enumerate(tree))
        return iter(list(zip(named, tree.values(), strict=True)))
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return iter(list(zip(tree._fields, tree, strict=True)))
    return iter(list(enumerate(tree))) if isinstance(tree, (tuple, list)) else None


def _parts(container: Any) -> Iterator[tuple[Any, Any]] | None:
    """The parts of a dataclass or container that torch takes apart, in order, and of a cache; None for anything else.

    Where torch only counts the parts, as ``transformers.exporters`` has it for caches, a tensor is
    named by the attributes that lead to it: ``layers.0.keys``. So are the tensors of caches that
    are registered in another way.
    """
    node = _node_of(container)
    if node is None and is_dataclass(container) and not isinstance(container, type):
        return iter(
            [(each.name, getattr(container, each.name, None)) for each in fields(container)]
        )
    if node is None:
        return _attributes(container) if is_cache(container) else None
    try:
        if node.flatten_with_keys_fn is None:
            children: list[Any] = list(enumerate(node.flatten_fn(container)[0]))
        else:
            children = [
                (_plain(key), child) for key, child in node.flatten_with_keys_fn(container)[0]
            ]
    except Exception:  # the code of another library: what it cannot take apart is one leaf
        return None
    if is_cache(container):
        children = list(enumerate(tensors_in([child for _, child in children])))
    if all(isinstance(key, int) for key, _ in children):
        known: dict[int, list[str]] = {}
        for key, tensor in _attributes(container):
            known.setdefault(id(tensor), []).append(key)
        children = [
            (known[id(child)].pop(0) if known.get(id(child)) else key, child)
            for key, child in children
        ]
    return iter(children)


def _node_of(value: Any) -> Any:
    from torch.utils._pytree import SUPPORTED_NODES

    return SUPPORTED_NODES.get(type(value))


def _plain(key: Any) -> Any:
    """The key, position or attribute that an entry of one of torch's key paths stands for."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)


def _attributes(
    value: Any, name: str = "", above: tuple[int, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Every tensor in the attributes of an object, at any depth, with the attributes and keys that lead to it."""
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
        return
    items: Any = _items(value)
    if (
        items is None
        and hasattr(value, "__dict__")
        and not isinstance(value, (type, torch.nn.Module))
    ):
        items = iter(list(vars(value).items()))
    if items is None or id(value) in above:
        return
    for key, item in items:
        yield from _attributes(item, _joined(name, key), (*above, id(value)))
