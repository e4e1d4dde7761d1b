"""The parameters of each PyTorch module, by name and shape.

An export writes them as ``htp.parameters``, because they differ from the initializers: these
include buffers, a BatchNorm is folded into its convolution, and equal tensors are merged. See
``docs/format.md``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from htp_export.format import tags
from htp_export.format.bounds import MOST_DIMENSIONS
from htp_export.format.hierarchy import module_paths

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ModuleParameters:
    """The shapes of the parameters of one module, without its children.

    ``tied``: name of a parameter that an earlier module has, too → its full name there. ``frozen``:
    the names of those that do not train (``requires_grad``); None if that is unknown.
    """

    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str] = field(default_factory=dict)
    frozen: frozenset[str] | None = None

    @property
    def is_tied(self) -> bool:
        """Whether all are parameters of earlier modules, as in a shared module at its second path."""
        return self.tied.keys() == self.shapes.keys()


@dataclass(frozen=True)
class Declared:
    """A parameter of the PyTorch model.

    ``tied`` is its full name in an earlier module, or ``""``; ``trains`` is None if unknown.
    """

    name: str
    module: str
    shape: tuple[int, ...]
    tied: str = ""
    trains: bool | None = None

    @property
    def first(self) -> str:
        """The full name of the parameter in the first module that has it."""
        return self.tied or self.name


def declared(parameters: Mapping[str, ModuleParameters]) -> dict[str, Declared]:
    """Return full name → parameter, of all modules.

    Examples:
        >>> declared({"tail": ModuleParameters({"w": (3, 4)}, {"w": "head.w"})})["tail.w"].first
        'head.w'
    """
    by_name: dict[str, Declared] = {}
    for path, module in parameters.items():
        for name, shape in module.shapes.items():
            full_name = tags.below(path, name)
            tied = module.tied.get(name, "")
            trains = None if module.frozen is None else name not in module.frozen
            by_name[full_name] = Declared(full_name, path, tuple(shape), tied, trains)
    return by_name


def parameters_of(model: nn.Module) -> dict[str, ModuleParameters]:
    """Return module path → parameters, for modules with parameters; uninitialized parameters are left out.

    A module that is registered under several names stands under each of them, as in ``state_dict``.

    Examples:
        >>> import torch
        >>> parameters_of(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()))["0"].shapes
        {'weight': (3, 4), 'bias': (3,)}
    """
    from torch.nn.parameter import UninitializedParameter

    first: dict[int, str] = {}
    parameters = {}
    for path, module in _registered(model):
        shapes, tied, frozen = {}, {}, set[str]()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if isinstance(parameter, UninitializedParameter):
                continue
            full = tags.below(path, name)
            shapes[name] = tuple(parameter.shape)
            if not parameter.requires_grad:
                frozen.add(name)
            if first.setdefault(id(parameter), full) != full:
                tied[name] = first[id(parameter)]
        if shapes:
            parameters[path] = ModuleParameters(shapes, tied, frozenset(frozen))
    return parameters


def _registered(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over the modules by path; one with several names comes again under each other name."""
    paths = {id(module): path for path, _, module in module_paths(model)}
    for name, module in model.named_modules(remove_duplicate=False):
        yield paths.pop(id(module), name), module


def frozen_to_json(parameters: Mapping[str, ModuleParameters]) -> str | None:
    """Return the value of ``htp.frozen``: module path → names of parameters that do not train.

    None if that is unknown.

    Examples:
        >>> frozen_to_json({"fc": ModuleParameters({"w": (3, 4)}, frozen=frozenset({"w"}))})
        '{"fc":["w"]}'
    """
    entries: dict[str, list[str]] = {}
    for path, module in parameters.items():
        if module.frozen is None:
            return None
        if module.frozen:
            entries[path] = sorted(module.frozen)
    return tags.json_text(entries)


def with_frozen(
    parameters: Mapping[str, ModuleParameters], text: str | None
) -> dict[str, ModuleParameters]:
    """Return parameters with the value of ``htp.frozen``, None for a file without it.

    A ValueError names the module at fault.
    """
    if text is None:
        return dict(parameters)
    entries = tags.json_object(tags.FROZEN, text, "modules and their frozen parameters", list)
    for path, names in entries.items():
        if not all(isinstance(name, str) for name in names):
            raise ValueError(f"{tags.FROZEN}: module {path!r} has no list of names: {names!r}")
    return {
        path: replace(module, frozen=frozenset(entries.get(path, ())))
        for path, module in parameters.items()
    }


def parameters_to_json(parameters: Mapping[str, ModuleParameters]) -> str:
    """Return the value of ``htp.parameters``: module path → name → shape, or the name of the tied parameter."""
    written: set[str] = set()
    entries: dict[str, dict[str, str | list[int]]] = {}
    for path, module in parameters.items():
        entry: dict[str, str | list[int]] = {}
        for name, shape in module.shapes.items():
            first = module.tied.get(name)
            entry[name] = first if first is not None and first in written else list(shape)
            written.add(tags.below(path, name))
        entries[path] = entry
    return tags.json_text(entries)


def _is_shape(shape: object) -> bool:
    if not isinstance(shape, list) or len(shape) > MOST_DIMENSIONS:
        return False
    return all(type(size) is int and size >= 0 for size in shape)


def parameters_from_json(text: str) -> dict[str, ModuleParameters]:
    """Parse the value of ``htp.parameters``; a ValueError names the module at fault.

    Examples:
        >>> parameters_from_json('{"head":{"weight":[3,4]},"tail":{"w":"head.weight"}}')["tail"]
        ModuleParameters(shapes={'w': (3, 4)}, tied={'w': 'head.weight'}, frozen=None)
    """
    entries = tags.json_object(tags.PARAMETERS, text, "modules and their parameters", dict)
    shapes: dict[str, tuple[int, ...]] = {}  # by full name
    parameters = {}
    for path, entry in entries.items():
        module_shapes: dict[str, tuple[int, ...]] = {}
        tied = {}
        for name, shape in entry.items():
            if isinstance(shape, str) and shape in shapes:
                module_shapes[name] = shapes[shape]
                tied[name] = shape
            elif _is_shape(shape):
                module_shapes[name] = tuple(shape)
            else:
                raise ValueError(
                    f"{tags.PARAMETERS}: {name!r} of module {path!r} has no valid shape: {shape!r}"
                )
            shapes[tags.below(path, name)] = module_shapes[name]
        parameters[path] = ModuleParameters(module_shapes, tied)
    return parameters
