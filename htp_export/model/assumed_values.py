"""Entries of the ``state_dict`` whose values a file was computed with, so that others do not fit.

An optimiser removes ``x + bias`` if the bias is zero: the graph computes the model only for this
value. A tensor that was computed in a way that cannot be repeated fits the entries that it was
computed from, which many checkpoints share: positions, frequencies, masks. Both are recorded as
``htp.assumed``, so that other values are not taken for these in silence.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

import numpy as np
import onnx_ir as ir

from htp_export.errors import FileError, InputError
from htp_export.format import tags
from htp_export.format.model_metadata import assumed_from_json, write_assumed
from htp_export.format.parameters import declared, parameters_from_json
from htp_export.format.recipes import (
    Recipe,
    is_layout,
    is_listed_whole,
    parameters_in,
    steps_in,
)
from htp_export.model.hashes import array_hash
from htp_export.model.recipes import recipe_of

ENTIRE = "="
"""Before the hash of an entry on whose values more depends than tensors that cannot be computed again."""

_UNREADABLE = (FileError, TypeError, ValueError, RuntimeError)
"""A tensor on torch's meta device has no elements, and a data file may be missing."""

ModulesByParameter = Mapping[str, Collection[str]]


class ReadParameters:
    """The parameters that the nodes of a model read, before an optimiser runs.

    Args:
        tensors: Name → a tensor with its elements; None if no tensor has them. It is read only if the
            parameter is gone afterwards.
        entries: Name → a tensor with its elements in its own layout.
    """

    def __init__(
        self,
        tensors: Mapping[str, ir.TensorProtocol | None],
        entries: Mapping[str, ir.TensorProtocol],
    ) -> None:
        self._tensors = tensors
        self._entries = entries

    @classmethod
    def of(cls, model: ir.Model) -> ReadParameters:
        """Return the parameters that the nodes of a tagged model read."""
        return cls(_read(model), _stored_as_they_are(model))

    def record_assumed(self, model: ir.Model) -> None:
        """Record the values of entries that the optimised model was computed with.

        Numbers of parameters that nodes do not read any more, if all elements are one number: for
        others, no operation is removed, and those that serve their shape alone may go. Hashes of
        entries of tensors that cannot be computed again.
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
        hashes = hashes_of_assumed(map(recipe_of, _initializers(model)), self._entries)
        write_assumed(model.metadata_props, {**hashes, **assumed})


def hashes_of_assumed(
    recipes: Iterable[Recipe], entries: Mapping[str, ir.TensorProtocol]
) -> dict[str, str]:
    """Return entry → hash, for the entries of tensors that cannot be computed again."""
    names: set[str] = set()
    for recipe in recipes:
        if is_listed_whole(recipe):
            names.update(parameters_in(recipe))
    hashes: dict[str, str] = {}
    for name in sorted(names & entries.keys()):
        hashed = hash_of_entry(entries[name])
        if hashed is not None:
            hashes[name] = hashed
    return hashes


def hash_of_entry(tensor: ir.TensorProtocol) -> str | None:
    """The hash of the elements of a tensor, in order; None if they are not known."""
    with contextlib.suppress(*_UNREADABLE):
        return array_hash(np.asarray(tensor.numpy())).hex()
    return None


def _initializers(model: ir.Model) -> Iterator[ir.Value]:
    for graph in model.graphs():
        yield from graph.initializers.values()


def _stored_as_they_are(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    """Entry → the tensor of a model that is equal to it."""
    stored: dict[str, ir.TensorProtocol] = {}
    for value in _initializers(model):
        for recipe in _recipes_of_equal(value):
            if isinstance(recipe, str) and value.const_value is not None:
                stored[recipe] = value.const_value
    return stored


def _recipes_of_equal(value: ir.Value) -> list[Recipe]:
    """The recipe of an initializer, or the recipes of the equal tensors that it replaced."""
    recipe = recipe_of(value)
    return recipe[1:] if isinstance(recipe, list) and recipe[0] == "equal" else [recipe]


def _read(model: ir.Model) -> dict[str, ir.TensorProtocol | None]:
    """Parameter that a node reads → a tensor with its elements; None if no tensor has them unchanged."""
    modules = modules_by_parameter(model.metadata_props)
    found: dict[str, ir.TensorProtocol | None] = {}
    for value in _initializers(model):
        names = _names_read(value, recipe_of(value), modules)
        is_unchanged = all(map(is_layout, _recipes_of_equal(value)))
        for name in names:
            if is_unchanged or name not in found:
                found[name] = value.const_value if is_unchanged else None
    return found


def _names_read(value: ir.Value, recipe: Recipe, modules: ModulesByParameter) -> set[str]:
    """The parameters in a recipe that nodes read; of equal ones, the ones of the nodes' modules."""
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
    with contextlib.suppress(*_UNREADABLE):
        array = np.asarray(tensor.numpy())
        if array.size and (array == array.flat[0]).all():
            return float(array.flat[0])
    return None
