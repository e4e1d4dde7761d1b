"""Parameters that were equal at the export, and share one initializer: each has its own if they differ now.

torch stores equal tensors once, such as the weights of all normalizations of a model that was not
trained. The module of a node tells which of the parameters it reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import onnx_ir as ir

from htp_export.editing.editing import add_initializer
from htp_export.format.recipes import Recipe, operands_of, parameters_in, recipe_to_text, steps_in
from htp_export.model.assumed_values import ModulesByParameter, is_held, modules_by_parameter
from htp_export.model.recipes import recipe_of
from htp_export.model.tagged import TaggedModel
from htp_export.model.tensor_names import names_now, separate_names

_Use = tuple[ir.Node, int]


def tell_apart(tagged: TaggedModel, values: Iterable[ir.Value]) -> list[ir.Value]:
    """Replace shared initializers by one for each parameter; return the new ones.

    An initializer stays if a node reads it for several modules, or for none of the parameters.

    Args:
        tagged: The model, which changes.
        values: Initializers whose parameters differ in the new weights.
    """
    shared = [value for value in values if _is_shared(value)]
    if not shared:
        return []
    modules = modules_by_parameter(tagged.model.metadata_props)
    added: list[ir.Value] = []
    names = names_now(tagged.model)
    for value in shared:
        uses_of = _uses_by_parameter(tagged, value, recipe_of(value), modules)
        if uses_of is not None:
            added += _separate(value, uses_of)
    separate_names(tagged.model, names)
    return added


def _is_shared(value: ir.Value) -> bool:
    """Whether an initializer, which only nodes read, is that of several equal parameters."""
    is_of_equal = any(step[0] == "equal" for step in steps_in(recipe_of(value)))
    return is_of_equal and not value.is_graph_output()


def _uses_by_parameter(
    tagged: TaggedModel, value: ir.Value, recipe: Recipe, modules: ModulesByParameter
) -> list[tuple[Recipe, list[_Use]]] | None:
    """The uses of an initializer by the recipe of the parameter that they read; None if one is not known."""
    uses_of: dict[str, tuple[Recipe, list[_Use]]] = {}
    for use in value.uses():
        own = _own(recipe, tagged.owners_of(use.node), modules)
        if own is None:
            return None
        uses_of.setdefault(recipe_to_text(own), (own, []))[1].append((use.node, use.idx))
    return list(uses_of.values())


def _own(recipe: Recipe, owners: Collection[str], modules: ModulesByParameter) -> Recipe | None:
    """A recipe with the one of equal parameters that some modules have; None if they have several, or none."""
    if not isinstance(recipe, list):
        return recipe
    operands = operands_of(recipe)
    if recipe[0] == "equal":
        held = [operand for operand in operands if _are_held(operand, owners, modules)]
        return held[0] if len(held) == 1 else None
    own: list[Recipe] = []
    for operand in operands:
        part = _own(operand, owners, modules)
        if part is None:
            return None
        own.append(part)
    settings = recipe[1 + len(operands) :]
    return [recipe[0], *own, *settings]


def _are_held(recipe: Recipe, owners: Collection[str], modules: ModulesByParameter) -> bool:
    """Whether all parameters of a recipe are of some modules."""
    return all(is_held(name, owners, modules) for name in parameters_in(recipe))


def _separate(
    value: ir.Value, uses_of: Iterable[tuple[Recipe, Iterable[_Use]]]
) -> Iterator[ir.Value]:
    """Replace an initializer by one for each recipe, for its uses; yield the new ones."""
    graph, tensor = value.graph, value.const_value
    assert isinstance(graph, ir.Graph)
    assert tensor is not None
    graph.initializers.pop(str(value.name))  # one of them has its name
    for own, uses in uses_of:
        name = own if isinstance(own, str) else str(value.name)
        separate = add_initializer(graph, tensor, name, own)
        for node, position in uses:
            node.replace_input_with(position, separate)
        yield separate
