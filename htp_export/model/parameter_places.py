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

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import onnx
import onnx_ir as ir

from htp_export.format import tags
from htp_export.format.reasons import Reason
from htp_export.model.module_facts import is_weight, stored_tensor
from htp_export.model.tagged import TaggedModel
from htp_export.model.weight_sources import WeightSources, owners_within

__all__ = ["Declared", "ParameterPlaces", "Place", "declared_parameters"]

_MOST_BITS = 8  # of the elements of a quantized tensor
_FEWEST_BITS = 2


@dataclass(frozen=True)
class Declared:
    """A parameter that PyTorch had.

    Attributes:
        name: Its full name, ``encoder.fc.weight``.
        module: The module that holds it.
        shape: Its shape.
        tied: The name of the same parameter in an earlier module; ``""`` if this is the first.
    """

    name: str
    module: str
    shape: tuple[int, ...]
    tied: str = ""

    @property
    def first(self) -> str:
        """The name that the parameter has in the first module that holds it."""
        return self.tied or self.name

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions, whatever their order, without those of 1."""
        return _dims(self.shape)


@dataclass(frozen=True)
class Place:
    """A parameter in a stored tensor.

    Attributes:
        parameter: The parameter; of tied ones, the first.
        how: What was done to it; empty if the tensor is the parameter as it is.
        is_copy: Whether the tensor is that of another parameter, which has the same values.
    """

    parameter: str
    how: tuple[str, ...] = ()
    is_copy: bool = False


@dataclass(frozen=True)
class _Reader:
    """Nodes that read a stored tensor: their owners, and whether they did equal work, each for itself."""

    owners: tuple[str, ...]
    is_shared: bool

    @property
    def is_fused(self) -> bool:
        """Whether they do a part of the work of each."""
        return len(self.owners) > 1 and not self.is_shared


@dataclass
class _Stored:
    """A stored tensor, and the nodes that read it."""

    value: ir.Value
    tensor: ir.TensorProtocol
    shape: tuple[int, ...]
    readers: dict[_Reader, None] = field(default_factory=dict)
    is_weight: bool = False
    places: dict[str, Place] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.value.name or ""

    @property
    def owners(self) -> list[str]:
        return list(dict.fromkeys(owner for reader in self.readers for owner in reader.owners))

    @property
    def is_quantized(self) -> bool:
        return self.tensor.dtype.is_integer() and self.tensor.dtype.bitwidth <= _MOST_BITS

    def put(self, parameter: str, *how: str, is_copy: bool = False) -> None:
        self.places.setdefault(parameter, Place(parameter, how, is_copy))


def declared_parameters(tagged: TaggedModel) -> dict[str, Declared]:
    """Full name → parameter, of every module.

    Where the file does not say what PyTorch had, these are the initializers of floats whose names begin with the path
    of a module.
    """
    if tagged.parameters is not None:
        return {
            tags.below(path, name): Declared(tags.below(path, name), path, tuple(shape), held.tied.get(name, ""))
            for path, held in tagged.parameters.items()
            for name, shape in held.shapes.items()
        }
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
        self.declared = declared_parameters(tagged)
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
        self._readers: defaultdict[str, list[_Stored]] = defaultdict(list)
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

    def _read(self, sources: WeightSources) -> dict[ir.Value, _Stored]:
        stored: dict[ir.Value, _Stored] = {}
        for node, owners in self._tagged.index.owners.items():
            if sources.calls_function(node):
                continue
            is_shared = node.metadata_props.get(tags.REASON) == Reason.SHARED
            for position, source in sources.read_by(node):
                tensor = stored_tensor(source.tensor)
                assert tensor is not None
                shape = tuple(tensor.shape.numpy())
                each = stored.setdefault(source.tensor, _Stored(source.tensor, tensor, shape))
                each.readers[_Reader(owners_within(owners, source.within), is_shared)] = None
                each.is_weight = each.is_weight or (
                    position not in _scales(node.domain, node.op_type) and is_weight(source.tensor, node)
                )
        return stored

    def _left(self) -> Iterator[_Stored]:
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
            name = next((name for name in _beginnings(stored.name) if name in self.declared), None)
            if name is None:
                continue
            known = self.declared[name]
            if name in self._open and _may_hold(stored, known):
                stored.put(known.first, *_change(stored, known, renamed=False))
                yield name

    def _by_dims(self) -> Iterator[str]:
        found: list[str] = []
        for stored in list(self._left()):
            dims = _dims(stored.shape)
            for reader in stored.readers if dims else ():
                alike = [each for each in self._candidates(reader.owners) if each.dims == dims]
                alike = [each for each in alike if _is_named_alike(stored, each)] or alike
                if len(alike) > 1 and reader.is_fused:
                    continue  # the weights of its modules were merged
                doubt = ("one of several",) if len(alike) > len({each.module for each in alike}) else ()
                for each in alike:
                    stored.put(each.first, *_change(stored, each, renamed=not _is_named_alike(stored, each)), *doubt)
                    found.append(each.name)
        yield from found

    def _by_elements(self) -> Iterator[str]:
        found: list[str] = []
        for stored in list(self._left()):
            candidates = self._candidates(stored.owners)
            alike = [each for each in candidates if len(each.dims) == len(_dims(stored.shape))]
            if len(alike) > 1 and sum(math.prod(each.shape) for each in alike) == math.prod(stored.shape):
                how = ("joined", "quantized") if stored.is_quantized else ("joined",)
            else:
                alike = [each for each in candidates if len(each.dims) > 1 and _may_hold(stored, each)]
                alike, how = (alike if stored.is_quantized and len(alike) == 1 else []), ("quantized",)
            for each in alike:
                stored.put(each.first, *how)
                found.append(each.name)
        yield from found

    def _by_equality(self) -> Iterator[str]:
        for each in list(self._open.values()):
            alike = []
            for stored in self._readers.get(each.module, ()):
                kept = self.declared.get(stored.name)
                if kept is not None and kept.shape == each.shape and _is_read_alone(stored, each.module, kept.module):
                    alike.append(stored)
            alike = [stored for stored in alike if _is_named_alike(stored, each)] or alike
            for stored in alike:
                stored.put(each.first, *(("one of several",) if len(alike) > 1 else ()), is_copy=True)
                yield each.name

    def _by_owners(self) -> None:
        known = {name for each in self._stored.values() for name in each.places}
        placed = {self.declared[name].module for name in known}
        left = {stored.value for stored in self._left()}
        merged: dict[ir.Value, _Stored] = {}
        for each in self._open.values():
            for stored in self._readers.get(each.module, ()) if each.first not in known else ():
                if not stored.is_weight:
                    continue
                if stored.value in left or (each.module not in placed and _is_fused(stored, each.module)):
                    stored.put(each.first, "merged")
                    merged[stored.value] = stored
        for stored in merged.values():
            stored.places = {name: Place(name, ("merged",)) for name in stored.places}


def _is_fused(stored: _Stored, module: str) -> bool:
    """Whether a node that does a part of the work of a module and of others reads a tensor."""
    return any(module in reader.owners and reader.is_fused for reader in stored.readers)


def _is_read_alone(stored: _Stored, module: str, holder: str) -> bool:
    """Whether a module reads the tensor of another one, or both do the same with it."""
    readers = [reader for reader in stored.readers if module in reader.owners]
    return any(reader.is_shared or holder not in reader.owners for reader in readers)


def _is_named_alike(stored: _Stored, parameter: Declared) -> bool:
    """Whether a tensor has the name of a parameter in a module under another of the module's names."""
    return "." in stored.name and stored.name.rpartition(".")[2] == parameter.name.rpartition(".")[2]


def _dims(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size != 1))


def _may_hold(stored: _Stored, parameter: Declared) -> bool:
    """Whether a tensor has as many elements as a parameter, or, where several are in a byte, may have them."""
    elements, wanted = math.prod(stored.shape), math.prod(parameter.shape)
    if elements == wanted:
        return _dims(stored.shape) == parameter.dims
    return stored.is_quantized and len(stored.shape) > 1 and elements < wanted <= elements * 8 // _FEWEST_BITS


def _change(stored: _Stored, parameter: Declared, *, renamed: bool) -> tuple[str, ...]:
    """What was done to a parameter that a tensor holds, by its shape and type.

    A square matrix that lost its name was transposed: exporters keep the name of a weight that they do not change.
    """
    quantized = ("quantized",) if stored.tensor.dtype.is_integer() else ()
    if stored.shape == parameter.shape and not (renamed and len(parameter.shape) == 2):
        return quantized or (("computed",) if renamed else ())
    if stored.shape == parameter.shape[::-1]:
        return ("transposed", *quantized)
    return quantized or (("computed",) if stored.shape == parameter.shape else ("reshaped",))


def _beginnings(name: str) -> Iterator[str]:
    """What a name begins with, up to a place where something was added, the longest first.

    Examples:
        >>> list(_beginnings("fc.weight_Q4"))
        ['fc.weight', 'fc']
    """
    for place in range(len(name) - 1, 0, -1):
        if not name[place].isalnum():
            yield name[:place]


@cache
def _scales(domain: str, op_type: str) -> frozenset[int]:
    """The inputs of a quantized operator that are scales and zero points, by the names in ONNX's own schema."""
    if domain or not onnx.defs.has(op_type):
        return frozenset()
    names = [formal.name for formal in onnx.defs.get_schema(op_type).inputs]
    return frozenset(k for k, name in enumerate(names) if name.endswith(("_scale", "_zero_point")))
