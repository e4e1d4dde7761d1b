"""The parameters of each PyTorch module, by name and shape.

The export writes them as ``htp.parameters``, because initializers do not show them: buffers are
among them, a BatchNorm is folded into its convolution, and equal tensors are merged. See
``docs/format.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from htp_export.format import tags
from htp_export.format.bounds import MOST_DIMENSIONS
from htp_export.format.hierarchy import module_paths

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ModuleParameters:
    """The shapes of the parameters of one module alone; of a tied one, its full name in an earlier module."""

    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Declared:
    """A parameter that PyTorch had; ``tied`` is the name of the same one in an earlier module, or ``""``."""

    name: str
    module: str
    shape: tuple[int, ...]
    tied: str = ""

    @property
    def first(self) -> str:
        """The name that the parameter has in the first module that holds it."""
        return self.tied or self.name


def declared(parameters: Mapping[str, ModuleParameters]) -> dict[str, Declared]:
    """Full name → parameter, of every module.

    Examples:
        >>> declared({"tail": ModuleParameters({"w": (3, 4)}, {"w": "head.w"})})["tail.w"].first
        'head.w'
    """
    listed = (
        Declared(tags.below(path, name), path, tuple(shape), held.tied.get(name, ""))
        for path, held in parameters.items()
        for name, shape in held.shapes.items()
    )
    return {parameter.name: parameter for parameter in listed}


def parameters_of(model: nn.Module) -> dict[str, ModuleParameters]:
    """Return module path → parameters, for modules with parameters; uninitialized parameters are left out.

    Examples:
        >>> import torch
        >>> parameters_of(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()))["0"].shapes
        {'weight': (3, 4), 'bias': (3,)}
    """
    from torch.nn.parameter import UninitializedParameter

    first: dict[int, str] = {}
    parameters = {}
    for path, _, module in module_paths(model):
        shapes, tied = {}, {}
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if isinstance(parameter, UninitializedParameter):
                continue
            full = tags.below(path, name)
            shapes[name] = tuple(parameter.shape)
            if first.setdefault(id(parameter), full) != full:
                tied[name] = first[id(parameter)]
        if shapes:
            parameters[path] = ModuleParameters(shapes, tied)
    return parameters


def parameters_to_json(parameters: Mapping[str, ModuleParameters]) -> str:
    """Return the value of ``htp.parameters``: module path → name → shape, or the name of the tied parameter."""
    written: set[str] = set()
    plain: dict[str, dict[str, str | list[int]]] = {}
    for path, module in parameters.items():
        plain[path] = {}
        for name, shape in module.shapes.items():
            first = module.tied.get(name)
            plain[path][name] = first if first in written and first is not None else list(shape)
            written.add(tags.below(path, name))
    return tags.json_text(plain)


def _is_shape(shape: object) -> bool:
    return (
        isinstance(shape, list)
        and len(shape) <= MOST_DIMENSIONS
        and all(type(size) is int and size >= 0 for size in shape)
    )


def parameters_from_json(text: str) -> dict[str, ModuleParameters]:
    """Parse the value of ``htp.parameters``; a ValueError names the module at fault.

    Examples:
        >>> parameters_from_json('{"head":{"weight":[3,4]},"tail":{"w":"head.weight"}}')["tail"]
        ModuleParameters(shapes={'w': (3, 4)}, tied={'w': 'head.weight'})
    """
    listed = tags.json_object(tags.PARAMETERS, text, "modules and their parameters", dict)
    shapes: dict[str, tuple[int, ...]] = {}
    parameters = {}
    for path, entry in listed.items():
        module_shapes: dict[str, tuple[int, ...]] = {}
        tied = {}
        for name, shape in entry.items():
            if isinstance(shape, str) and shape in shapes:
                module_shapes[name], tied[name] = shapes[shape], shape
            elif _is_shape(shape):
                module_shapes[name] = tuple(shape)
            else:
                raise ValueError(
                    f"{tags.PARAMETERS}: {name!r} of module {path!r} has no shape: {shape!r}"
                )
            shapes[tags.below(path, name)] = module_shapes[name]
        parameters[path] = ModuleParameters(module_shapes, tied)
    return parameters
