"""What a stored tensor holds by its recipe, and which nodes read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import onnx
import onnx_ir as ir

from htp_export.format.recipes import Recipe, operands_of, parameters_in
from htp_export.model.module_facts import stored_tensor

_MOST_BITS = 8  # of the elements of a quantized tensor

_WORDS = {
    "transpose": "transposed",
    **dict.fromkeys(("reshape", "squeeze", "unsqueeze"), "reshaped"),
    "expand": "repeated",
    **dict.fromkeys(("cast", "narrow"), "cast"),
    **dict.fromkeys(("slice", "take"), "sliced"),
    "concat": "joined",
    "quantize": "quantized",
    "masked": "masked",
}
"""Step of a recipe → what it does to a parameter; other steps compute with it."""


@dataclass(frozen=True)
class Place:
    """A parameter in a stored tensor.

    Attributes:
        parameter: The parameter; of tied ones, the first.
        how: What was done to it, in order; empty if the tensor is the parameter as it is.
        is_copy: Whether the tensor is that of another parameter, which has the same values.
    """

    parameter: str
    how: tuple[str, ...] = ()
    is_copy: bool = False


def places_in(recipe: Recipe) -> Iterator[Place]:
    """The parameters and buffers in a recipe, and what was done to each.

    Examples:
        >>> [gates] = {*places_in(["concat", ["slice", "w", [0, 2, 4, 1]], ["slice", "w", [0, 0, 2, 1]], 0])}
        >>> gates.how, [place.how for place in places_in(["transpose", ["mul", "w", "scale"], [1, 0]])]
        (('reordered',), [('merged', 'transposed'), ('merged', 'transposed')])
    """
    if isinstance(recipe, str):
        yield Place(recipe)
    if not isinstance(recipe, list):
        return
    names = [{*parameters_in(each)} for each in operands_of(recipe)]
    everything = set[str]().union(*names)
    for number, operand in enumerate(operands_of(recipe)):
        for place in places_in(operand):
            word, how = _WORDS.get(recipe[0]), place.how
            if recipe[0] == "equal":
                yield replace(place, is_copy=place.is_copy or number > 0)
                continue
            if recipe[0] == "concat" and len(names) > 1 and all(each == everything for each in names):
                word, how = "reordered", ()
            elif word is None:
                word, how = "merged" if len(everything) > 1 else "computed", ()
            is_said = word in how and word != "transposed"  # transposed twice is not transposed
            yield replace(place, how=how if is_said else (*how, word))


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
    """A stored tensor, how it was made, and the nodes that read it."""

    value: ir.Value
    recipe: Recipe
    readers: dict[WeightReader, None] = field(default_factory=dict)
    is_weight: bool = False
    places: dict[str, Place] = field(default_factory=dict)

    @property
    def tensor(self) -> ir.TensorProtocol:
        tensor = stored_tensor(self.value)
        assert tensor is not None
        return tensor

    @property
    def owners(self) -> list[str]:
        return list(dict.fromkeys(owner for reader in self.readers for owner in reader.owners))

    @property
    def is_quantized(self) -> bool:
        return self.tensor.dtype.is_integer() and self.tensor.dtype.bitwidth <= _MOST_BITS

    @cached_property
    def parameters(self) -> frozenset[str]:
        return frozenset(parameters_in(self.recipe))

    @property
    def is_computed(self) -> bool:
        """Whether it may be one of several tensors that stand for a parameter together, such as levels and scales."""
        return isinstance(self.recipe, list) and self.recipe[0] in ("computed", "quantize") and bool(self.parameters)

    def is_fused(self, module: str) -> bool:
        """Whether a node that does a part of the work of a module and of others reads the tensor."""
        return any(module in reader.owners and reader.is_fused for reader in self.readers)


@cache
def scales_of(domain: str, op_type: str) -> frozenset[int]:
    """The inputs of a quantized operator that are scales and zero points, by the names in ONNX's own schema."""
    if domain or not onnx.defs.has(op_type):
        return frozenset()
    names = [formal.name for formal in onnx.defs.get_schema(op_type).inputs]
    return frozenset(k for k, name in enumerate(names) if name.endswith(("_scale", "_zero_point")))
