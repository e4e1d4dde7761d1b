"""Whether a file was exported from a model, and whether its nodes read the parameters that their modules read."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
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

# elements of each parameter that are compared: weights of another model differ from the first one
# on
_SAMPLE = 256
_TURNED = {"transposed", "reshaped"}
# parameters with other values: fewer are a fault of this file, which the comparison finds
_FEWEST = 3


def check_same_model(tagged: TaggedModel, model: nn.Module, name: str) -> None:
    """Refuse a file with other modules, classes or shapes of parameters, or in which most weights differ.

    A single changed weight is accepted: the comparison finds it.
    """
    modules = Hierarchy.from_module(model)
    # torch's own scopes name modules wrongly, and do not tell what was fused
    exact = tagged.source != "torch"
    inserted = lora_modules(tagged.model.metadata_props)
    for path, info in tagged.hierarchy.items() if exact else ():
        if path not in modules and (path in inserted or _is_in_traced(modules, path)):
            continue
        if path not in modules:
            _refuse(name, model, f"it has a module {path!r}, and the model has none")
        ours = modules[path]
        if not info.may_be(ours):
            _refuse(
                name,
                model,
                f"its module {path or '(root)'!r} is a {info.simple_class}, not a {ours.simple_class}",
            )
    parameters = dict(named_tensors(model))
    stored = tagged.model.graph.initializers.items()
    shared = [
        (value, parameters[key])
        for key, value in stored
        if value.const_value is not None and key in parameters
    ]
    for value, tensor in shared:
        shape = list(value.const_value.shape.numpy())  # type: ignore[union-attr]
        wanted = [*tensor.shape, *([2] * tensor.is_complex())]  # real and imaginary parts
        if shape == wanted or (
            math.prod(shape) == math.prod(wanted) and _done_to(value) & {*_TURNED, "computed"}
        ):
            continue
        _refuse(
            name, model, f"its {value.name!r} has the shape {shape}, and the model's has {wanted}"
        )
    if exact:
        _check_values(tagged, shared, name, model)


def _done_to(value: ir.Value) -> set[str]:
    """What the file says was done to the parameter of an initializer: tools transpose them, and keep their names."""
    return {word for place in places_in(recipe_of(value)) for word in place.how}


def _is_in_traced(modules: Hierarchy, path: str) -> bool:
    """Whether torch made the modules around a path when it traced a model: it leaves out those without parameters."""
    return any(modules[up].is_generated for up in tags.ancestors(path) if up in modules)


def check_same_modules_ran(
    tagged: TaggedModel, model: nn.Module, ran: Mapping[str, int], name: str
) -> None:
    """Refuse a file that lacks modules which ran and have parameters; ``ran``: module path → how often it ran."""
    modules = {path: module for path, _, module in module_paths(model)}
    for path in ran:
        if path not in tagged.hierarchy and any(
            True for _ in modules[path].parameters(recurse=False)
        ):
            _refuse(name, model, f"the model's module {path!r} ran, and the file has none")


def _refuse(name: str, model: nn.Module, reason: str) -> None:
    raise InputError(f"{name}: was not exported from this {type(model).__name__}: {reason}")


def _check_values(
    tagged: TaggedModel, shared: list[tuple[ir.Value, torch.Tensor]], name: str, model: nn.Module
) -> None:
    """Refuse a file most of whose weights have other values; a tool may have made them narrower."""
    different = looked_at = 0
    for value, tensor in shared:
        owner = str(value.name).rpartition(".")[0]
        # then a neighbour's were worked into it
        fused = owner in tagged and tagged.hierarchy[owner].fate.is_merged
        floats = value.const_value.dtype.is_floating_point()  # type: ignore[union-attr] # see check_same_model
        if fused or not floats or not tensor.is_floating_point() or _done_to(value) & _TURNED:
            continue
        looked_at += 1
        try:
            stored = _sample(value.const_value.numpy())  # type: ignore[union-attr] # see check_same_model
            different += (
                stored.tobytes() != from_torch(_sample(tensor)).astype(stored.dtype).tobytes()
            )
        except (OSError, ValueError) as error:
            raise InputError(
                f"{name}: its weight {value.name!r} cannot be read: {error}"
            ) from error
    if different >= _FEWEST and different > looked_at / 2:
        _refuse(
            name,
            model,
            f"{different} of {looked_at} parameters have other values: it has other weights",
        )


def _sample(values: Any) -> Any:
    """The first elements of the last dimension, without touching the others."""
    while values.ndim > 1 and 0 not in values.shape:
        values = values[0]
    return values.reshape(-1)[:_SAMPLE]


# --- parameters by node ---


def known_parameters(tagged: TaggedModel, model: nn.Module) -> dict[ir.Value, str]:
    """Return initializer → name of the parameter or buffer with this name or, for matrices, with these values.

    Exporters fold the transposition of a Linear's weight into the weight, which loses its name.
    """
    initializers = [
        value for graph in tagged.model.graphs() for value in graph.initializers.values()
    ]
    tensors = dict(named_tensors(model))
    names = {value: str(value.name) for value in initializers if value.name in tensors}
    weights: defaultdict[tuple[str, frozenset[int]], list[tuple[str, Array]]] = defaultdict(list)
    for name in [name for name in tensors if name not in set(names.values())]:
        if tensors[name].dim() == 2:
            array = from_torch(tensors[name])
            weights[str(array.dtype), frozenset(array.shape)].append((name, array))
    for value in initializers:
        tensor = value.const_value
        if (
            value in names
            or tensor is None
            or len(tensor.shape) != 2
            or tensor.dtype == ir.DataType.STRING
        ):
            continue
        listed = weights.get(
            (str(np.dtype(tensor.dtype.numpy())), frozenset(tensor.shape.numpy())), []
        )
        stored = tensor.numpy() if listed else None
        for name, weight in listed:
            if _is_same(stored, weight) or _is_same(stored, weight.T):
                names[value] = name
                break
    return names


def _is_same(one: Any, other: Array) -> bool:
    """Whether matrices are equal; other ones differ in the first row, mostly, and are not read further."""
    return np.array_equal(one[:1], other[:1]) and np.array_equal(one, other)


def misplaced_parameters(
    tagged: TaggedModel,
    known: Mapping[ir.Value, str],
    readers: Mapping[str, frozenset[str]],
    model: nn.Module,
) -> tuple[str, ...]:
    """Return the parameters that are read by a node of a module that does not read them in PyTorch.

    Every node that reads a parameter must have an owner at or below a module that holds the tensor
    or that read it when PyTorch ran (``readers``); tied parameters are one tensor. Each is a line
    for a node: ``"fc.weight is read by Gemm 'node_3' of 'other'"``.
    """
    return tuple(
        line
        for value, name in known.items()
        for line in _misplaced(tagged, value, name, readers, model)
    )


def _misplaced(
    tagged: TaggedModel,
    initializer: ir.Value,
    name: str,
    readers: Mapping[str, frozenset[str]],
    model: nn.Module,
) -> Iterator[str]:
    right = readers[name]
    if any(path in tagged and _gives_constants(tagged, path) for path in right):
        return  # what it was folded into is read wherever the module's result is
    outside_readers = [
        use.node for use in initializer.uses() if not _reads(tagged, use.node, right)
    ]
    # exporters merge equal tensors under one name: then it may be read wherever any of them is
    if outside_readers:
        merged = [*_merged_into(initializer), *_equal_tensors(model, name)]
        right = right.union(*(readers[tied] for tied in merged if tied in readers))
    for node in outside_readers:
        if not _reads(tagged, node, right):
            owners = ", ".join(repr(owner) for owner in tagged.owners_of(node)) or "no module"
            yield f"{name} is read by {node.op_type} {node.name!r} of {owners}"


def _gives_constants(tagged: TaggedModel, path: str) -> bool:
    """Whether a module was folded into constants, if need be with copies of one constant for several calls."""
    region, constant = tagged[path], tagged.index.constant
    made = [value for node in region.nodes for value in node.outputs]
    return region.fate.is_folded or (bool(made) and all(value in constant for value in made))


def _reads(tagged: TaggedModel, node: ir.Node, modules: frozenset[str]) -> bool:
    return any(tags.is_under(owner, path) for owner in tagged.owners_of(node) for path in modules)


def _merged_into(initializer: ir.Value) -> list[str]:
    """The parameters that were equal when the file was written, as it says; runs of the model may change them."""
    places = list(places_in(recipe_of(initializer)))
    return [place.parameter for place in places] if any(place.is_copy for place in places) else []


def _equal_tensors(model: nn.Module, name: str) -> list[str]:
    import torch

    every = dict(named_tensors(model))
    this = every[name]
    alike = (
        candidate
        for candidate, tensor in every.items()
        if tensor.shape == this.shape and tensor.dtype == this.dtype
    )
    return [candidate for candidate in alike if torch.equal(every[candidate], this)]
