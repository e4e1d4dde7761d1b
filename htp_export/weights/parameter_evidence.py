"""What the name, the shape and the readers of a stored tensor say of a parameter that it may hold."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import onnx
import onnx_ir as ir

from htp_export.format.parameters import Declared

__all__ = ["Place", "StoredWeight", "WeightReader", "beginnings", "dims_of", "scales_of"]

_MOST_BITS = 8  # of the elements of a quantized tensor
_FEWEST_BITS = 2


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
class WeightReader:
    """Nodes that read a stored tensor: their owners, and whether they did equal work, each for itself."""

    owners: tuple[str, ...]
    is_shared: bool

    @property
    def is_fused(self) -> bool:
        """Whether they do a part of the work of each."""
        return len(self.owners) > 1 and not self.is_shared


@dataclass
class StoredWeight:
    """A stored tensor, and the nodes that read it."""

    value: ir.Value
    tensor: ir.TensorProtocol
    shape: tuple[int, ...]
    readers: dict[WeightReader, None] = field(default_factory=dict)
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

    def is_fused(self, module: str) -> bool:
        """Whether a node that does a part of the work of a module and of others reads the tensor."""
        return any(module in reader.owners and reader.is_fused for reader in self.readers)

    def is_read_alone(self, module: str, holder: str) -> bool:
        """Whether a module reads the tensor of another one, or both do the same with it."""
        readers = [reader for reader in self.readers if module in reader.owners]
        return any(reader.is_shared or holder not in reader.owners for reader in readers)

    def is_named_alike(self, parameter: Declared) -> bool:
        """Whether the tensor has the name of a parameter in a module under another of the module's names."""
        return "." in self.name and self.name.rpartition(".")[2] == parameter.name.rpartition(".")[2]

    def may_hold(self, parameter: Declared) -> bool:
        """Whether it has as many elements as a parameter, or, where several are in a byte, may have them."""
        elements, wanted = math.prod(self.shape), math.prod(parameter.shape)
        if elements == wanted:
            return dims_of(self.shape) == dims_of(parameter.shape)
        return self.is_quantized and len(self.shape) > 1 and elements < wanted <= elements * 8 // _FEWEST_BITS

    def change_of(self, parameter: Declared, *, renamed: bool) -> tuple[str, ...]:
        """What was done to a parameter that it holds, by its shape and type.

        A square matrix that lost its name was transposed: exporters keep the name of a weight that they do not change.
        """
        quantized = ("quantized",) if self.tensor.dtype.is_integer() else ()
        if self.shape == parameter.shape and not (renamed and len(parameter.shape) == 2):
            return quantized or (("computed",) if renamed else ())
        if self.shape == parameter.shape[::-1]:
            return ("transposed", *quantized)
        return quantized or (("computed",) if self.shape == parameter.shape else ("reshaped",))

    def joined(self, candidates: Sequence[Declared]) -> tuple[list[Declared], tuple[str, ...]]:
        """The parameters that the tensor has beside each other, and what is to be said of them.

        All of its rank, as in products that were merged, or some of one shape, as the two directions of an LSTM.
        """
        dims = dims_of(self.shape)
        alike = [each for each in candidates if len(dims_of(each.shape)) == len(dims)]
        if len(alike) > 1 and sum(math.prod(each.shape) for each in alike) == math.prod(self.shape):
            return alike, ("joined",)
        groups: defaultdict[tuple[int, ...], list[Declared]] = defaultdict(list)
        for each in candidates:
            groups[dims_of(each.shape)].append(each)
        counts = {shape: math.prod(dims) // max(math.prod(shape), 1) for shape in groups}
        fitting = {
            shape: counts[shape]
            for shape, group in groups.items()
            if 1 < counts[shape] <= len(group) and _fits(shape, dims, counts[shape])
        }
        fewest = [shape for shape, count in fitting.items() if count == min(fitting.values())]
        if len(fewest) != 1:
            return [], ()
        group = groups[fewest[0]]
        return group, ("joined",) if len(group) == counts[fewest[0]] else ("joined", "one of several")


def _fits(part: Sequence[int], whole: Sequence[int], count: int) -> bool:
    """Whether tensors of a shape, stacked and concatenated, make one of another shape, in any order of dimensions.

    Examples:
        >>> _fits((8, 64), (2, 8, 64), 2), _fits((64,), (2, 128), 4), _fits((16, 64), (3, 16, 32), 2)
        (True, True, False)
    """
    for stacked in range(1, count + 1):
        if count % stacked:
            continue
        for axis in range(len(part)):
            longer = [size * (count // stacked if place == axis else 1) for place, size in enumerate(part)]
            if sorted((*longer, *((stacked,) if stacked > 1 else ()))) == list(whole):
                return True
    return False


def dims_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The dimensions of a tensor, whatever their order, without those of 1."""
    return tuple(sorted(size for size in shape if size != 1))


def beginnings(name: str) -> Iterator[str]:
    """What a name begins with, up to a place where something was added, the longest first.

    Examples:
        >>> list(beginnings("fc.weight_Q4"))
        ['fc.weight', 'fc']
    """
    for place in range(len(name) - 1, 0, -1):
        if not name[place].isalnum():
            yield name[:place]


@cache
def scales_of(domain: str, op_type: str) -> frozenset[int]:
    """The inputs of a quantized operator that are scales and zero points, by the names in ONNX's own schema."""
    if domain or not onnx.defs.has(op_type):
        return frozenset()
    names = [formal.name for formal in onnx.defs.get_schema(op_type).inputs]
    return frozenset(k for k, name in enumerate(names) if name.endswith(("_scale", "_zero_point")))
