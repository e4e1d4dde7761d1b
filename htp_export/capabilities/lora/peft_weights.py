"""New weights as PEFT computes them; those of linear layers with LoRA alone need no PEFT."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np

from htp_export.capabilities.lora.adapters import Adapter, LowRank
from htp_export.errors import InputError
from htp_export.process.quiet import quiet
from htp_export.runtime.arrays import Array

__all__ = ["merged", "require_peft"]


def require_peft(adapter: Adapter) -> None:
    """Refuse (`InputError`) an adapter of which PEFT computes the weights, if PEFT is not installed."""
    needing = [path for path, layer in adapter.layers.items() if not layer.is_plain]
    if needing and find_spec("peft") is None:
        raise InputError(
            f"{adapter.source}: module {needing[0]!r} has more than two factors of a linear layer, which needs PEFT; "
            'install it with: pip install "htp-export[lora]"'
        )


def merged(weight: Array, layer: LowRank, scaling: float) -> Array:
    """A weight of floats as PEFT's ``merge_and_unload`` leaves it; ``scaling`` is of the product of the factors.

    ``weight`` is as PyTorch has it: (outputs, inputs), (outputs, inputs, size of the kernel, ...) or (rows, size).

    Examples:
        >>> merged(np.eye(2, dtype=np.float32), LowRank(np.ones((1, 2)), np.ones((2, 1))), 0.5).tolist()
        [[1.5, 0.5], [0.5, 1.5]]
    """
    if not layer.is_plain:
        return _by_peft(weight, layer, scaling)
    total: Array = weight + layer.b.astype(np.float32) @ layer.a.astype(np.float32) * np.float32(scaling)
    return total


def _by_peft(weight: Array, layer: LowRank, scaling: float) -> Array:
    """The same through a layer of PEFT, whose base is a layer of PyTorch with the weight."""
    import torch

    with quiet("peft"), torch.random.fork_rng(devices=[]):  # PEFT draws factors before it gets these
        import peft

        rank = layer.a.shape[0]
        config = peft.LoraConfig(
            r=rank,
            lora_alpha=scaling * rank,
            target_modules=["layer"],
            use_dora=layer.magnitude is not None,
            init_lora_weights=layer.start or True,  # type: ignore[arg-type]
        )
        holder = peft.inject_adapter_in_model(config, torch.nn.ModuleDict({"layer": _base(weight, layer.kind)}))
        around: Any = holder["layer"]  # type: ignore[index]
        dot = "lora_embedding_{}" if layer.kind == "embedding" else "lora_{}.weight"
        tensors = {"A": layer.a, "B": layer.b}
        state = {f"layer.{dot.format(name)}": _tensor(array) for name, array in tensors.items()}
        if layer.magnitude is not None:
            shape = (1, -1, *(1 for _ in weight.shape[2:])) if weight.ndim > 2 else (-1,)
            state["layer.lora_magnitude_vector"] = _tensor(layer.magnitude.reshape(shape))
        left: Any = peft.set_peft_model_state_dict(holder, state)
        assert not left.unexpected_keys, left
        around.merge()
        made: Array = around.get_base_layer().weight.detach().numpy()
    return made


def _base(weight: Array, kind: str) -> Any:
    """A layer of PyTorch with a weight; its other settings do not matter for that."""
    from torch import nn

    first, second, *kernel = weight.shape
    base: Any
    if kind == "embedding":
        base = nn.Embedding(first, second, device="meta")
    elif kind == "linear":
        base = nn.Linear(second, first, bias=False, device="meta")
    else:
        base = getattr(nn, f"Conv{len(kernel)}d")(second, first, tuple(kernel), bias=False, device="meta")
    base.weight = nn.Parameter(_tensor(weight))
    return base


def _tensor(array: Array) -> Any:
    import torch

    return torch.tensor(array.astype(np.float32))
