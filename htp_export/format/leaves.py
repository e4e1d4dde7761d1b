"""The leaves of nested arguments and results, with the keys that lead to them.

Containers are tuples, lists, mappings, dataclasses, classes registered with
``torch.utils._pytree``, and the key/value caches of transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def is_cache(value: Any) -> bool:
    """Return whether a value is a key/value cache of transformers; does not import it."""
    cache_utils = sys.modules.get("transformers.cache_utils")
    return cache_utils is not None and isinstance(value, cache_utils.Cache)


def named_leaves(
    tree: Any, name: str = "", above: tuple[int, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Iterate over the leaves of nested containers, with the keys that lead to them, joined by dots.

    A key of a mapping that is neither a string nor an integer is replaced by its position: it may
    be a tensor, which must not be converted to text while it is traced. The keys of a named tuple
    are its fields. A container that contains itself is expanded once; ``above`` are the ids of the
    enclosing containers.

    Examples:
        >>> list(named_leaves({"x": 1, "states": (None, 2)}))
        [('x', 1), ('states.0', None), ('states.1', 2)]
    """
    for leaf_name, leaf in _in_plain(tree, name):
        parts = None if id(leaf) in above else _parts(leaf)
        if parts is None:
            yield leaf_name, leaf
            continue
        for key, part in parts:
            yield from named_leaves(part, _joined(leaf_name, key), (*above, id(leaf)))


def are_tensors(values: Iterable[Any]) -> bool:
    """Return whether all values are plain tensors, as most arguments and results of modules are."""
    import torch

    return all(type(value) is torch.Tensor for value in values)


def named_tensors_in(tree: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the tensors among the leaves, in order, with the keys that lead to them, joined by dots."""
    import torch

    return ((name, leaf) for name, leaf in named_leaves(tree) if isinstance(leaf, torch.Tensor))


def tensors_in(tree: Any) -> Iterator[Any]:
    """Iterate over the tensors among the leaves, in order."""
    if are_tensors((tree,)):
        return iter((tree,))
    return (tensor for _, tensor in named_tensors_in(tree))


def containers_in(tree: Any, name: str = "") -> Iterator[str]:
    """Iterate over the names of containers other than tuples, lists and mappings: caches, and pytree classes."""
    for leaf_name, leaf in _in_plain(tree, name):
        if is_cache(leaf) or _node_of(leaf) is not None:
            yield leaf_name


def caches_in(tree: Any) -> Iterator[Any]:
    """Iterate over the caches of transformers in tuples, lists and mappings."""
    return (leaf for _, leaf in _in_plain(tree, "") if is_cache(leaf))


def _in_plain(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Iterate over the items of nested tuples, lists and mappings, with the keys that lead to them."""
    items = _items(tree)
    if items is None:
        yield name, tree
        return
    for key, item in items:
        yield from _in_plain(item, _joined(name, key))


def _joined(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _items(tree: Any) -> Iterator[tuple[Any, Any]] | None:
    """Return the keys and items of a tuple, list or mapping; None for another value."""
    if isinstance(tree, Mapping):
        keys = [key if isinstance(key, (str, int)) else index for index, key in enumerate(tree)]
        return iter(list(zip(keys, tree.values(), strict=True)))
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return iter(list(zip(tree._fields, tree, strict=True)))
    if isinstance(tree, (tuple, list)):
        return iter(list(enumerate(tree)))
    return None


def _parts(container: Any) -> Iterator[tuple[Any, Any]] | None:
    """Return the keys and parts of a dataclass, a pytree class or a cache, in order; None for another value.

    If the pytree class has only positions as keys, as ``transformers.exporters`` registers caches,
    the key of a tensor is the attributes that lead to it: ``layers.0.keys``. This also applies to
    the tensors of caches that are registered in another way.
    """
    node = _node_of(container)
    if node is None:
        if is_dataclass(container) and not isinstance(container, type):
            names = [field.name for field in fields(container)]
            return iter([(name, getattr(container, name, None)) for name in names])
        return _attributes(container) if is_cache(container) else None
    try:
        children = _flattened(node, container)
    except Exception:  # code of another library: if it fails, the container is a leaf
        return None
    if is_cache(container):
        children = list(enumerate(tensors_in([child for _, child in children])))
    if all(isinstance(key, int) for key, _ in children):
        children = _named_by_attributes(children, container)
    return iter(children)


def _flattened(node: Any, container: Any) -> list[tuple[Any, Any]]:
    """Return the keys and children of a container, by the functions that its class registered with torch."""
    if node.flatten_with_keys_fn is None:
        return list(enumerate(node.flatten_fn(container)[0]))
    return [(_plain(key), child) for key, child in node.flatten_with_keys_fn(container)[0]]


def _named_by_attributes(children: list[tuple[Any, Any]], container: Any) -> list[tuple[Any, Any]]:
    """Replace the keys of tensors by the attributes of the container that lead to them."""
    names: dict[int, list[str]] = {}
    for name, tensor in _attributes(container):
        names.setdefault(id(tensor), []).append(name)
    named: list[tuple[Any, Any]] = []
    for key, child in children:
        # a tensor may be in several attributes: each occurrence uses the next one
        remaining = names.get(id(child))
        named.append((remaining.pop(0) if remaining else key, child))
    return named


def _node_of(value: Any) -> Any:
    """Return the registration of a pytree class; None for other classes."""
    from torch.utils._pytree import SUPPORTED_NODES

    return SUPPORTED_NODES.get(type(value))


def _plain(key: Any) -> Any:
    """Return the key, index or attribute name of an entry of one of torch's key paths."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)


def _attributes(
    value: Any, name: str = "", above: tuple[int, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Iterate over the tensors in the attributes of an object, at any depth, with the names that lead to them."""
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
        return
    items: Any = _items(value)
    is_object = hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module))
    if items is None and is_object:
        items = iter(list(vars(value).items()))
    if items is None or id(value) in above:
        return
    for key, item in items:
        yield from _attributes(item, _joined(name, key), (*above, id(value)))
