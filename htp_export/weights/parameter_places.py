"""Where the parameters that PyTorch had are in a file: parameter → initializers, by names, owners and shapes.

The file says which parameters each module holds (``htp.parameters``), not what became of them. Exporters keep the name
of a weight that they do not change; those that they transpose, fold or merge get new names. What is known is used in
this order, and each parameter that has found its place is no candidate any more:

1. An initializer has the name of a parameter, alone or with an addition (``fc.weight_quantized``).
2. An initializer that a module's nodes read has the dimensions of one of its parameters, in any order.
3. The elements of several parameters of the owners add up to those of an initializer: they are ``joined``.
4. An initializer of another module has the dimensions of the parameter: exporters keep equal weights once.
5. All that is left: the parameter is ``merged`` into the initializers that its module's nodes read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from htp_export.format import tags
from htp_export.format.parameters import Declared
from htp_export.format.reasons import Reason
from htp_export.model.module_facts import is_weight, stored_tensor
from htp_export.model.tagged import TaggedModel
from htp_export.weights.parameter_evidence import (
    Place,
    StoredWeight,
    WeightReader,
    beginnings,
    dims_of,
    scales_of,
)
from htp_export.weights.weight_sources import WeightSources, owners_within

__all__ = ["ParameterPlaces", "Place"]


def _declared(tagged: TaggedModel) -> Mapping[str, Declared]:
    """The parameters that the file declares; else initializers of floats that are named after a module."""
    if tagged.declared is not None:
        return tagged.declared
    parameters = {}
    for name, value in tagged.model.graph.initializers.items():
        module, tensor = name.rpartition(".")[0], value.const_value
        if module and module in tagged and tensor is not None and tensor.dtype.is_floating_point():
            parameters[name] = Declared(name, module, tuple(tensor.shape.numpy()))
    return parameters


class ParameterPlaces:
    """Which stored tensors hold which parameters.

    Args:
        tagged: The model. Values are not read.
        sources: What its values have their numbers from.

    Attributes:
        declared: Full name → parameter.
        places: Stored tensor → the parameters that it holds, for every tensor that a node reads.
    """

    def __init__(self, tagged: TaggedModel, sources: WeightSources) -> None:
        self.declared = _declared(tagged)
        self._tagged = tagged
        self._names: defaultdict[str, list[str]] = defaultdict(list)  # a parameter → its names, the first one first
        self._held: defaultdict[str, list[str]] = defaultdict(list)  # a module that ran → parameters
        ran = tagged.hierarchy.called
        for each in self.declared.values():
            self._names[each.first].append(each.name)
            holder = each.module if each.module in ran else tags.nearest_above(each.module, ran) or ""
            self._held[holder].append(each.name)
        self._open = dict(self.declared)  # tied ones too: a module may read a transposed one of its own
        self._stored = self._read(sources)
        self._readers: defaultdict[str, list[StoredWeight]] = defaultdict(list)
        for stored in self._stored.values():
            for owner in stored.owners:
                self._readers[owner].append(stored)
        for find in (self._by_name, self._by_longer_name, self._by_dims, self._by_elements, self._by_equality):
            for name in find():
                self._open.pop(name, None)
        self._by_owners()
        self.places: Mapping[ir.Value, Sequence[Place]] = {
            value: tuple(stored.places.values())
            for value, stored in self._stored.items()
            if stored.places or stored.is_weight
        }

    def name_in(self, parameter: str, owners: Sequence[str]) -> str:
        """The name that a parameter has in one of some modules; of tied ones, the first where none holds it."""
        return next(iter(self._names_in(parameter, owners)), parameter)

    def read_in(self, tensor: ir.Value, owners: Sequence[str]) -> Sequence[Place]:
        """The parameters that some modules read in a tensor; of equal ones, those that they hold."""
        places = self.places[tensor]
        if not any(place.is_copy for place in places):
            return places
        held = [place for place in places if self._names_in(place.parameter, owners)]
        return held or [place for place in places if not place.is_copy]

    def _names_in(self, parameter: str, owners: Sequence[str]) -> list[str]:
        return [name for name in self._names[parameter] if self.declared[name].module in owners]

    def _read(self, sources: WeightSources) -> dict[ir.Value, StoredWeight]:
        stored: dict[ir.Value, StoredWeight] = {}
        for node, owners in self._tagged.index.owners.items():
            if sources.calls_function(node):
                continue
            is_shared = node.metadata_props.get(tags.REASON) == Reason.SHARED
            for position, source in sources.read_by(node):
                tensor = stored_tensor(source.tensor)
                assert tensor is not None
                shape = tuple(tensor.shape.numpy())
                each = stored.setdefault(source.tensor, StoredWeight(source.tensor, tensor, shape))
                each.readers[WeightReader(owners_within(owners, source.within), is_shared)] = None
                each.is_weight = each.is_weight or (
                    position not in scales_of(node.domain, node.op_type) and is_weight(source.tensor, node)
                )
        return stored

    def _left(self) -> Iterator[StoredWeight]:
        return (stored for stored in self._stored.values() if stored.is_weight and not stored.places)

    def _candidates(self, owners: Sequence[str]) -> list[Declared]:
        """The parameters without a place of some modules, and of the modules inside them that never ran."""
        names = dict.fromkeys(name for owner in owners for name in self._held.get(owner, ()))
        return [self._open[name] for name in names if name in self._open]

    # --- the evidence, in order: each puts parameters in their places, and yields their names -------------------

    def _by_name(self) -> Iterator[str]:
        for stored in self._stored.values():
            known = self.declared.get(stored.name)
            if known is not None:
                stored.put(known.first, *(() if stored.shape == known.shape else ("resized",)))
                yield from self._names_in(known.first, stored.owners) or [known.name]

    def _by_longer_name(self) -> Iterator[str]:
        for stored in self._left():
            known = next((self.declared[name] for name in beginnings(stored.name) if name in self.declared), None)
            if known is not None and known.name in self._open and stored.may_hold(known):
                stored.put(known.first, *stored.change_of(known, renamed=False))
                yield known.name

    def _by_dims(self) -> Iterator[str]:
        found: list[str] = []
        for stored in list(self._left()):
            dims = dims_of(stored.shape)
            for reader in stored.readers if dims else ():
                alike = [each for each in self._candidates(reader.owners) if dims_of(each.shape) == dims]
                alike = [each for each in alike if stored.is_named_alike(each)] or alike
                if len(alike) > 1 and reader.is_fused:
                    continue  # the weights of its modules were merged
                doubt = ("one of several",) if len(alike) > len({each.module for each in alike}) else ()
                for each in alike:
                    stored.put(each.first, *stored.change_of(each, renamed=not stored.is_named_alike(each)), *doubt)
                    found.append(each.name)
        yield from found

    def _by_elements(self) -> Iterator[str]:
        found: list[str] = []
        for stored in list(self._left()):
            candidates = self._candidates(stored.owners)
            alike, words = stored.joined(candidates)
            if not alike and stored.is_quantized:
                matrices = [each for each in candidates if len(dims_of(each.shape)) > 1 and stored.may_hold(each)]
                alike = matrices if len(matrices) == 1 else []
            for each in alike:
                stored.put(each.first, *words, *(("quantized",) if stored.is_quantized else ()))
                found.append(each.name)
        yield from found

    def _by_equality(self) -> Iterator[str]:
        for each in list(self._open.values()):
            alike = []
            for stored in self._readers.get(each.module, ()):
                kept = self.declared.get(stored.name)
                if kept is not None and kept.shape == each.shape and stored.is_read_alone(each.module, kept.module):
                    alike.append(stored)
            alike = [stored for stored in alike if stored.is_named_alike(each)] or alike
            for stored in alike:
                stored.put(each.first, *(("one of several",) if len(alike) > 1 else ()), is_copy=True)
                yield each.name

    def _by_owners(self) -> None:
        known = {name for each in self._stored.values() for name in each.places}
        placed = {self.declared[name].module for name in known}
        left = {stored.value for stored in self._left()}
        merged: dict[ir.Value, StoredWeight] = {}
        for each in self._open.values():
            for stored in self._readers.get(each.module, ()) if each.first not in known else ():
                if not stored.is_weight:
                    continue
                if stored.value in left or (each.module not in placed and stored.is_fused(each.module)):
                    stored.put(each.first, "merged")
                    merged[stored.value] = stored
        for stored in merged.values():
            stored.places = {name: Place(name, ("merged",)) for name in stored.places}
