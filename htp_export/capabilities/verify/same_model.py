"""Check that a file was exported from a model, and that its nodes use the parameters of their own modules."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.verify.pytorch_run import named_tensors
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.hierarchy import Hierarchy, module_paths
from htp_export.format.model_metadata import lora_modules
from htp_export.model.recipes import recipe_of
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.arrays import Array, from_torch
from htp_export.weights.parameter_places import places_in

if TYPE_CHECKING:
    import torch
    from torch import nn

_SAMPLE = 256
"""Elements of each parameter that are compared: the weights of another model differ from the first element on."""

_TURNED = {"transposed", "reshaped"}
"""Operations of recipes that change the order or shape of elements, but not their values."""

_FEWEST = 3
"""Fewest parameters with other values in a file of another model; fewer are a fault that the comparison finds."""


def check_same_model(tagged: TaggedModel, model: nn.Module, name: str) -> None:
    """Refuse a file with other modules, classes or shapes of parameters, or in which most weights differ.

    A single changed weight is accepted: the comparison finds it.
    """
    # torch's own scopes have wrong module paths, and no record of fused modules.
    exact = tagged.source != "torch"
    if exact:
        _check_modules(tagged, model, name)
    parameters = dict(named_tensors(model))
    shared = [
        _Shared(value, value.const_value, parameters[key])
        for key, value in tagged.model.graph.initializers.items()
        if value.const_value is not None and key in parameters
    ]
    for parameter in shared:
        _check_shape(parameter, model, name)
    if exact:
        _check_values(tagged, shared, name, model)


@dataclass(frozen=True)
class _Shared:
    """A parameter that the file and the model have under one name."""

    value: ir.Value
    stored: ir.TensorProtocol
    tensor: torch.Tensor


def _check_modules(tagged: TaggedModel, model: nn.Module, name: str) -> None:
    """Refuse a file with modules that the model lacks, or with other classes."""
    modules = Hierarchy.from_module(model)
    inserted = lora_modules(tagged.model.metadata_props)
    for path, info in tagged.hierarchy.items():
        if path not in modules:
            if path in inserted or _is_in_traced(modules, path):
                continue
            _refuse(name, model, f"it has a module {path!r}, and the model has none")
        ours = modules[path]
        if not info.may_be(ours):
            module = path or "(root)"
            classes = f"the class {info.simple_class}, not {ours.simple_class}"
            _refuse(name, model, f"its module {module!r} has {classes}")


def _check_shape(parameter: _Shared, model: nn.Module, name: str) -> None:
    """Refuse a parameter with another shape, unless a tool reshaped or computed it."""
    shape = list(parameter.stored.shape.numpy())
    expected = list(parameter.tensor.shape)
    if parameter.tensor.is_complex():
        expected.append(2)  # the real and the imaginary part
    if shape == expected:
        return
    operations = _operations_on(parameter.value)
    if math.prod(shape) == math.prod(expected) and operations & {*_TURNED, "computed"}:
        return
    shapes = f"has the shape {shape}, and the model's has {expected}"
    _refuse(name, model, f"its {parameter.value.name!r} {shapes}")


def _operations_on(value: ir.Value) -> set[str]:
    """Operations on the parameter of an initializer, by its recipe: tools transpose parameters under their names."""
    return {word for place in places_in(recipe_of(value)) for word in place.how}


def _is_in_traced(modules: Hierarchy, path: str) -> bool:
    """Whether a path lies in a model that torch traced: generated modules contain no modules without parameters."""
    return any(modules[up].is_generated for up in tags.ancestors(path) if up in modules)


def check_same_modules_ran(
    tagged: TaggedModel, model: nn.Module, ran: Mapping[str, int], name: str
) -> None:
    """Refuse a file that lacks modules which ran and have parameters; ``ran``: module path → number of calls."""
    modules = {path: module for path, _, module in module_paths(model)}
    for path in ran:
        if path in tagged.hierarchy:
            continue
        if any(True for _ in modules[path].parameters(recurse=False)):
            _refuse(name, model, f"the model's module {path!r} ran, and the file has none")


def _refuse(name: str, model: nn.Module, reason: str) -> None:
    raise InputError(f"{name}: was not exported from this {type(model).__name__}: {reason}")


def _check_values(tagged: TaggedModel, shared: list[_Shared], name: str, model: nn.Module) -> None:
    """Refuse a file most of whose weights have other values; a tool may have converted them to a narrower type."""
    different = compared = 0
    for parameter in shared:
        value, tensor = parameter.value, parameter.tensor
        owner = str(value.name).rpartition(".")[0]
        # The weights of a fused module contain those of its neighbour.
        is_fused = owner in tagged and tagged.hierarchy[owner].fate.is_merged
        are_floats = parameter.stored.dtype.is_floating_point() and tensor.is_floating_point()
        if is_fused or not are_floats or _operations_on(value) & _TURNED:
            continue
        compared += 1
        try:
            sample = _sample(parameter.stored.numpy())
            expected = from_torch(_sample(tensor)).astype(sample.dtype)
            different += sample.tobytes() != expected.tobytes()
        except (OSError, ValueError) as error:
            raise InputError(
                f"{name}: its weight {value.name!r} cannot be read: {error}"
            ) from error
    if different >= _FEWEST and different > compared / 2:
        _refuse(
            name,
            model,
            f"{different} of {compared} parameters have other values: it has other weights",
        )


def _sample(values: Any) -> Any:
    """The first elements of the last dimension, without access to the others: they may be in a mapped file."""
    while values.ndim > 1 and 0 not in values.shape:
        values = values[0]
    return values.reshape(-1)[:_SAMPLE]


# --- parameters by node ---


def known_parameters(tagged: TaggedModel, model: nn.Module) -> dict[ir.Value, str]:
    """Return initializer → name of the parameter or buffer with this name or, for matrices, with these values.

    Exporters fold the transpose of a Linear's weight into the weight, which loses its name.
    """
    initializers = [
        value for graph in tagged.model.graphs() for value in graph.initializers.values()
    ]
    tensors = dict(named_tensors(model))
    names = {value: str(value.name) for value in initializers if value.name in tensors}
    unnamed = tensors.keys() - names.values()
    matrices = _Matrices()
    for name, tensor in tensors.items():
        if name in unnamed and tensor.dim() == 2:
            matrices.add(name, from_torch(tensor))
    for value in initializers:
        if value not in names and value.const_value is not None:
            found = matrices.find(value.const_value)
            if found is not None:
                names[value] = found
    return names


_MatrixKind = tuple[str, frozenset[int]]
"""The type of a matrix, and its sizes in any order."""


class _Matrices:
    """Matrices by type and unordered shape, to be found by their values, also transposed."""

    def __init__(self) -> None:
        self._by_kind: defaultdict[_MatrixKind, list[tuple[str, Array]]] = defaultdict(list)

    def add(self, name: str, array: Array) -> None:
        """Add a matrix."""
        self._by_kind[str(array.dtype), frozenset(array.shape)].append((name, array))

    def find(self, tensor: ir.TensorProtocol) -> str | None:
        """The name of the first matrix with the values of a tensor, in one of the two orders; None without one."""
        if len(tensor.shape) != 2 or tensor.dtype == ir.DataType.STRING:
            return None
        dtype = str(np.dtype(tensor.dtype.numpy()))
        candidates = self._by_kind.get((dtype, frozenset(tensor.shape.numpy())))
        if not candidates:
            return None
        stored = tensor.numpy()
        for name, matrix in candidates:
            if _is_same(stored, matrix) or _is_same(stored, matrix.T):
                return name
        return None


def _is_same(one: Array, other: Array) -> bool:
    """Whether matrices are equal; most others differ in the first row, and the rest is not compared."""
    return np.array_equal(one[:1], other[:1]) and np.array_equal(one, other)


def misplaced_parameters(
    tagged: TaggedModel,
    known: Mapping[ir.Value, str],
    readers: Mapping[str, frozenset[str]],
    model: nn.Module,
) -> tuple[str, ...]:
    """Describe each node that reads a parameter of a module it does not belong to.

    Every node that reads a parameter must have an owner at or below a module that contains the
    tensor, or that read it when PyTorch ran (``readers``); tied parameters are one tensor. A line
    looks like ``"fc.weight is read by Gemm 'node_3' of 'other'"``.
    """
    lines: list[str] = []
    for value, name in known.items():
        lines += _misplaced(tagged, value, name, readers, model)
    return tuple(lines)


def _misplaced(
    tagged: TaggedModel,
    initializer: ir.Value,
    name: str,
    readers: Mapping[str, frozenset[str]],
    model: nn.Module,
) -> Iterator[str]:
    """The misplaced nodes of one parameter."""
    modules = readers[name]
    # A constant that the parameter was folded into is read by the consumers of the module's result.
    if any(path in tagged and _is_folded(tagged, path) for path in modules):
        return
    outside = [use.node for use in initializer.uses() if not _belongs(tagged, use.node, modules)]
    if not outside:
        return
    # Exporters merge equal tensors under one name: the readers of each of them are right.
    equal = [*_merged_into(initializer), *_equal_tensors(model, name)]
    modules = modules.union(*(readers[other] for other in equal if other in readers))
    for node in outside:
        if not _belongs(tagged, node, modules):
            owners = ", ".join(repr(owner) for owner in tagged.owners_of(node)) or "no module"
            yield f"{name} is read by {node.op_type} {node.name!r} of {owners}"


def _is_folded(tagged: TaggedModel, path: str) -> bool:
    """Whether a module was folded into constants, possibly with a copy of a constant for each call."""
    region, constant = tagged[path], tagged.index.constant
    if region.fate.is_folded:
        return True
    outputs = [value for node in region.nodes for value in node.outputs]
    return bool(outputs) and all(value in constant for value in outputs)


def _belongs(tagged: TaggedModel, node: ir.Node, modules: frozenset[str]) -> bool:
    """Whether an owner of a node is one of some modules, or a descendant of one."""
    return any(tags.is_under(owner, path) for owner in tagged.owners_of(node) for path in modules)


def _merged_into(initializer: ir.Value) -> list[str]:
    """Parameters that were equal at the time of the export, by the recipe; a run of the model may change them."""
    places = list(places_in(recipe_of(initializer)))
    if not any(place.is_copy for place in places):
        return []
    return [place.parameter for place in places]


def _equal_tensors(model: nn.Module, name: str) -> list[str]:
    """Parameters and buffers that are equal to one of them."""
    import torch

    tensors = dict(named_tensors(model))
    this = tensors[name]
    return [
        other
        for other, tensor in tensors.items()
        if tensor.shape == this.shape and tensor.dtype == this.dtype and torch.equal(tensor, this)
    ]
