"""Checks that the parameters in a file are read by nodes of the modules that read them in PyTorch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.verify.readers import named_tensors
from htp_export.format import tags
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.arrays import Array, from_torch

if TYPE_CHECKING:
    from torch import nn

__all__ = ["known_parameters", "misplaced_parameters"]


def known_parameters(tagged: TaggedModel, model: nn.Module) -> dict[ir.Value, str]:
    """Return initializer → name of the parameter or buffer with this name or, for matrices, with these values.

    Exporters fold the transposition of a Linear's weight into the weight, which loses its name. Of each matrix, the
    first row and column are read, and all values only if several parameters have the same ones.
    """
    initializers = [value for graph in tagged.model.graphs() for value in graph.initializers.values()]
    tensors = dict(named_tensors(model))
    names = {value: str(value.name) for value in initializers if value.name in tensors}
    weights: defaultdict[tuple[str, frozenset[int]], list[tuple[str, Array]]] = defaultdict(list)
    for name in [name for name in tensors if name not in set(names.values())]:
        if tensors[name].dim() == 2:
            array = from_torch(tensors[name])
            weights[str(array.dtype), frozenset(array.shape)].append((name, array))
    for value in initializers:
        tensor = value.const_value
        if value in names or tensor is None or len(tensor.shape) != 2 or tensor.dtype == ir.DataType.STRING:
            continue
        listed = weights.get((str(np.dtype(tensor.dtype.numpy())), frozenset(tensor.shape.numpy())))
        matched = _matching(tensor.numpy(), listed) if listed else None
        if matched is not None:
            names[value] = matched
    return names


def _matching(array: Array, weights: list[tuple[str, Array]]) -> str | None:
    """The parameter with the values of a matrix or of its transpose."""
    begin_alike = [
        (name, turned) for name, weight in weights for turned in (weight, weight.T) if _begins_as(array, turned)
    ]
    if len({name for name, _ in begin_alike}) <= 1:
        return begin_alike[0][0] if begin_alike else None
    return next((name for name, turned in begin_alike if np.array_equal(array, turned)), None)


def _begins_as(first: Array, second: Array) -> bool:
    if first.shape != second.shape or not np.array_equal(first[:1], second[:1]):
        return False
    return np.array_equal(first[:, :1], second[:, :1])


def misplaced_parameters(
    tagged: TaggedModel, known: Mapping[ir.Value, str], readers: Mapping[str, frozenset[str]], model: nn.Module
) -> tuple[str, ...]:
    """Return the parameters that are read by a node of a module that does not read them in PyTorch.

    Every node that reads a parameter must have an owner at or below a module that holds the tensor or that read it
    when PyTorch ran; tied parameters are one tensor.

    Args:
        tagged: The file.
        known: Initializer → parameter, from `known_parameters`.
        readers: Parameter → the modules that hold or read it, from `parameter_readers`.
        model: The PyTorch model.

    Returns:
        A line for each such node: ``"fc.weight is read by Gemm 'node_3' of 'other'"``.
    """
    return tuple(line for value, name in known.items() for line in _misplaced(tagged, value, name, readers, model))


def _misplaced(
    tagged: TaggedModel, initializer: ir.Value, name: str, readers: Mapping[str, frozenset[str]], model: nn.Module
) -> Iterator[str]:
    right = readers[name]
    if any(path in tagged and tagged.hierarchy[path].fate.is_folded for path in right):
        return  # what it was folded into is read wherever the module's result is
    outside_readers = [use.node for use in initializer.uses() if not _reads(tagged, use.node, right)]
    if outside_readers:  # exporters merge equal tensors under one name: then it may be read wherever any of them is
        right = right.union(*(readers[tied] for tied in _equal_tensors(model, name)))
    for node in outside_readers:
        if not _reads(tagged, node, right):
            owners = ", ".join(repr(owner) for owner in tagged.owners_of(node)) or "no module"
            yield f"{name} is read by {node.op_type} {node.name!r} of {owners}"


def _reads(tagged: TaggedModel, node: ir.Node, modules: frozenset[str]) -> bool:
    if node.op_identifier() in tagged.model.functions:  # what is in the function reads it
        return any(tags.is_under(path, owner) for owner in tagged.owners_of(node) for path in modules)
    return any(tags.is_under(owner, path) for owner in tagged.owners_of(node) for path in modules)


def _equal_tensors(model: nn.Module, name: str) -> list[str]:
    import torch

    every = dict(named_tensors(model))
    this = every[name]
    alike = (
        candidate for candidate, tensor in every.items() if tensor.shape == this.shape and tensor.dtype == this.dtype
    )
    return [candidate for candidate in alike if torch.equal(every[candidate], this)]
