"""Quantization-aware training: models with fake quantization export as QuantizeLinear and DequantizeLinear."""

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
"""What the classes of ``torch.ao.quantization`` have, which torch is going to move to another package."""


@checks_arguments
@contextlib.contextmanager
def frozen_fake_quantize(model: nn.Module) -> Iterator[None]:
    """Run fake quantization with the scales that it has, so that it can be exported.

    Neither exporter of torch translates ``FusedMovingAvgObsFakeQuantize``, the default of
    ``prepare_qat``, which updates its scale while it runs. Inside this block, modules of fake
    quantization compute torch's ``fake_quantize_per_tensor_affine`` and
    ``fake_quantize_per_channel_affine``, which both exporters write as QuantizeLinear and
    DequantizeLinear. Observers do not run. Afterwards the model is as before, also on errors.

    These are the modules of ``torch.ao.quantization``, and those of torchao that quantize weights
    to int8 by channel. Others stay as they are; torchao's activations have scales of each token,
    which no QuantizeLinear has.

    Not thread-safe: no other thread may use the model meanwhile.

    Args:
        model: The model, with fake quantization that has seen data.

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
    """Modules of fake quantization, and what they compute with the scales that they have."""
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
    """Whether a module is torchao's fake quantization to int8 with a scale for each row of a matrix."""
    config, is_torchao = (
        getattr(quantizer, "config", None),
        type(quantizer).__module__.startswith("torchao."),
    )
    granularity = type(getattr(config, "granularity", None)).__name__
    return (
        is_torchao
        and str(getattr(config, "dtype", "")) == "torch.int8"
        and granularity == "PerAxis"
    )


def _of_torchao(quantizer: Any, weight: torch.Tensor) -> Forward:
    import torch

    from htp_export.exporter.capture.model_state import unchanged

    with unchanged(quantizer, (weight,)), torch.no_grad():
        quantizer(weight)  # its scale is that of the weights that it saw last
        scale = quantizer.scale.reshape(-1).to(torch.float32, copy=True)
        zero_point = quantizer.zero_point.reshape(-1).to(torch.int32, copy=True)
    return lambda x: torch.fake_quantize_per_channel_affine(x, scale, zero_point, 0, -128, 127)


@checks_arguments
def module_filter(
    model: nn.Module, plan: str | Sequence[str] | Mapping[str, Any], value: Any = None
) -> Callable[[nn.Module, str], bool]:
    """The modules that a selector or a plan names, as a ``filter_fn`` of torchao.

    ``quantize_(model, config, filter_fn)`` asks it for every module. So the plan that was found for
    the ONNX file can be trained in PyTorch: ``quantize_(model, int8_config, module_filter(model,
    plan, "int8"))``.

    Thread-safe, also for calls on the same model.

    Args:
        model: The model as it is before anything is replaced in it.
        plan: A selector; or selectors with values, in order: later rules win.
        value: Of a plan, the value of the modules that are wanted.

    Returns:
        A function of a module and its name: whether it is a linear layer that the plan names.

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
        values = {
            path: given
            for selector, given in plan.items()
            for path in select_below(selector, classes)
        }
        paths = {path for path, given in values.items() if given == value}
    else:
        paths = set(select_below(plan, classes))
    modules = dict(model.named_modules())
    if not any(isinstance(modules.get(path), nn.Linear) for path in paths):
        problem = (
            f"{plan!r} names none"
            if value is None
            else f"the plan gives {value!r} to no linear layer"
        )
        raise InputError(problem)
    return lambda module, name: isinstance(module, nn.Linear) and name in paths
