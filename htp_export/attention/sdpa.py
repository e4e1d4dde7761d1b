"""``scaled_dot_product_attention`` in steps, in whichever module calls it."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from htp_export.attention.steps import AttentionSteps, SdpaCall, Step
from htp_export.process.restoring import Changes

__all__ = ["StepsOfSdpa"]

_WATCHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules whose calls run in steps already, in a context around this one."""


class StepsOfSdpa(TorchFunctionMode):
    """While it is held, a call of ``scaled_dot_product_attention`` runs steps in the innermost module that runs.

    Args:
        make_steps: Makes the steps of a module.
    """

    def __init__(self, make_steps: Callable[[], AttentionSteps]) -> None:
        super().__init__()
        self._make_steps = make_steps
        self._running = threading.local()
        self._steps: dict[nn.Module, AttentionSteps] = {}

    def hold(self, changes: Changes, model: nn.Module, callers: Iterable[nn.Module] = ()) -> None:
        """Watch a model until the changes are taken back.

        Args:
            changes: Where to note what is changed.
            model: The model.
            callers: Modules that get their steps now; others get them at their first call.
        """
        for module in list(model.modules()):
            if module in _WATCHED or isinstance(module, torch.jit.ScriptModule):
                continue  # in steps already, or not to be watched
            changes.will_undo(functools.partial(_WATCHED.discard, module))
            _WATCHED.add(module)
            handles: list[Any] = []
            changes.will_undo(functools.partial(_remove_all, handles))
            handles.append(module.register_forward_pre_hook(self._enter))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        changes.will_undo(self._remove_steps)
        for module in callers:
            self._steps_in(module)
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
        if func is functional.scaled_dot_product_attention and self._stack and not isinstance(self._stack[-1], Step):
            return self._steps_in(self._stack[-1]).attend(SdpaCall(*args, **(kwargs or {})))
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

    def _steps_in(self, module: nn.Module) -> AttentionSteps:
        """The steps of a module, made at its first call; with other names if it has modules of these names."""
        if module not in self._steps:
            steps = self._make_steps()
            prefixes = itertools.chain(["", "sdpa_"], (f"sdpa_{number}_" for number in itertools.count(2)))
            prefix = next(each for each in prefixes if not any(hasattr(module, each + name) for name in steps.modules))
            self._steps[module] = steps
            for name, step in steps.modules.items():
                module.add_module(prefix + name, step.train(module.training))
        return self._steps[module]

    def _remove_steps(self) -> None:
        for module, steps in self._steps.items():
            for name in [name for name, child in module._modules.items() if child in steps.modules.values()]:
                del module._modules[name]
        self._steps.clear()


def _remove_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
