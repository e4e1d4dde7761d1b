"""Low-rank adapters, added to the entries of a ``state_dict``."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import onnx_ir as ir

from htp_export.capabilities.lora.adapters import LowRank, placed, read_adapter
from htp_export.capabilities.lora.weight_changes import (
    check_sizes,
    merged,
    require_peft,
    scaling_of,
)
from htp_export.errors import InputError


def add_to_entries(
    tensors: Mapping[str, ir.TensorProtocol], adapters: Mapping[str, float]
) -> tuple[dict[str, ir.TensorProtocol], list[str]]:
    """Add adapters, each times its factor, to the weights of their layers; the sums are computed on access.

    Args:
        tensors: Entry → tensor.
        adapters: Folder of PEFT, or file of ONNX Runtime's adapter format → factor.

    Returns:
        Changed entry → tensor, and a note on each adapter.

    Raises:
        InputError: A layer of an adapter is not among the entries, or has other sizes; an adapter
            has no scaling, or it replaces whole parameters.
    """
    changes: dict[str, ir.TensorProtocol] = {}
    notes: list[str] = []
    paths = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
    for source, factor in adapters.items():
        adapter = read_adapter(source)
        require_peft(adapter)
        if adapter.parameters:
            name = next(iter(adapter.parameters))
            raise InputError(
                f"{source}: replaces the whole parameter {name!r}, and only low-rank changes can be added with a factor"
            )
        layers = placed(adapter.source, adapter.layers, paths, "layers of the file")
        for path, layer in layers.items():
            scaling = scaling_of(adapter.source, path, layer)
            name = f"{path}.weight"
            base = changes.get(name, tensors[name])
            shape = tuple(base.shape.numpy())
            is_table = layer.kind == "embedding"
            check_sizes(adapter.source, path, layer, shape[::-1] if is_table else shape)
            changes[name] = _added(base, layer, scaling * factor)
        notes.append(f"{source} was added {factor:g} times, to {len(layers)} layers")
    return changes, notes


def _added(base: ir.TensorProtocol, layer: LowRank, scaling: float) -> ir.TensorProtocol:
    """Return a weight plus the product of a layer's two low-rank factors."""
    read = functools.partial(_sum, base, layer, scaling)
    return ir.LazyTensor(read, base.dtype, ir.Shape(base.shape.numpy()), name=base.name)


def _sum(base: ir.TensorProtocol, layer: LowRank, scaling: float) -> ir.TensorProtocol:
    total = merged(base.numpy(), layer, scaling)
    return ir.Tensor(total.astype(base.dtype.numpy()), dtype=base.dtype, name=base.name)
