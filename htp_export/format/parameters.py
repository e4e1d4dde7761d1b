"""Parameters: what each module of the PyTorch model holds, by name and shape.

Written at export as ``htp.parameters``, since a file's initializers do not tell: buffers are among them, a BatchNorm is
folded into its convolution, and equal tensors are merged. See ``docs/format.md``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from htp_export.format import tags
from htp_export.format.module_paths import module_paths

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Held", "parameters_from_json", "parameters_of", "parameters_to_json"]


@dataclass(frozen=True)
class Held:
    """The parameters that one module holds itself.

    Attributes:
        shapes: Name in the module → shape.
        tied: Name in the module → full name under which a module before it holds the same parameter.
    """

    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str] = field(default_factory=dict)


def parameters_of(model: nn.Module) -> dict[str, Held]:
    """Module path → its parameters, for the modules that hold any; those without a shape yet are left out.

    Examples:
        >>> import torch
        >>> parameters_of(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()))["0"].shapes
        {'weight': (3, 4), 'bias': (3,)}
    """
    from torch.nn.parameter import UninitializedParameter

    first: dict[int, str] = {}
    found = {}
    for path, _, module in module_paths(model):
        shapes, tied = {}, {}
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if isinstance(parameter, UninitializedParameter):
                continue
            full = f"{path}.{name}" if path else name
            shapes[name] = tuple(parameter.shape)
            if first.setdefault(id(parameter), full) != full:
                tied[name] = first[id(parameter)]
        if shapes:
            found[path] = Held(shapes, tied)
    return found


def parameters_to_json(parameters: Mapping[str, Held]) -> str:
    """The file format's ``htp.parameters``: module path → name → shape, or the name of the one that it is tied to.

    Examples:
        >>> tail = Held({"w": (3, 4)}, tied={"w": "head.weight"})
        >>> parameters_to_json({"head": Held({"weight": (3, 4)}), "tail": tail})
        '{"head":{"weight":[3,4]},"tail":{"w":"head.weight"}}'
    """
    written: set[str] = set()
    plain: dict[str, dict[str, str | list[int]]] = {}
    for path, held in parameters.items():
        plain[path] = {}
        for name, shape in held.shapes.items():
            first = held.tied.get(name)
            plain[path][name] = first if first in written and first is not None else list(shape)
            written.add(f"{path}.{name}" if path else name)
    return json.dumps(plain, separators=(",", ":"), ensure_ascii=False)


def parameters_from_json(text: str) -> dict[str, Held]:
    """What ``parameters_to_json`` wrote.

    Raises:
        ValueError: If it is not what the file format says; the message names the module at fault.

    Examples:
        >>> parameters_from_json('{"head":{"weight":[3,4]},"tail":{"w":"head.weight"}}')["tail"]
        Held(shapes={'w': (3, 4)}, tied={'w': 'head.weight'})
    """
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{tags.PARAMETERS} is not JSON: {error}") from error
    if not isinstance(listed, dict) or not all(isinstance(entry, dict) for entry in listed.values()):
        raise ValueError(f"{tags.PARAMETERS} is not a JSON object of modules and their parameters")
    shapes: dict[str, tuple[int, ...]] = {}
    found = {}
    for path, entry in listed.items():
        here: dict[str, tuple[int, ...]] = {}
        tied = {}
        for name, said in entry.items():
            if isinstance(said, str) and said in shapes:
                here[name], tied[name] = shapes[said], said
            elif isinstance(said, list) and all(isinstance(size, int) and size >= 0 for size in said):
                here[name] = tuple(said)
            else:
                raise ValueError(f"{tags.PARAMETERS}: {name!r} of module {path!r} has no shape: {said!r}")
            shapes[f"{path}.{name}" if path else name] = here[name]
        found[path] = Held(here, tied)
    return found
