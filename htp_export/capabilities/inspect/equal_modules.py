"""Which calls of modules export to the same graph, but for the names in it and the values of weights."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["call_signature"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def call_signature(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """What a module computes when it is called so: equal for modules that are alike and are given alike tensors.

    Classes, modes, plain attributes, hooks, and shapes and types of weights and arguments count. Any other object is
    equal to itself alone: modules that share a configuration are alike, those with copies of it are not.

    Examples:
        >>> import torch
        >>> one, other = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
        >>> x, y = torch.ones(2, 4), torch.zeros(2, 4)
        >>> call_signature(one, (x,), {}) == call_signature(other, (y,), {})
        True
        >>> call_signature(one, (x,), {}) == call_signature(one, (torch.ones(5, 4),), {})
        False
    """
    seen: dict[int, int] = {}  # the same weight, or the same part, in two places
    parts = tuple((path, _module(part, seen)) for path, part in module.named_modules(remove_duplicate=False))
    return (parts, _value(args), _value(dict(kwargs)))


def _module(module: torch.nn.Module, seen: dict[int, int]) -> Hashable:
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    tensors = [*module._parameters.items(), *module._buffers.items()]
    weights = tuple((name, _value(each), seen.setdefault(id(each), len(seen))) for name, each in tensors)
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return (type(module), seen.setdefault(id(module), len(seen)), _value(own), weights, tuple(map(id, hooks)))


def _value(value: Any) -> Hashable:
    import torch

    if isinstance(value, torch.Tensor):
        return ("tensor", value.shape, value.dtype, value.device.type, value.requires_grad, type(value))
    if isinstance(value, Mapping):
        return (type(value), tuple((repr(name), _value(each)) for name, each in value.items()))
    if isinstance(value, list | tuple | set | frozenset):
        return (type(value), tuple(map(_value, value)))
    if isinstance(value, _PLAIN):
        return (type(value), repr(value))
    return (type(value), id(value))
