"""Low-rank adapters, added to the entries of a ``state_dict`` before these are bound."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.weights.fitting import Fitted, Needed, with_changes


def with_adapters(fitted: Fitted, needed: Needed, adapters: Mapping[str, float]) -> Fitted:
    """Add each adapter, times its factor, to the weights of its layers; the sums are computed on access.

    Raises:
        InputError: A layer of an adapter is not in the file, an adapter has no scaling, or it
            replaces whole parameters.
    """
    from htp_export.capabilities.lora.adapters import LowRank, placed, read_adapter
    from htp_export.capabilities.lora.weight_changes import require_peft

    changes: dict[str, ir.TensorProtocol] = {}
    notes: list[str] = []
    paths = [name.removesuffix(".weight") for name in fitted.tensors if name.endswith(".weight")]
    for source, factor in adapters.items():
        adapter = read_adapter(source)
        require_peft(adapter)
        if adapter.parameters:
            name = next(iter(adapter.parameters))
            raise InputError(
                f"{source}: replaces the whole parameter {name!r}, and only low-rank changes can be added with a factor"
            )
        layers: dict[str, LowRank] = placed(
            adapter.source, adapter.layers, paths, "layers of the file"
        )
        for path, layer in layers.items():
            if layer.scaling is None:
                raise InputError(f"{source}: has no scaling for {path!r}; give the folder of PEFT")
            name = f"{path}.weight"
            base = changes.get(name, fitted.tensors[name])
            changes[name] = _added(base, layer, layer.scaling * factor)
        notes.append(f"{source} was added {factor:g} times, to {len(layers)} layers")
    return with_changes(fitted, changes, notes)


def _added(base: ir.TensorProtocol, layer: object, scaling: float) -> ir.TensorProtocol:
    """Return a weight plus the product of a layer's two low-rank factors."""
    read = functools.partial(_sum, base, layer, scaling)
    return ir.LazyTensor(read, base.dtype, ir.Shape(base.shape.numpy()), name=base.name)


def _sum(base: ir.TensorProtocol, layer: object, scaling: float) -> ir.TensorProtocol:
    from htp_export.capabilities.lora.weight_changes import merged

    total = merged(base.numpy(), layer, scaling)  # type: ignore[arg-type]
    return ir.Tensor(total.astype(base.dtype.numpy()), dtype=base.dtype, name=base.name)
