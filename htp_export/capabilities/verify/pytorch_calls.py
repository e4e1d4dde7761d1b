"""Records the inputs and outputs of every call of every module in one run of a PyTorch model."""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from htp_export.capabilities.verify.stable_sorting import stable_sorting
from htp_export.errors import InputError, described
from htp_export.exporter.capture import running
from htp_export.exporter.capture.calls import arguments_by_name
from htp_export.exporter.capture.modules import keep_training_modes, set_eval_mode
from htp_export.exporter.capture.torch_internals import turn_compilation_off
from htp_export.format.leaves import named_leaves, named_tensors_in
from htp_export.format.module_paths import module_paths
from htp_export.process.restoring import Changes
from htp_export.process.shared_settings import turn_attention_fast_path_off
from htp_export.runtime.arrays import ArrayStore, StoredArray, from_torch

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["ModuleCall", "evaluating", "record_calls"]


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module.

    Attributes:
        path: The module.
        number: Number of the call, from 0, in the order in which they began.
        inputs: Argument of ``forward`` (``hidden_states``, ``states.1``) → its values at entry; only wanted ones.
        outputs: The tensors that ``forward`` returned, in order; None for an unknown one.
        began: Position among all calls in the order in which they began. Calls that began later and ended earlier ran
            inside this one.
        tensors: For each tensor and number that ``forward`` returned, in order, whether it is a tensor. The TorchScript
            exporter represents sizes by tensors, and lists them among the results.
        computed_in: For each output the type of half precision in which a file computes it; ``""`` for none. Empty for
            calls of PyTorch.
    """

    path: str
    number: int
    inputs: Mapping[str, StoredArray]
    outputs: tuple[StoredArray | None, ...]
    began: int = 0
    tensors: tuple[bool, ...] = ()
    computed_in: tuple[str, ...] = ()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Use eval mode without gradients, fused attention kernels and compilation inside the block.

    Without compilation, ``torch.cond`` and loops call their functions, so that hooks see the modules inside.
    Compilation is a setting of the whole process, and exports compile branches: the block waits until no other thread
    exports or evaluates, and others wait for it.
    """
    import torch

    changes = Changes()
    try:
        try:
            running.wait_alone(changes)
            keep_training_modes(changes, model)
            turn_attention_fast_path_off(changes)
            changes.will_undo(functools.partial(torch.set_grad_enabled, torch.is_grad_enabled()))
            torch.set_grad_enabled(False)
            set_eval_mode(model)
            turn_compilation_off(changes)
            yield
        finally:
            changes.take_back()
    finally:
        changes.take_back()


def record_calls(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    store: ArrayStore,
    wanted: Callable[[str, int, str], bool],
) -> list[ModuleCall]:
    """Run a model once, and record every call of every module.

    Args:
        model: The model, in the wanted mode; its hooks are removed afterwards.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        store: The store for the values. Values that several modules see are stored once.
        wanted: Whether to record an argument, by module path, number of the call, and name.

    Returns:
        The calls, in the order in which they ended.

    Raises:
        InputError: If the model does not take these arguments, or fails on them.

    Examples:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.ReLU())
        >>> with ArrayStore.opened(1 << 20) as store:
        ...     calls = record_calls(net, (torch.tensor([-1.0, 2.0]),), {}, store, lambda *_: True)
        >>> [(call.path, call.inputs["input"].array.tolist(), call.outputs[0].array.tolist()) for call in calls]
        [('0', [-1.0, 2.0], [0.0, 2.0]), ('', [-1.0, 2.0], [0.0, 2.0])]
    """
    from torch.utils._pytree import tree_map

    recorder = _Recorder(store, wanted)
    handles: list[Any] = []
    try:
        for path, _, module in module_paths(model):
            with contextlib.suppress(RuntimeError):  # scripted modules take no hooks; they have no calls of their own
                handles += recorder.watch(path, module)
        try:
            # New containers of the same tensors: a model adds to the cache that it is given.
            args, kwargs = tree_map(_itself, (tuple(args), dict(kwargs)))
            with stable_sorting():
                model(*args, **kwargs)
        except Exception as error:  # whatever the user's own code raises
            raise InputError(_failed(model, recorder.running, error)) from error
    finally:
        for handle in handles:
            handle.remove()
    return recorder.calls


def _itself(leaf: Any) -> Any:
    return leaf


def _failed(model: nn.Module, running: Sequence[str], error: Exception) -> str:
    where = f" in module {running[-1]!r}" if running and running[-1] else ""
    return f"{type(model).__name__} cannot run on these inputs{where}: {described(error)}"


class _Recorder:
    """Records calls by hooks."""

    def __init__(self, store: ArrayStore, wanted: Callable[[str, int, str], bool]) -> None:
        self._store, self._wanted = store, wanted
        self._counts: collections.Counter[str] = collections.Counter()
        self._open: list[tuple[str, int, int, dict[str, StoredArray]]] = []
        self._begun = 0
        self._known: dict[int, tuple[weakref.ref[Any], int, StoredArray]] = {}
        self.calls: list[ModuleCall] = []

    @property
    def running(self) -> list[str]:
        """Paths of the modules that are running, outermost first."""
        return [path for path, *_ in self._open]

    def watch(self, path: str, module: nn.Module) -> Iterator[Any]:
        """Register hooks on a module, after its existing ones."""
        import torch

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.compiler.is_compiling():  # what is traced has no values
                return
            number = self._counts[path]
            self._counts[path] += 1
            named = named_tensors_in(arguments_by_name(module.forward, args, kwargs))
            held = {name: self._hold(tensor) for name, tensor in named if self._wanted(path, number, name)}
            inputs = {name: stored for name, stored in held.items() if stored is not None}
            self._open.append((path, number, self._begun, inputs))
            self._begun += 1

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            while self._open[-1][0] != path:  # calls that raised, and whose error somebody caught
                self._open.pop()
            _, number, began, inputs = self._open.pop()
            returned = [leaf for _, leaf in named_leaves(output) if isinstance(leaf, torch.Tensor | int | float)]
            outputs = tuple(self._hold(leaf) for leaf in returned if isinstance(leaf, torch.Tensor))
            places = tuple(isinstance(leaf, torch.Tensor) for leaf in returned)
            self.calls.append(ModuleCall(path, number, inputs, outputs, began, places))

        yield module.register_forward_pre_hook(enter, with_kwargs=True)
        yield module.register_forward_hook(leave, with_kwargs=True)

    def _hold(self, tensor: torch.Tensor) -> StoredArray | None:
        """Store the current values of a tensor, unless it was stored before and has not changed; None if it has none.

        A tensor inside of ``torch.vmap`` stands for a part of another, and a sparse one is no array.
        """
        try:
            version = tensor._version
        except RuntimeError:  # made in inference mode: nobody counts its changes
            version = -1
        seen = self._known.get(id(tensor))
        if seen is not None and seen[0]() is tensor and seen[1] == version >= 0:
            return seen[2]
        try:
            array = from_torch(tensor)
        except (RuntimeError, TypeError):
            return None
        stored = self._store.keep(array)
        self._known[id(tensor)] = (weakref.ref(tensor), version, stored)
        return stored
