"""Attention in steps, in whichever module computes it: a call of ``scaled_dot_product_attention``, or of its parts.

The parts are a product of two tensors (``scores``, with what is computed from it: scale, mask, bias), its ``softmax``,
and the product of the result with a third tensor (``context``). They are found by watching the calls of torch's
functions, so that no knowledge of the model is needed.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from htp_export.attention.recording import AttentionCall, Recording, is_product, is_softmax
from htp_export.attention.steps import AttentionSteps, ObservedStep, SdpaCall, Step
from htp_export.format.module_paths import module_paths
from htp_export.process.restoring import Changes

__all__ = ["StepsOfCalls"]

_log = logging.getLogger(__name__)

_WATCHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules whose calls run in steps already, in a context around this one."""


class StepsOfCalls(TorchFunctionMode):
    """While it is held, attention that a module computes itself runs in steps in this module.

    Args:
        make_steps: Makes the steps that stand for ``scaled_dot_product_attention`` in a module.
    """

    def __init__(self, make_steps: Callable[[], AttentionSteps]) -> None:
        super().__init__()
        self._make_steps = make_steps
        self._running = threading.local()
        self._paths: dict[nn.Module, str] = {}
        self._steps: dict[nn.Module, AttentionSteps] = {}
        self._observed: dict[nn.Module, dict[str, ObservedStep]] = {}
        self._places: dict[Step, tuple[nn.Module, str]] = {}
        self._reported: set[nn.Module] = set()

    def hold(
        self, changes: Changes, model: nn.Module, steps: Mapping[nn.Module, Mapping[str, str]] | None = None
    ) -> None:
        """Watch a model until the changes are taken back.

        Args:
            changes: Where to note what is changed.
            model: The model.
            steps: Modules that get their steps now, with the classes of the steps by name; others get theirs when they
                run.
        """
        self._paths = {module: path for path, _, module in module_paths(model)}
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
        for module, classes in (steps or {}).items():
            observed = [name for name, class_name in classes.items() if class_name == ObservedStep.__name__]
            for name in observed:
                self._observe(module, name.rpartition("_")[2], name)
            if len(observed) < len(classes):
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
        if torch.compiler.is_dynamo_compiling():  # true where Dynamo traces this: what it compiles stays as it is
            return func(*args, **(kwargs or {}))
        call, stack = AttentionCall(func, args, kwargs or {}), self._stack
        if not stack or isinstance(stack[-1].module, Step):
            return call()
        if func is functional.scaled_dot_product_attention:
            return self._steps_in(stack[-1].module).attend(SdpaCall(*args, **call.kwargs))
        if is_softmax(func):
            return self._softmax(call, stack[-1])
        if is_product(func) and stack[-1].reads_weights(call):
            return self._observe(stack[-1].module, "context")(call.on, *call.tensors)
        return _recorded(call, stack)

    def _softmax(self, call: AttentionCall, recording: Recording) -> Any:
        """A softmax, and what it is computed from if that is a product, in steps."""
        scores, *others = call.tensors
        replay = recording.replay(scores)
        if replay is None:
            return _recorded(call, self._stack)
        if replay.problem:
            self._report(recording.module, replay.problem)
            return _recorded(call, self._stack)
        scores = self._observe(recording.module, "scores")(replay.run, *replay.tensors)
        weights: Tensor = self._observe(recording.module, "softmax")(call.on, scores, *others)
        recording.note_weights(weights)
        return weights

    def _report(self, module: nn.Module, problem: str) -> None:
        """Say once that the attention of a module does not run in steps."""
        if module not in self._reported:
            self._reported.add(module)
            _log.warning(
                "module %r: the softmax of a product stays as it is, not in steps of attention: between the two, %s",
                self._paths.get(module, type(module).__name__), problem,
            )  # fmt: skip

    @property
    def _stack(self) -> list[Recording]:
        """The modules that run in this thread, outermost first."""
        stack: list[Recording] = self._running.__dict__.setdefault("stack", [])
        return stack

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(Recording(module))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._stack and self._stack.pop().module is not module:
            pass

    def _steps_in(self, module: nn.Module) -> AttentionSteps:
        """The steps of a module, made at its first call; with other names if it has modules of these names."""
        if module not in self._steps:
            steps = self._make_steps()
            prefixes = itertools.chain(["", "sdpa_"], (f"sdpa_{number}_" for number in itertools.count(2)))
            prefix = next(each for each in prefixes if not any(hasattr(module, each + name) for name in steps.modules))
            self._steps[module] = steps
            self._places.update((step, (module, prefix + name)) for name, step in steps.modules.items())
        for step in self._steps[module].modules.values():
            self._put_in_place(step)
        return self._steps[module]

    def _observe(self, module: nn.Module, kind: str, name: str | None = None) -> ObservedStep:
        """One step of a module that computes the parts of attention itself, made at its first call.

        Args:
            module: The module.
            kind: Which step.
            name: Its name in the module, if that is known; else the first that is free.
        """
        steps = self._observed.setdefault(module, {})
        if kind not in steps:
            others = (f"eager_{number}_{kind}" for number in itertools.count(2))
            names = itertools.chain([kind, f"eager_{kind}"], others)
            steps[kind] = ObservedStep()
            self._places[steps[kind]] = (module, name or next(each for each in names if not hasattr(module, each)))
        self._put_in_place(steps[kind])
        return steps[kind]

    def _put_in_place(self, step: Step) -> None:
        """Register a step; again if the module was put back into an earlier state since, as for a second try."""
        module, name = self._places[step]
        if module._modules.get(name) is not step:
            module.add_module(name, step.train(module.training))

    def _remove_steps(self) -> None:
        for step, (module, name) in self._places.items():
            if module._modules.get(name) is step:
                del module._modules[name]
        self._steps.clear()
        self._observed.clear()
        self._places.clear()


def _recorded(call: AttentionCall, stack: Sequence[Recording]) -> Any:
    """Call a function, and note what it computes from products in modules that run."""
    innermost = stack[-1]
    notes = [recording.watch(call, "a submodule computes") for recording in stack[:-1] if recording.reads(call)]
    if innermost.reads(call) or innermost.is_attention_product(call):
        notes.append(innermost.watch(call))
    result = call()
    for note in notes:
        note(result)
    innermost.note_parameters(call, result)
    return result


def _remove_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
