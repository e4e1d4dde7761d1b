"""The stored tensors that nodes read, and the places of PyTorch's parameters in them.

The file lists the parameters of each module, and the parameters from which an initializer was
computed. For an initializer of a tool without a recipe, only the modules of its consumers are
known: their parameters without a place are ``merged`` into it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import onnx
import onnx_ir as ir

from htp_export.format import tags
from htp_export.format.parameters import Declared
from htp_export.format.recipes import Recipe, is_exact, operands_of, parameters_in
from htp_export.format.tags import Reason
from htp_export.model.module_facts import elements_of, is_weight, stored_tensor
from htp_export.model.recipes import recipe_of
from htp_export.model.tagged import TaggedModel
from htp_export.shapes.operator_kinds import IN_PLACE, LAYOUT, RESHAPING, is_standard

_MOVES = {
    "Transpose": "transposed",
    "Expand": "repeated",
    "Cast": "cast",
    "CastLike": "cast",
    "QuantizeLinear": "quantized",
    "DequantizeLinear": "dequantized",
    **dict.fromkeys(RESHAPING, "reshaped"),
}


@dataclass(frozen=True)
class WeightSource:
    """A stored tensor with the numbers of a value.

    Attributes:
        tensor: The initializer, or the output of a ``Constant``.
        steps: The nodes between them; the first one reads the tensor.
        within: The modules of the function calls to which it was passed, the outermost first.
    """

    tensor: ir.Value
    steps: tuple[ir.Node, ...] = ()
    within: tuple[str, ...] = ()

    @property
    def how(self) -> tuple[str, ...]:
        """The operations between them, a word for each operator that changes something."""
        return tuple(_MOVES[step.op_type] for step in self.steps if step.op_type in _MOVES)


class WeightSources:
    """The stored tensors with the numbers of the values of one model.

    A value that is computed from several tensors has no source. An argument of a function has one
    for each call.

    Args:
        tagged: The model.
    """

    def __init__(self, tagged: TaggedModel) -> None:
        self._tagged = tagged
        self._known: dict[ir.Value, tuple[WeightSource, ...]] = {}
        self._positions: dict[ir.Graph, dict[ir.Value, int]] = {}

    def calls_function(self, node: ir.Node) -> bool:
        """Whether a node calls a function of the model, whose nodes read its arguments."""
        return node.op_identifier() in self._tagged.model.functions

    def read_by(self, node: ir.Node) -> Iterator[tuple[int, WeightSource]]:
        """The position of each input of a node that has sources, and each of its sources."""
        for position, value in enumerate(node.inputs):
            if value is not None:
                yield from ((position, source) for source in self.of(value))

    def of(self, value: ir.Value) -> tuple[WeightSource, ...]:
        """The sources of a value; none if it is computed, or an input of the model."""
        chain: list[tuple[ir.Value, ir.Node]] = []
        while value not in self._known:
            producer = value.producer()
            moved = None if producer is None else _moved(producer)
            if producer is None or moved is None:
                self._known[value] = self._ends(value)
                break
            chain.append((value, producer))
            value = moved
        sources = self._known[value]
        for later, step in reversed(chain):
            sources = tuple(replace(source, steps=(*source.steps, step)) for source in sources)
            self._known[later] = sources
        return sources

    def _ends(self, value: ir.Value) -> tuple[WeightSource, ...]:
        """The sources of a value that no layout operator produces."""
        if value.is_initializer() or is_standard(value.producer(), "Constant"):
            return (WeightSource(value),) if stored_tensor(value) is not None else ()
        graph = value.graph
        if not value.is_graph_input() or graph is None or graph not in self._tagged.index.calls:
            return ()
        # A function that calls itself is not valid, but the file may be untrusted.
        self._known[value] = ()
        if graph not in self._positions:
            self._positions[graph] = {formal: k for k, formal in enumerate(graph.inputs)}
        position = self._positions[graph][value]
        return tuple(self._passed(self._tagged.index.calls[graph], position))

    def _passed(self, calls: Sequence[ir.Node], position: int) -> Iterator[WeightSource]:
        for call in calls:
            argument = call.inputs[position] if position < len(call.inputs) else None
            owners = self._tagged.owners_of(call)
            for source in self.of(argument) if argument is not None else ():
                module = tags.common_ancestor(owners_within(owners, source.within))
                yield replace(source, within=(*source.within, module))


def _moved(node: ir.Node) -> ir.Value | None:
    """The input whose numbers an operator only moves; None for other operators."""
    is_moving = is_standard(node) and (node.op_type in LAYOUT or node.op_type in IN_PLACE)
    return node.inputs[0] if is_moving and node.inputs else None


def owners_within(owners: Sequence[str], within: Sequence[str]) -> tuple[str, ...]:
    """The owners of a function's node that are at or below the modules of its calls, or all.

    Examples:
        >>> owners_within(("layer.0.fc", "layer.1.fc"), ["layer.1"]), owners_within(("head",), ["layer.1"])
        (('layer.1.fc',), ('head',))
    """
    for module in within:
        owners = [owner for owner in owners if tags.is_under(owner, module)] or owners
    return tuple(owners)


_MOST_BITS = 8  # of the elements of a quantized tensor

_ROUNDING = ("quantize", "round", "round_bias")
"""Steps with the levels, the scales or the zero points of a weight; the setting begins with this part."""

_WORDS = {
    "transpose": "transposed",
    **dict.fromkeys(("reshape", "squeeze", "unsqueeze"), "reshaped"),
    "expand": "repeated",
    **dict.fromkeys(("cast", "narrow"), "cast"),
    **dict.fromkeys(("slice", "take"), "sliced"),
    "concat": "joined",
    **dict.fromkeys(_ROUNDING, "quantized"),
    "masked": "masked",
}
"""Step of a recipe → its word for the operation on a parameter; other steps compute with it."""


@dataclass(frozen=True)
class Place:
    """A parameter in a stored tensor.

    Attributes:
        parameter: The parameter; of tied ones, the first.
        how: The operations on it, in order; empty if the tensor is the parameter itself.
        is_copy: Whether the tensor belongs to another parameter, which has the same values.
    """

    parameter: str
    how: tuple[str, ...] = ()
    is_copy: bool = False


def places_in(recipe: Recipe) -> Iterator[Place]:
    """The parameters and buffers in a recipe, and the operations on each.

    Examples:
        >>> halves = [["slice", "w", [0, 2, 4, 1]], ["slice", "w", [0, 0, 2, 1]]]
        >>> [gates] = {*places_in(["concat", *halves, 0])}
        >>> gates.how, [place.how for place in places_in(["transpose", ["mul", "w", "scale"], [1, 0]])]
        (('reordered',), [('merged', 'transposed'), ('merged', 'transposed')])
    """
    if isinstance(recipe, str):
        yield Place(recipe)
    if not isinstance(recipe, list):
        return
    names = [{*parameters_in(operand)} for operand in operands_of(recipe)]
    every = set[str]().union(*names)
    # A concatenation of parts of the same parameters changes only their order.
    is_reordering = recipe[0] == "concat" and len(names) > 1 and all(of == every for of in names)
    for number, operand in enumerate(operands_of(recipe)):
        for place in places_in(operand):
            if recipe[0] == "equal":
                yield replace(place, is_copy=place.is_copy or number > 0)
                continue
            word, how = _WORDS.get(recipe[0]), place.how
            if is_reordering:
                word, how = "reordered", ()
            elif word is None:
                word, how = "merged" if len(every) > 1 else "computed", ()
            # A word is not repeated, except that two transposes may cancel out.
            is_repeated = word in how and word != "transposed"
            yield replace(place, how=how if is_repeated else (*how, word))


@dataclass
class _Stored:
    """A stored tensor, its recipe, and the owners of the nodes that read it.

    ``merged_owners``: Owners of nodes that do parts of the work of several modules, not equal work
    of each.
    """

    value: ir.Value
    recipe: Recipe
    owners: dict[str, None] = field(default_factory=dict)
    merged_owners: set[str] = field(default_factory=set)
    is_weight: bool = False
    places: dict[str, Place] = field(default_factory=dict)

    @property
    def tensor(self) -> ir.TensorProtocol:
        tensor = stored_tensor(self.value)
        assert tensor is not None
        return tensor

    @property
    def is_quantized(self) -> bool:
        return self.tensor.dtype.is_integer() and self.tensor.dtype.bitwidth <= _MOST_BITS

    @cached_property
    def parameters(self) -> frozenset[str]:
        return frozenset(parameters_in(self.recipe))

    @property
    def is_computed(self) -> bool:
        """Whether it may be one of several tensors of one parameter, such as levels and scales."""
        if not isinstance(self.recipe, list):
            return False
        return self.recipe[0] in ("computed", *_ROUNDING) and bool(self.parameters)

    @property
    def is_scale(self) -> bool:
        """Whether its recipe is of the scales or zero points of a rounded weight."""
        if not isinstance(self.recipe, list) or self.recipe[0] not in _ROUNDING:
            return False
        return bool(self.recipe[-1][0] != "levels")


@cache
def _scales_of(domain: str, op_type: str) -> frozenset[int]:
    """The inputs of a quantized operator that are scales and zero points, by the schema's names."""
    if domain or not onnx.defs.has(op_type):
        return frozenset()
    names = [formal.name for formal in onnx.defs.get_schema(op_type).inputs]
    return frozenset(k for k, name in enumerate(names) if name.endswith(("_scale", "_zero_point")))


def _declared(tagged: TaggedModel) -> Mapping[str, Declared]:
    """The parameters in the file's list; without one, float initializers named after modules."""
    if tagged.declared is not None:
        return tagged.declared
    parameters = {}
    for name, value in tagged.model.graph.initializers.items():
        module, tensor = name.rpartition(".")[0], value.const_value
        if module and module in tagged and tensor is not None and tensor.dtype.is_floating_point():
            parameters[name] = Declared(name, module, tuple(tensor.shape.numpy()))
    return parameters


class ParameterPlaces:
    """The parameters in each stored tensor.

    Args:
        tagged: The model. Values are not read.
        sources: The stored tensors of its values.

    Attributes:
        declared: Full name → parameter.
        places: Stored tensor → the parameters in it, for every tensor that a node reads.
    """

    def __init__(self, tagged: TaggedModel, sources: WeightSources) -> None:
        self.declared = _declared(tagged)
        self._tagged = tagged
        # parameter → its names, the first one first
        self._names: defaultdict[str, list[str]] = defaultdict(list)
        for each in self.declared.values():
            self._names[each.first].append(each.name)
        self._stored = self._read(sources)
        self._by_recipe()
        self._by_owners()
        self.places: Mapping[ir.Value, Sequence[Place]] = {
            value: tuple(stored.places.values())
            for value, stored in self._stored.items()
            if stored.places or stored.is_weight
        }

    def name_in(self, parameter: str, owners: Sequence[str]) -> str:
        """The name of a parameter in one of some modules; of tied ones, else the first."""
        return next(iter(self._names_in(parameter, owners)), parameter)

    def read_in(self, tensor: ir.Value, owners: Sequence[str]) -> Sequence[Place]:
        """The parameters of a tensor that some modules read; of equal ones, their own."""
        places = self.places[tensor]
        if not any(place.is_copy for place in places):
            return places
        held = [place for place in places if self._names_in(place.parameter, owners)]
        return held or [place for place in places if not place.is_copy] or places

    def _names_in(self, parameter: str, owners: Sequence[str]) -> list[str]:
        return [name for name in self._names[parameter] if self.declared[name].module in owners]

    def _read(self, sources: WeightSources) -> dict[ir.Value, _Stored]:
        """The stored tensors that nodes read; scales of quantization are not weights."""
        stored: dict[ir.Value, _Stored] = {}
        for node, owners in self._tagged.index.owners.items():
            if sources.calls_function(node):
                continue
            is_shared = node.metadata_props.get(tags.REASON) == Reason.SHARED
            # parameters → elements of the largest tensor that is computed from them
            largest: defaultdict[frozenset[str], int] = defaultdict(int)
            read = list(sources.read_by(node))
            for _, source in read:
                if source.tensor not in stored:
                    stored[source.tensor] = _Stored(source.tensor, recipe_of(source.tensor))
                each = stored[source.tensor]
                readers = owners_within(owners, source.within)
                each.owners.update(dict.fromkeys(readers))
                if len(readers) > 1 and not is_shared:
                    each.merged_owners.update(readers)
                largest[each.parameters] = max(largest[each.parameters], elements_of(each.value))
            for position, source in read:
                each = stored[source.tensor]
                is_scale = position in _scales_of(node.domain, node.op_type)
                if each.is_computed and elements_of(each.value) < largest[each.parameters]:
                    is_scale = True
                each.is_weight = each.is_weight or (not is_scale and is_weight(each.value, node))
        return stored

    def _by_recipe(self) -> None:
        """Place parameters in the tensors whose recipes contain them."""
        quantized = set[frozenset[str]]()
        for stored in self._stored.values():
            if stored.is_computed and stored.is_quantized:
                quantized.add(stored.parameters)
        for stored in self._stored.values():
            is_vector = len(stored.tensor.shape) < 2 and not stored.tensor.dtype.is_integer()
            is_scale = stored.is_computed and is_vector and stored.parameters in quantized
            if is_scale or stored.is_scale:
                stored.is_weight = False
                continue
            if stored.is_weight or not stored.is_computed:
                self._place_by_recipe(stored)

    def _place_by_recipe(self, stored: _Stored) -> None:
        """Add the declared parameters in the recipe of one tensor to its places."""
        for place in places_in(stored.recipe):
            declared = self.declared.get(place.parameter)
            if declared is None:
                continue
            how = place.how
            if stored.tensor.dtype.is_integer() and "quantized" not in how:
                how = (*(word for word in how if word != "computed"), "quantized")
            stored.places.setdefault(declared.first, Place(declared.first, how, place.is_copy))

    def _by_owners(self) -> None:
        """Place parameters without a place in tensors without an exact recipe, of their modules."""
        placed = {name for each in self._stored.values() for name in each.places}
        modules_with_places = {self.declared[name].module for name in placed}
        candidates = self._without_recipe()
        empty = {stored.value for stored in self._stored.values() if not stored.places}
        merged: dict[ir.Value, _Stored] = {}
        for parameter in self.declared.values():
            if parameter.first in placed:
                continue
            module = parameter.module
            for stored in candidates[module]:
                is_merged = module not in modules_with_places and module in stored.merged_owners
                if stored.value in empty or is_merged:
                    stored.places.setdefault(parameter.first, Place(parameter.first))
                    merged[stored.value] = stored
        for stored in merged.values():
            stored.places = {name: Place(name, ("merged",)) for name in stored.places}

    def _without_recipe(self) -> defaultdict[str, list[_Stored]]:
        """Module → the weights without an exact recipe that its nodes read."""
        weights: defaultdict[str, list[_Stored]] = defaultdict(list)
        for stored in self._stored.values():
            # The default recipe of a tool's tensor is its own name.
            is_default = stored.recipe == stored.value.name and not stored.places
            if stored.is_weight and (is_default or not is_exact(stored.recipe)):
                for owner in stored.owners:
                    weights[owner].append(stored)
        return weights
