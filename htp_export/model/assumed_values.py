"""Parameters that are no longer in a graph, because an optimiser removed what they do with their values.

``x + bias`` is ``x`` if the bias is zero. Such a graph computes the model only for this value, which
is recorded as ``htp.assumed``, so that other weights are not taken for it in silence.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Mapping

import numpy as np
import onnx_ir as ir

from htp_export.errors import FileError, InputError
from htp_export.format import tags
from htp_export.format.model_metadata import assumed_from_json, write_assumed
from htp_export.format.parameters import declared, parameters_from_json
from htp_export.format.recipes import Recipe, is_layout, parameters_in, steps_in
from htp_export.model.recipes import recipe_of

ModulesByParameter = Mapping[str, Collection[str]]


class ReadParameters:
    """The parameters that the nodes of a model read, before an optimiser runs.

    Args:
        tensors: Name → a tensor with its elements; None if no tensor has them. It is read only if the
            parameter is gone afterwards.
    """

    def __init__(self, tensors: Mapping[str, ir.TensorProtocol | None]) -> None:
        self._tensors = tensors

    @classmethod
    def of(cls, model: ir.Model) -> ReadParameters:
        """Return the parameters that the nodes of a tagged model read."""
        return cls(_read(model))

    def record_assumed(self, model: ir.Model) -> None:
        """Record the values of parameters that the nodes of the optimised model do not read any more.

        Only parameters of which all elements are one number: for others, no operation is removed,
        and those that serve their shape alone may go.
        """
        left = _read(model)
        text = model.metadata_props.get(tags.ASSUMED, "{}")
        try:
            assumed = assumed_from_json(text)
        except ValueError as error:
            raise InputError(f"the model has metadata that are not valid: {error}") from error
        for name, tensor in self._tensors.items():
            number = None if name in left or tensor is None else only_number(tensor)
            if number is not None:
                assumed[name] = number
        write_assumed(model.metadata_props, assumed)


def _read(model: ir.Model) -> dict[str, ir.TensorProtocol | None]:
    """Parameter that a node reads → a tensor with its elements; None if no tensor has them unchanged."""
    modules = modules_by_parameter(model.metadata_props)
    found: dict[str, ir.TensorProtocol | None] = {}
    for graph in model.graphs():
        for value in graph.initializers.values():
            recipe = recipe_of(value)
            names = _names_read(value, recipe, modules)
            operands = recipe[1:] if isinstance(recipe, list) and recipe[0] == "equal" else [recipe]
            is_unchanged = all(map(is_layout, operands))
            for name in names:
                if is_unchanged or name not in found:
                    found[name] = value.const_value if is_unchanged else None
    return found


def _names_read(value: ir.Value, recipe: Recipe, modules: ModulesByParameter) -> set[str]:
    """The parameters in a recipe that nodes read; of equal ones, those of the nodes' modules."""
    names = set(parameters_in(recipe))
    if value.is_graph_output() or not any(step[0] == "equal" for step in steps_in(recipe)):
        return names if value.uses() or value.is_graph_output() else set()
    read: set[str] = set()
    for use in value.uses():
        owners = tags.owners_of(use.node.metadata_props)
        read |= {name for name in names if is_held(name, owners, modules)} or names
    return read


def modules_by_parameter(metadata: Mapping[str, str]) -> ModulesByParameter:
    """First name of a parameter → the paths of the modules that have it; empty if they are not listed."""
    modules: defaultdict[str, set[str]] = defaultdict(set)
    with contextlib.suppress(ValueError, KeyError):  # its readers report a faulty list
        for parameter in declared(parameters_from_json(metadata[tags.PARAMETERS])).values():
            modules[parameter.first].add(parameter.module)
    return modules


def is_held(name: str, owners: Collection[str], modules: ModulesByParameter) -> bool:
    """Whether one of some modules has a parameter or buffer."""
    holders = modules.get(name) or {name.rpartition(".")[0]}
    return any(holder in owners for holder in holders)


def only_number(tensor: ir.TensorProtocol) -> float | None:
    """The number that all elements of a tensor are; None if they differ, or are not known.

    Examples:
        >>> only_number(ir.tensor(np.zeros(3))), only_number(ir.tensor(np.arange(3.0)))
        (0.0, None)
    """
    # a tensor on torch's meta device has no elements, and a data file may be missing
    with contextlib.suppress(FileError, TypeError, ValueError, RuntimeError):
        array = np.asarray(tensor.numpy())
        if array.size and (array == array.flat[0]).all():
            return float(array.flat[0])
    return None
