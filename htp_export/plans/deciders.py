"""Whose work a node does, and which of several modules have a say in what becomes of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import onnx_ir as ir

from htp_export.format import tags
from htp_export.format.call_tree import Instance, Part
from htp_export.format.linked_sets import LinkedSet
from htp_export.model.module_facts import elements_of, is_weight
from htp_export.model.tagged import TaggedModel
from htp_export.weights.parameter_places import ParameterPlaces
from htp_export.weights.weight_sources import WeightSources

_ROOT = Part(Instance(""), LinkedSet(), LinkedSet([""]))


def parts_of(tagged: TaggedModel, node: ir.Node) -> tuple[Part, ...]:
    """The parts of a node's work, in the order of execution; a node without owners is the root's."""
    return tagged.index.works[node].parts or (_ROOT,)


class Deciders:
    """Which of several modules have a say in what becomes of a node.

    Args:
        tagged: The model.
    """

    def __init__(self, tagged: TaggedModel) -> None:
        self._tagged = tagged

    def of(self, node: ir.Node) -> tuple[Part, ...]:
        """The parts of a node's work whose modules decide; of modules merged into it, that which keeps a weight."""
        parts = parts_of(self._tagged, node)
        return self._keepers(node, parts)[:1] if len(parts) > 1 and all(map(self._is_fused, parts)) else parts

    def with_a_say(self, node: ir.Node, said: Mapping[Part, int | None]) -> Iterator[Sequence[Part]]:
        """The parts that have to agree on a node; then, if they do not, fewer."""
        yield tuple(said)
        if len(said) > 1:
            yield [part for part, number in said.items() if number is not None or not self._is_fused(part)]
            if all(map(self._is_fused, said)):
                yield self._keepers(node, tuple(said))

    def _is_fused(self, part: Part) -> bool:
        return self._tagged.hierarchy[part.call.path].fate.is_merged

    @cached_property
    def _sources(self) -> WeightSources:
        return WeightSources(self._tagged)

    @cached_property
    def _places(self) -> ParameterPlaces:
        return ParameterPlaces(self._tagged, self._sources)

    def _keepers(self, node: ir.Node, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """The parts whose modules hold the largest weight that a node reads; all if there is none, or none is known."""
        read = [source.tensor for _, source in self._sources.read_by(node) if is_weight(source.tensor, node)]
        places = self._places.places.get(max(read, key=elements_of), ()) if read else ()
        owners = [part.call.path for part in parts]
        held = [(place, self._places.declared[self._places.name_in(place.parameter, owners)]) for place in places]
        most = max((math.prod(each.shape) for _, each in held), default=0)
        whole = {each.module for place, each in held if "merged" not in place.how or math.prod(each.shape) == most}
        return tuple(part for part in parts if any(tags.is_under(path, part.call.path) for path in whole)) or parts
