"""The paths of a model's modules: their names in ``named_modules()``, made unique if two modules have the same name.

Torch joins the names of modules by dots without a check: a module that is registered under the empty name
has the name of its parent, and one that is registered as ``a.b`` has the name of the module ``b`` inside ``a``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import nn


class ModulePath(NamedTuple):
    """A module, its path, unique in the model, and its name in ``named_modules()``."""

    path: str
    name: str
    module: nn.Module


def module_paths(model: nn.Module) -> list[ModulePath]:
    """Return every module of a model, once, in the order of ``named_modules()``.

    The first module with a name has the name as its path. The paths of further ones are the name and ``#2``, ``#3``,
    ...; the paths of the modules inside begin with that.

    Examples:
        >>> import torch
        >>> model = torch.nn.Module()
        >>> model._modules[""] = torch.nn.Sequential(torch.nn.ReLU())
        >>> [(path, name) for path, name, _ in module_paths(model)]
        [('', ''), ('#2', ''), ('#2.0', '0')]
    """
    named = list(model.named_modules())
    if len({name for name, _ in named}) == len(named):
        return [ModulePath(name, name, module) for name, module in named]
    return list(_unique(model, "", "", set(), set()))


def _unique(module: nn.Module, path: str, name: str, taken: set[str], seen: set[int]) -> Iterator[ModulePath]:
    """Iterate over a module and the modules inside it, in the order of ``named_modules()``."""
    free = itertools.chain([path], (f"{path}#{number}" for number in itertools.count(2)))
    path = next(candidate for candidate in free if candidate not in taken)
    taken.add(path)
    seen.add(id(module))
    yield ModulePath(path, name, module)
    for key, child in module._modules.items():
        if child is not None and id(child) not in seen:
            yield from _unique(child, _joined(path, key), _joined(name, key), taken, seen)


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
