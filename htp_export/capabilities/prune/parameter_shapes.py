"""What the metadata of a model says of parameters whose initializers got other shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from htp_export.format.model_metadata import write_model_metadata
from htp_export.format.parameters import ModuleParameters
from htp_export.model.tagged import TaggedModel

Shape: TypeAlias = tuple[int, ...]


def change_parameters(
    tagged: TaggedModel, changes: Iterable[tuple[str, Shape, Sequence[str], Mapping[str, Shape]]]
) -> None:
    """Write the new shapes of parameters into the metadata; exporters transpose weights and rename them.

    A change is an initializer's name, its shape before, the modules that read it, and what replaces it: what is added
    to the name of the parameter → the shape.
    """
    if tagged.parameters is None:
        return
    parameters = dict(tagged.parameters)
    for name, before, owners, after in changes:
        for path in owners:
            if path in parameters:
                parameters[path] = _changed(parameters[path], name, before, after)
    write_model_metadata(tagged.model.metadata_props, tagged.hierarchy, parameters=parameters)


def _changed(held: ModuleParameters, name: str, before: Shape, after: Mapping[str, Shape]) -> ModuleParameters:
    counterparts = _counterparts(held.shapes, name, before)
    shapes: dict[str, Shape] = {}
    for key, shape in held.shapes.items():
        if key not in counterparts:
            shapes[key] = shape
            continue
        for suffix, new in after.items():
            shapes[f"{key}{suffix}"] = new[::-1] if counterparts[key] else new
    return ModuleParameters(shapes, {key: full for key, full in held.tied.items() if key in shapes})


def _counterparts(listed: Mapping[str, Shape], name: str, shape: Shape) -> dict[str, bool]:
    """The parameters of a module that an initializer stands for, and whether it is transposed.

    They have its name, or its shape. A vector may stand for several, where a normalisation was folded into the weight
    before it. Exporters give a matrix another name when they transpose it, which tells of a square one.
    """
    own = name.rpartition(".")[2]
    if listed.get(own) == shape:
        return {own: False}
    alike = {
        key: len(shape) == 2 and other[::-1] == shape for key, other in listed.items() if shape in (other, other[::-1])
    }
    return alike if len(alike) == 1 or len(shape) == 1 else {}
