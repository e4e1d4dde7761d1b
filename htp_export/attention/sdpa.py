"""``scaled_dot_product_attention`` in steps, in whichever module calls it."""

from __future__ import annotations

import functools
import itertools
import math
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from htp_export.attention.steps import Arithmetic, Context, Scores, Softmax, Step
from htp_export.process.restoring import Changes

__all__ = ["StepsOfSdpa"]

_WATCHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules whose calls run in steps already, in a context around this one."""


class StepsOfSdpa(TorchFunctionMode):
    """While it is held, a call of ``scaled_dot_product_attention`` runs steps in the innermost module that runs.

    Args:
        exact: Whether operations have the order of torch's reference kernel.
    """

    def __init__(self, exact: bool) -> None:
        super().__init__()
        self._arithmetic = Arithmetic.SDPA if exact else Arithmetic.SHORT
        self._running = threading.local()
        self._steps: dict[nn.Module, tuple[Step, Step, Step]] = {}

    def hold(self, changes: Changes, model: nn.Module) -> None:
        """Watch a model until the changes are taken back."""
        for module in list(model.modules()):
            if module in _WATCHED or isinstance(module, torch.jit.ScriptModule):
                continue
            changes.will_undo(functools.partial(_WATCHED.discard, module))
            _WATCHED.add(module)
            handles: list[Any] = []
            changes.will_undo(functools.partial(_remove_all, handles))
            handles.append(module.register_forward_pre_hook(self._enter))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        changes.will_undo(self._remove_steps)
        entered: list[bool] = []
        changes.will_undo(lambda: self.__exit__(None, None, None) if entered and entered.pop() else None)  # type: ignore[no-untyped-call]
        self.__enter__()  # type: ignore[no-untyped-call]
        entered.append(True)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.scaled_dot_product_attention and self._stack:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @property
    def _stack(self) -> list[nn.Module]:
        stack: list[nn.Module] = self._running.__dict__.setdefault("stack", [])
        return stack

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._stack and self._stack.pop() is not module:
            pass

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Source: the reference implementation in the documentation of ``scaled_dot_product_attention``."""
        if is_causal and attn_mask is not None:
            raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")  # as torch says it
        scores, softmax, context = self._steps_in(self._stack[-1])
        mask = attn_mask
        if is_causal:
            mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf)
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        factor = 1 / math.sqrt(_fixed_size(query, -1)) if scale is None else scale
        weights = softmax(scores(query, key, mask, factor, self._arithmetic), dropout_p, attn_mask is not None)
        result: Tensor = context(weights, value)
        return result

    def _steps_in(self, module: nn.Module) -> tuple[Step, Step, Step]:
        """The steps of a module, made at its first call; with other names if it has modules of these names."""
        if module not in self._steps:
            steps = (Scores(), Softmax(), Context())
            names = ("scores", "softmax", "context")
            prefixes = itertools.chain(["", "sdpa_"], (f"sdpa_{number}_" for number in itertools.count(2)))
            prefix = next(each for each in prefixes if not any(hasattr(module, each + name) for name in names))
            self._steps[module] = steps
            for name, step in zip(names, steps, strict=True):
                module.add_module(prefix + name, step.train(module.training))
        return self._steps[module]

    def _remove_steps(self) -> None:
        for module, steps in self._steps.items():
            for name in [name for name, child in module._modules.items() if child in steps]:
                del module._modules[name]
        self._steps.clear()


def _remove_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _fixed_size(tensor: Tensor, dim: int) -> int:
    """A size that is the same for all inputs; while TorchScript traces, sizes are tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        return int(tensor.shape[dim])
