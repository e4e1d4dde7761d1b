"""`decomposed_attention`: inside the context, the modules of a model run attention in steps.

``nn.MultiheadAttention`` gets another ``forward``. In other modules,
``scaled_dot_product_attention``, or the operations of attention, are found by observing the calls
of torch's functions.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from htp_export.attention.multihead import forward_in_steps, projections_of
from htp_export.attention.recording import AttentionCall, Recording, is_product, is_softmax
from htp_export.attention.steps import (
    AttentionSteps,
    KernelPart,
    KernelSteps,
    ObservedStep,
    PackedProjection,
    SdpaCall,
    SeparateSteps,
    Step,
)
from htp_export.errors import InputError
from htp_export.format.hierarchy import module_paths
from htp_export.process.argument_types import checks_arguments
from htp_export.process.restoring import Changes, enter, restored, turn_attention_fast_path_off

if TYPE_CHECKING:
    from htp_export.format.hierarchy import Hierarchy

_log = logging.getLogger(__name__)

_WATCHED: weakref.WeakKeyDictionary[nn.Module, _StepsOfCalls] = weakref.WeakKeyDictionary()
"""Module whose attention already runs in steps → the mode of the context that runs it."""


@checks_arguments
@contextlib.contextmanager
def decomposed_attention(
    model: nn.Module,
    *,
    exact: bool = False,
    keep_kernel: bool = False,
) -> Iterator[None]:
    """Run the attention of a model as named steps, each a module with a path of its own.

    These are ``scores``, ``softmax`` and ``context``, and of an ``nn.MultiheadAttention``
    ``q_proj``, ``k_proj`` and ``v_proj`` too; ``docs/attention.md`` lists the code of each.
    Afterwards the model is as before, also on errors.

    Results differ from the original's by rounding. For a query whose keys are all masked, they are
    as torch's operators define: zeros from ``scaled_dot_product_attention``, NaN if weights are
    returned.

    May be nested: modules whose attention already runs in steps are unchanged. Not thread-safe: no
    other thread may use the model meanwhile.

    Args:
        model: The model. Subclasses of ``nn.MultiheadAttention`` with a ``forward`` of their own
            are unchanged.
        exact: Whether query, key and value are projected in one product if the original does so
            (the step ``in_proj`` or ``kv_proj``, of which ``q_proj``, ``k_proj`` and ``v_proj``
            select their parts), and everything is computed in the order of torch's slow path, so
            that results are equal bit for bit.
        keep_kernel: Whether ``scores``, ``softmax`` and ``context`` are one call of
            ``scaled_dot_product_attention``, whose operator belongs to all three: at opset 23,
            dynamo exports it as one ``Attention`` node. Attention that a module computes from
            products has no kernel to keep, and runs in steps.

    Returns:
        A context manager.

    Raises:
        InputError: If a module has a submodule with the name of a step, or is given nested tensors;
            if a model of transformers uses kernels of other libraries, such as
            ``flash_attention_2``; if both options are set, because kernels round in their own way.

    Examples:
        >>> import torch
        >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> x = torch.randn(1, 5, 8)
        >>> with torch.no_grad(), decomposed_attention(attention):
        ...     [name for name, _ in attention.named_children()], tuple(attention(x, x, x)[0].shape)
        (['out_proj', 'q_proj', 'k_proj', 'v_proj', 'scores', 'softmax', 'context'], (1, 5, 8))
        >>> [name for name, _ in attention.named_children()]
        ['out_proj']
    """
    with _in_steps(model, exact=exact, keep_kernel=keep_kernel):
        yield


@contextlib.contextmanager
def attention_as_in(hierarchy: Hierarchy, model: nn.Module) -> Iterator[None]:
    """Run the attention of a model in the steps of a file's module tree, if it has any."""
    steps: defaultdict[str | None, dict[str, str]] = defaultdict(dict)
    for path, info in hierarchy.items():
        # LoRA has synthetic modules, too
        if info.synthetic and info.class_name.startswith(f"{Step.__module__}."):
            steps[hierarchy.parent(path)][path.rpartition(".")[2]] = info.simple_class
    if not steps:
        yield
        return
    classes = {name for by_name in steps.values() for name in by_name.values()}
    callers = {
        module: steps[path]
        for path, _, module in module_paths(model)
        if path in steps and not _is_plain(module)
    }
    exact = PackedProjection.__name__ in classes
    keep_kernel = KernelPart.__name__ in classes
    with _in_steps(model, exact=exact, keep_kernel=keep_kernel, callers=callers):
        yield


@contextlib.contextmanager
def _in_steps(
    model: nn.Module,
    *,
    exact: bool,
    keep_kernel: bool,
    callers: Mapping[nn.Module, Mapping[str, str]] | None = None,
) -> Iterator[None]:
    """As `decomposed_attention`; modules in ``callers`` get steps before their first call.

    See `_StepsOfCalls.hold`.
    """
    if exact and keep_kernel:
        raise InputError("exact and keep_kernel exclude each other: a kernel rounds in its own way")
    _refuse_foreign_kernels(model)
    make_steps = KernelSteps if keep_kernel else functools.partial(SeparateSteps, exact)

    def make(changes: Changes) -> None:
        turn_attention_fast_path_off(changes)
        _install(changes, model, make_steps, exact)
        _StepsOfCalls(make_steps).hold(changes, model, callers)

    with restored(make):
        yield


def _install(
    changes: Changes,
    model: nn.Module,
    make_steps: Callable[[], AttentionSteps],
    exact: bool,
) -> None:
    for path, _, attention in module_paths(model):
        if not _is_plain(attention):
            continue
        steps = make_steps()
        modules = projections_of(attention, exact=exact) | steps.modules
        taken = [name for name in modules if hasattr(attention, name)]
        if taken:
            raise InputError(
                f"module {path!r} has an attribute {taken[0]!r} already, the name of a step of "
                "attention"
            )
        changes.will_undo(functools.partial(_remove, attention, tuple(modules)))
        for name, step in modules.items():
            attention.add_module(name, step.train(attention.training))
        attention.__dict__["forward"] = forward_in_steps(attention, steps, path, exact=exact)


def _refuse_foreign_kernels(model: nn.Module) -> None:
    """Raise an `InputError` for a model of transformers that calls attention of another library."""
    for path, _, module in module_paths(model):
        name = getattr(getattr(module, "config", None), "_attn_implementation", None)
        # "owner/name" of a kernel
        if isinstance(name, str) and ("flash" in name or "flex" in name or "/" in name):
            raise InputError(
                f"module {path!r} computes attention with {name!r}, in a kernel that has no steps; call "
                'set_attn_implementation("eager") or ("sdpa") on the model first'
            )


def _is_plain(module: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
    """Whether a module is an ``nn.MultiheadAttention`` with the original ``forward``."""
    own_forward = (
        "forward" in vars(module) or type(module).forward is not nn.MultiheadAttention.forward
    )
    return isinstance(module, nn.MultiheadAttention) and not own_forward


def _remove(attention: nn.Module, names: tuple[str, ...]) -> None:
    attention.__dict__.pop("forward", None)
    for name in names:
        attention._modules.pop(name, None)


class _StepsOfCalls(TorchFunctionMode):
    """While active, runs the attention that a module computes itself in steps of the module.

    ``make_steps`` creates the steps that replace ``scaled_dot_product_attention`` in a module.
    """

    def __init__(self, make_steps: Callable[[], AttentionSteps]) -> None:
        super().__init__()
        self._make_steps = make_steps
        self._running = threading.local()
        self._paths: dict[nn.Module, str] = {}
        self._steps: dict[nn.Module, AttentionSteps] = {}
        self._observed: dict[tuple[nn.Module, str], ObservedStep] = {}
        self._places: dict[Step, tuple[nn.Module, str]] = {}
        self._reported: set[nn.Module] = set()

    def hold(
        self,
        changes: Changes,
        model: nn.Module,
        steps: Mapping[nn.Module, Mapping[str, str]] | None = None,
    ) -> None:
        """Observe a model until the changes are undone.

        Modules in ``steps`` get theirs now, from the classes of the steps by name; others during
        their first call.
        """
        self._paths = {module: path for path, _, module in module_paths(model)}
        for module in list(model.modules()):
            if module in _WATCHED or isinstance(module, torch.jit.ScriptModule):
                continue  # already in steps, or impossible to observe
            changes.will_undo(functools.partial(_WATCHED.pop, module, None))
            _WATCHED[module] = self
            handles: list[Any] = []
            changes.will_undo(functools.partial(_remove_all, handles))
            handles.append(module.register_forward_pre_hook(self._enter))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        changes.will_undo(self._remove_steps)
        for module, classes in (steps or {}).items():
            watching = _WATCHED.get(module, self)
            observed = [
                name for name, class_name in classes.items() if class_name == ObservedStep.__name__
            ]
            for name in observed:
                watching._observe(module, name.rpartition("_")[2], name)
            if len(observed) < len(classes):
                watching._steps_in(module)
        enter(changes, self, of_thread=True)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # functions that Dynamo compiles stay unchanged
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        call = AttentionCall(func, args, kwargs or {})
        stack = self._stack
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
        """Run a softmax in steps with the operations from the product on, if there is one."""
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
        """Warn once that the attention of a module does not run in steps."""
        if module not in self._reported:
            self._reported.add(module)
            _log.warning(
                "module %r: the softmax of a product does not run in steps: between the two, %s",
                self._paths.get(module, type(module).__name__), problem,
            )  # fmt: skip

    @property
    def _stack(self) -> list[Recording]:
        """The running modules of this thread, outermost first."""
        stack: list[Recording] = self._running.__dict__.setdefault("stack", [])
        return stack

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(Recording(module))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._stack and self._stack.pop().module is not module:
            pass

    def _steps_in(self, module: nn.Module) -> AttentionSteps:
        """The steps of a module for ``scaled_dot_product_attention``, created at its first call."""
        if module not in self._steps:
            self._steps[module] = self._make_steps()
            self._name(module, self._steps[module].modules, "sdpa")
        for step in self._steps[module].modules.values():
            self._put_in_place(step)
        return self._steps[module]

    def _observe(
        self,
        module: nn.Module,
        kind: str,
        name: str | None = None,
    ) -> ObservedStep:
        """One step of a module that computes attention from products, created at its first call."""
        step = self._observed.get((module, kind))
        if step is None:
            step = self._observed[module, kind] = ObservedStep()
            if name is None:
                self._name(module, {kind: step}, "eager")
            else:
                self._places[step] = module, name
        self._put_in_place(step)
        return step

    def _name(self, module: nn.Module, steps: Mapping[str, Step], word: str) -> None:
        """Choose the names of steps in a module, with a prefix if they are names of attributes."""
        prefix = ""
        number = 1
        while any(hasattr(module, prefix + name) for name in steps):
            prefix = f"{word}_" if number == 1 else f"{word}_{number}_"
            number += 1
        self._places.update((step, (module, prefix + name)) for name, step in steps.items())

    def _put_in_place(self, step: Step) -> None:
        """Register a step; again if the module was restored since, as for a second attempt."""
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
    """Call a function, and record results that depend on products, in all running modules."""
    *outer, innermost = stack
    record_results = [
        recording.watch(call, "a submodule computes")
        for recording in outer
        if recording.reads(call)
    ]
    if innermost.reads(call) or innermost.is_attention_product(call):
        record_results.append(innermost.watch(call))
    result = call()
    for record in record_results:
        record(result)
    innermost.note_parameters(call, result)
    return result


def _remove_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
