"""What the name, the shape and the readers of a stored tensor say of a parameter that it may hold."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import onnx
import onnx_ir as ir

__all__ = [
    "Declared",
    "Place",
    "StoredWeight",
    "WeightReader",
    "beginnings",
    "change_of",
    "dims_of",
    "is_fused",
    "is_named_alike",
    "is_read_alone",
    "joined",
    "may_hold",
    "scales_of",
]

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
        return dims_of(self.shape)


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


def is_fused(stored: StoredWeight, module: str) -> bool:
    """Whether a node that does a part of the work of a module and of others reads a tensor."""
    return any(module in reader.owners and reader.is_fused for reader in stored.readers)


def is_read_alone(stored: StoredWeight, module: str, holder: str) -> bool:
    """Whether a module reads the tensor of another one, or both do the same with it."""
    readers = [reader for reader in stored.readers if module in reader.owners]
    return any(reader.is_shared or holder not in reader.owners for reader in readers)


def is_named_alike(stored: StoredWeight, parameter: Declared) -> bool:
    """Whether a tensor has the name of a parameter in a module under another of the module's names."""
    return "." in stored.name and stored.name.rpartition(".")[2] == parameter.name.rpartition(".")[2]


def joined(stored: StoredWeight, candidates: Sequence[Declared]) -> tuple[list[Declared], tuple[str, ...]]:
    """The parameters that a tensor has beside each other, and what is to be said of them.

    These are all of its rank, as in products that were merged, or some of one shape, as the two directions of an LSTM.
    """
    dims = dims_of(stored.shape)
    alike = [each for each in candidates if len(each.dims) == len(dims)]
    if len(alike) > 1 and sum(math.prod(each.shape) for each in alike) == math.prod(stored.shape):
        return alike, ("joined",)
    groups: defaultdict[tuple[int, ...], list[Declared]] = defaultdict(list)
    for each in candidates:
        groups[each.dims].append(each)
    counts = {shape: math.prod(dims) // max(math.prod(shape), 1) for shape in groups}
    fitting = [
        shape
        for shape, group in groups.items()
        if 1 < counts[shape] <= len(group) and _fits(shape, dims, counts[shape])
    ]
    fewest = [shape for shape in fitting if counts[shape] == min(map(counts.__getitem__, fitting))]
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


def may_hold(stored: StoredWeight, parameter: Declared) -> bool:
    """Whether a tensor has as many elements as a parameter, or, where several are in a byte, may have them."""
    elements, wanted = math.prod(stored.shape), math.prod(parameter.shape)
    if elements == wanted:
        return dims_of(stored.shape) == parameter.dims
    return stored.is_quantized and len(stored.shape) > 1 and elements < wanted <= elements * 8 // _FEWEST_BITS


def change_of(stored: StoredWeight, parameter: Declared, *, renamed: bool) -> tuple[str, ...]:
    """What was done to a parameter that a tensor holds, by its shape and type.

    A square matrix that lost its name was transposed: exporters keep the name of a weight that they do not change.
    """
    quantized = ("quantized",) if stored.tensor.dtype.is_integer() else ()
    if stored.shape == parameter.shape and not (renamed and len(parameter.shape) == 2):
        return quantized or (("computed",) if renamed else ())
    if stored.shape == parameter.shape[::-1]:
        return ("transposed", *quantized)
    return quantized or (("computed",) if stored.shape == parameter.shape else ("reshaped",))


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
