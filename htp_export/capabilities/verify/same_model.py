"""Checks that a file was exported from a model, before anything is run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from htp_export.capabilities.verify.readers import named_tensors
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.lora import lora_modules
from htp_export.format.module_paths import module_paths
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.arrays import Array, from_torch

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["check_same_model", "check_same_modules_ran"]


_SAMPLE = 256  # elements of each parameter that are compared: weights of another model differ from the first one on
_FEWEST = 3  # parameters with other values: fewer are a fault of this file, which the comparison finds


def check_same_model(tagged: TaggedModel, model: nn.Module, name: str) -> None:
    """Refuse a file with other modules, classes or shapes of parameters, or in which most weights differ.

    A single changed weight is accepted: the comparison finds it.

    Raises:
        InputError: If it is a file of another model; the message has the difference.
    """
    modules = Hierarchy.from_module(model)
    exact = tagged.source != "torch"  # torch's own scopes name modules wrongly, and do not tell what was fused
    inserted = lora_modules(tagged.model.metadata_props)
    for path, info in tagged.hierarchy.items() if exact else ():
        if path not in modules and (path in inserted or _is_in_traced(modules, path)):
            continue
        if path not in modules:
            _refuse(name, model, f"it has a module {path!r}, and the model has none")
        ours = modules[path]
        if not info.may_be(ours):
            _refuse(name, model, f"its module {path or '(root)'!r} is a {info.simple_class}, not a {ours.simple_class}")
    parameters = dict(named_tensors(model))
    shared = [(value, parameters[key]) for key, value in _initializers(tagged) if key in parameters]
    for value, tensor in shared:
        shape = list(value.const_value.shape.numpy())  # type: ignore[union-attr]
        wanted = [*tensor.shape, *([2] * tensor.is_complex())]  # real and imaginary parts
        if shape != wanted:
            _refuse(name, model, f"its {value.name!r} has the shape {shape}, and the model's has {wanted}")
    if exact:
        _check_values(tagged, shared, name, model)


def _is_in_traced(modules: Hierarchy, path: str) -> bool:
    """Whether torch made the modules around a path when it traced a model: it leaves out those without parameters."""
    return any(modules[up].is_generated for up in tags.ancestors(path) if up in modules)


def check_same_modules_ran(tagged: TaggedModel, model: nn.Module, ran: Mapping[str, int], name: str) -> None:
    """Refuse a file that lacks modules which ran and have parameters.

    Args:
        tagged: The file.
        model: The model.
        ran: Module path → how often it ran.
        name: Name of the file in errors.

    Raises:
        InputError: If there is one.
    """
    modules = {path: module for path, _, module in module_paths(model)}
    for path in ran:
        if path not in tagged.hierarchy and any(True for _ in modules[path].parameters(recurse=False)):
            _refuse(name, model, f"the model's module {path!r} ran, and the file has none")


def _refuse(name: str, model: nn.Module, reason: str) -> None:
    raise InputError(f"{name}: was not exported from this {type(model).__name__}: {reason}")


def _initializers(tagged: TaggedModel) -> Iterator[tuple[str, ir.Value]]:
    for key, value in tagged.model.graph.initializers.items():
        if value.const_value is not None:
            yield key, value


def _check_values(
    tagged: TaggedModel, shared: list[tuple[ir.Value, torch.Tensor]], name: str, model: nn.Module
) -> None:
    """Refuse a file most of whose weights have other values; a tool may have made them narrower."""
    different = looked_at = 0
    for value, tensor in shared:
        owner = str(value.name).rpartition(".")[0]
        fused = owner in tagged and tagged.hierarchy[owner].fate.is_merged  # then a neighbour's were worked into it
        floats = value.const_value.dtype.is_floating_point()  # type: ignore[union-attr] # see _initializers
        if fused or not floats or not tensor.is_floating_point():
            continue
        looked_at += 1
        try:
            stored = _sample(value.const_value.numpy())  # type: ignore[union-attr] # see _initializers
            different += not _alike(stored, from_torch(_sample(tensor)).astype(stored.dtype))
        except (OSError, ValueError) as error:
            raise InputError(f"{name}: its weight {value.name!r} cannot be read: {error}") from error
    if different >= _FEWEST and different > looked_at / 2:
        _refuse(name, model, f"{different} of {looked_at} parameters have other values: it has other weights")


def _sample(values: Any) -> Any:
    """The first elements of the last dimension, without touching the others."""
    while values.ndim > 1 and 0 not in values.shape:
        values = values[0]
    return values.reshape(-1)[:_SAMPLE]


def _alike(first: Array, second: Array) -> bool:
    return first.tobytes() == second.tobytes()
