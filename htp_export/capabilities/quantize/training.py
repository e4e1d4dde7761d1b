"""Quantization-aware training: fake quantization as QuantizeLinear and DequantizeLinear."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from htp_export.errors import InputError
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.selectors import select_below
from htp_export.process.argument_types import checks_arguments
from htp_export.process.restoring import Changes, restored, set_item

if TYPE_CHECKING:
    import torch
    from torch import nn

    Forward = Callable[[torch.Tensor], torch.Tensor]

_OF_TORCH = (
    "fake_quant_enabled",
    "scale",
    "zero_point",
    "is_per_channel",
    "activation_post_process",
)
"""Attributes of the classes of ``torch.ao.quantization``, which torch is going to move."""


@checks_arguments
@contextlib.contextmanager
def frozen_fake_quantize(model: nn.Module) -> Iterator[None]:
    """Run fake quantization with its current scales, so that it can be exported.

    Neither exporter of torch translates ``FusedMovingAvgObsFakeQuantize``, the default of
    ``prepare_qat``, which updates its scale while it runs. Inside this block, modules of fake
    quantization compute torch's ``fake_quantize_per_tensor_affine`` and
    ``fake_quantize_per_channel_affine``, which both exporters write as QuantizeLinear and
    DequantizeLinear. Observers do not run. Afterwards the model is as before, also on errors.

    It affects the modules of ``torch.ao.quantization``, and those of torchao that quantize weights
    to int8 by channel. Other modules stay as they are: torchao's activations have a scale for each
    token, which QuantizeLinear does not support.

    Not thread-safe: no other thread may use the model meanwhile.

    Args:
        model: The model, with fake quantization whose observers have seen data.

    Returns:
        A context manager.

    Raises:
        InputError: The model has no module of fake quantization that can be frozen.

    Examples:
        >>> import torch, htp_export
        >>> from torch.ao.quantization import default_weight_fake_quant
        >>> net, x = torch.nn.Sequential(default_weight_fake_quant(), torch.nn.Linear(4, 3)), torch.randn(2, 4)
        >>> _ = net(x)  # the observer sees data
        >>> with htp_export.frozen_fake_quantize(net.eval()):
        ...     tagged = htp_export.load(htp_export.export(net, (x,), verbose=False))
        >>> [node.op_type for node in tagged["0"].nodes]
        ['QuantizeLinear', 'DequantizeLinear']
    """
    frozen = dict(_frozen(model))
    if not frozen:
        raise InputError(
            f"{type(model).__name__} has no module of fake quantization whose scale is fixed"
        )

    def make(changes: Changes) -> None:
        for module, forward in frozen.items():
            set_item(changes, vars(module), "forward", forward)

    with restored(make):
        yield


def _frozen(model: nn.Module) -> Iterator[tuple[nn.Module, Forward]]:
    """Yield each module of fake quantization, and a function with its current scales."""
    for module in model.modules():
        if all(hasattr(module, name) for name in _OF_TORCH):
            yield module, _of_torch(module)
        quantizer: Any = getattr(module, "weight_fake_quantizer", None)
        if quantizer is not None and _is_by_channel(quantizer):
            weight: Any = module.weight
            yield quantizer, _of_torchao(quantizer, weight)


def _of_torch(module: Any) -> Forward:
    import torch

    if not int(module.fake_quant_enabled[0]):
        return lambda x: x
    bounds = module.activation_post_process
    lowest, highest = int(bounds.quant_min), int(bounds.quant_max)
    if not module.is_per_channel:
        scale, zero_point = float(module.scale), int(module.zero_point)
        return lambda x: torch.fake_quantize_per_tensor_affine(
            x, scale, zero_point, lowest, highest
        )
    axis = int(module.ch_axis)
    return lambda x: torch.fake_quantize_per_channel_affine(
        x, module.scale, module.zero_point, axis, lowest, highest
    )


def _is_by_channel(quantizer: Any) -> bool:
    """Whether a module is torchao's fake quantization to int8 with a scale for each row."""
    if not type(quantizer).__module__.startswith("torchao."):
        return False
    config = getattr(quantizer, "config", None)
    granularity = type(getattr(config, "granularity", None)).__name__
    return str(getattr(config, "dtype", "")) == "torch.int8" and granularity == "PerAxis"


def _of_torchao(quantizer: Any, weight: torch.Tensor) -> Forward:
    import torch

    from htp_export.exporter.capture.model_state import unchanged

    with unchanged(quantizer, (weight,)), torch.no_grad():
        quantizer(weight)  # updates its scale, which may be that of earlier weights
        scale = quantizer.scale.reshape(-1).to(torch.float32, copy=True)
        zero_point = quantizer.zero_point.reshape(-1).to(torch.int32, copy=True)
    return lambda x: torch.fake_quantize_per_channel_affine(x, scale, zero_point, 0, -128, 127)


@checks_arguments
def module_filter(
    model: nn.Module, plan: str | Sequence[str] | Mapping[str, Any], value: Any = None
) -> Callable[[nn.Module, str], bool]:
    """A ``filter_fn`` of torchao for the modules that a selector or a plan matches.

    ``quantize_(model, config, filter_fn)`` calls it for every module. So a plan for the ONNX file can
    be trained in PyTorch: ``quantize_(model, int8_config, module_filter(model, plan, "int8"))``.

    Thread-safe, also for calls on the same model.

    Args:
        model: The model before any of its modules is replaced.
        plan: A selector; or selectors with values, in order: later rules win.
        value: For a plan, the value of the modules to quantize.

    Returns:
        A function of a module and its name: whether it is a linear layer that the plan matches.

    Raises:
        SelectorError: A selector cannot be read or matches no module.
        InputError: No linear layer has this value.

    Examples:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> wanted = module_filter(net, {"**": "int8", "2": "fp16"}, "int8")
        >>> [name for name, module in net.named_modules() if wanted(module, name)]
        ['0']
    """
    from torch import nn

    classes = Hierarchy.from_module(model).classes
    if isinstance(plan, Mapping):
        values: dict[str, Any] = {}
        for selector, assigned in plan.items():
            values |= dict.fromkeys(select_below(selector, classes), assigned)
        paths = {path for path, assigned in values.items() if assigned == value}
    else:
        paths = set(select_below(plan, classes))
    modules = dict(model.named_modules())
    if not any(isinstance(modules.get(path), nn.Linear) for path in paths):
        if value is None:
            raise InputError(f"{plan!r} names no linear layer")
        raise InputError(f"the plan gives {value!r} to no linear layer")
    return lambda module, name: isinstance(module, nn.Linear) and name in paths
