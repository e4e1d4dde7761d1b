"""A model with the numbers of a quantized checkpoint, before its matrices are packed."""

from __future__ import annotations

import os
from typing import Any

from htp_export.capabilities.quantize.method import Precision
from htp_export.capabilities.quantize.precisions import CHECKPOINT
from htp_export.errors import InputError
from htp_export.format.recipes import parameters_in
from htp_export.model.recipes import recipe_of
from htp_export.model.tagged import TaggedModel
from htp_export.weights.rebuilding import rebuilt


def checkpoint_precision(weights: str | os.PathLike[str], tagged: TaggedModel) -> Precision:
    """The precision that a quantized checkpoint has; only its headers are read.

    A tied parameter that the checkpoint has once has both of its names.
    """
    from htp_export.capabilities.huggingface.packed.checkpoints import read_packed

    found = read_packed(weights)
    ties = [(each.name, each.tied) for each in (tagged.declared or {}).values() if each.tied]
    both = {name: other for pair in ties for name, other in (pair, pair[::-1]) if name not in found and other in found}
    return Precision(CHECKPOINT, CHECKPOINT, weight="int4", options={"checkpoint": found.also(both)})


def with_numbers(tagged: TaggedModel, precision: Precision) -> TaggedModel:
    """A copy of a model whose parameters are those of the checkpoint, dequantized; computed when they are read.

    AWQ changes norms, too: matrices alone would make another model. Buffers stay where the checkpoint has none.

    Raises:
        InputError: If the checkpoint lacks a parameter, or has it in another shape.
    """
    checkpoint: Any = precision.options["checkpoint"]
    copy = tagged.clone()
    new = rebuilt(copy, checkpoint)
    for value, why in new.unknown.items():
        names = list(parameters_in(recipe_of(value)))
        missing = [name for name in names if name not in checkpoint]
        declared = [name for name in missing if name in (copy.declared or {})]
        if declared:
            raise InputError(f"{checkpoint.path} has no {declared[0]!r}, which initializer {value.name!r} is made of")
        if names and not missing:
            raise InputError(f"initializer {value.name!r} cannot be made of {names[0]!r} of the checkpoint: {why}")
    for value, tensor in new.tensors.items():
        value.const_value = tensor
    for layer in checkpoint.layers:
        if copy.declared is not None and layer not in copy.declared:
            raise InputError(f"{checkpoint.path} has {layer!r}, and the model has no such parameter")
    return copy.refresh()
