"""One run of a PyTorch model: the inputs and outputs of every call of every module, and who reads which parameter."""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from htp_export.capabilities.verify.packed_sequences import PackedArray, packed_by
from htp_export.errors import InputError, described
from htp_export.exporter.capture import running
from htp_export.exporter.capture.calls import arguments_by_name
from htp_export.exporter.capture.modules import keep_training_modes, set_eval_mode
from htp_export.exporter.capture.torch_internals import (
    has_bodies,
    returns_like_its_body,
    turn_compilation_off,
)
from htp_export.format.hierarchy import module_paths
from htp_export.format.leaves import named_leaves, named_tensors_in, tensors_in
from htp_export.process.restoring import Changes, restored, turn_attention_fast_path_off
from htp_export.runtime.arrays import Array, ArrayStore, StoredArray, from_torch

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module: ``inputs`` at entry, only wanted ones, and ``outputs`` in order, None for unknown values.

    ``began`` is its position among all calls in the order in which they began: calls that began
    later and ended earlier ran inside this one. ``tensors`` says of each tensor and number that
    ``forward`` returned whether it is a tensor: TorchScript lists sizes among the results.
    ``computed_in`` is for each output the type of half precision in which a file computes it,
    ``""`` for none. ``draws`` says whether random numbers were drawn in it.
    """

    path: str
    number: int
    inputs: Mapping[str, StoredArray]
    outputs: tuple[StoredArray | None, ...]
    began: int = 0
    tensors: tuple[bool, ...] = ()
    computed_in: tuple[str, ...] = ()
    draws: bool = False


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Use eval mode without gradients, fused attention kernels and compilation inside the block.

    Without compilation, ``torch.cond`` and loops call their functions, so that hooks see the
    modules inside. Compilation is a setting of the whole process, and exports compile branches: the
    block waits until no other thread exports or evaluates, and others wait for it.
    """
    import torch

    def make(changes: Changes) -> None:
        running.wait_alone(changes)
        keep_training_modes(changes, model)
        turn_attention_fast_path_off(changes)
        changes.will_undo(
            functools.partial(torch.set_grad_enabled, torch.is_grad_enabled()), of_thread=True
        )
        torch.set_grad_enabled(False)
        set_eval_mode(model)
        turn_compilation_off(changes)

    with restored(make):
        yield


def record_calls(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    store: ArrayStore,
    wanted: Callable[[str, int, str], bool],
) -> list[ModuleCall]:
    """Run a model once, and return every call of every module, in the order in which they ended.

    Values go into ``store``, those that several modules see once. ``wanted``: whether to record an
    argument, by module path, number of the call, and name. An `InputError` if the model fails on
    these arguments.
    """
    from torch.utils._pytree import tree_map

    recorder = _Recorder(store, wanted)
    handles: list[Any] = []
    try:
        for path, _, module in module_paths(model):
            # scripted modules take no hooks; they have no calls of their own
            with contextlib.suppress(RuntimeError):
                handles += recorder.watch(path, module)
        try:
            # New containers of the same tensors: a model adds to the cache that it is given.
            args, kwargs = tree_map(lambda leaf: leaf, (tuple(args), dict(kwargs)))
            with stable_sorting():
                model(*args, **kwargs)
        except Exception as error:  # whatever the user's own code raises
            where = f" in module {recorder.running!r}" if recorder.running else ""
            raise InputError(
                f"{type(model).__name__} cannot run on these inputs{where}: {described(error)}"
            ) from error
    finally:
        for handle in handles:
            handle.remove()
    return recorder.calls


class _Recorder:
    def __init__(self, store: ArrayStore, wanted: Callable[[str, int, str], bool]) -> None:
        self._store, self._wanted = store, wanted
        self._counts: collections.Counter[str] = collections.Counter()
        self._open: list[tuple[str, int, int, dict[str, StoredArray], torch.Tensor]] = []
        self._begun = 0
        self._known: dict[int, tuple[weakref.ref[Any], int, StoredArray]] = {}
        self.calls: list[ModuleCall] = []

    @property
    def running(self) -> str:
        """The innermost module that is running; the root if there is none."""
        return self._open[-1][0] if self._open else ""

    def watch(self, path: str, module: nn.Module) -> Iterator[Any]:
        """Register hooks on a module, after its existing ones."""
        import torch

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.compiler.is_compiling():  # what is traced has no values
                return
            number = self._counts[path]
            self._counts[path] += 1
            arguments = arguments_by_name(module.forward, args, kwargs)
            named, packed = named_tensors_in(arguments), packed_by(arguments)
            held = {
                name: self._hold(tensor, packed)
                for name, tensor in named
                if self._wanted(path, number, name)
            }
            inputs = {name: stored for name, stored in held.items() if stored is not None}
            self._open.append((path, number, self._begun, inputs, torch.get_rng_state()))
            self._begun += 1

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            while self._open[-1][0] != path:  # calls that raised, and whose error somebody caught
                self._open.pop()
            _, number, began, inputs, generator = self._open.pop()
            draws = not torch.equal(generator, torch.get_rng_state())
            returned = [
                leaf
                for _, leaf in named_leaves(output)
                if isinstance(leaf, torch.Tensor | int | float)
            ]
            packed = packed_by(output)
            outputs = tuple(
                self._hold(leaf, packed) for leaf in returned if isinstance(leaf, torch.Tensor)
            )
            places = tuple(isinstance(leaf, torch.Tensor) for leaf in returned)
            self.calls.append(ModuleCall(path, number, inputs, outputs, began, places, draws=draws))

        yield module.register_forward_pre_hook(enter, with_kwargs=True)
        yield module.register_forward_hook(leave, with_kwargs=True)

    def _hold(
        self, tensor: torch.Tensor, packed: Mapping[int, tuple[Array, bool]]
    ) -> StoredArray | None:
        """Store the current values of a tensor once; None if it is sparse, or inside of ``torch.vmap``.

        ``packed``: ``id`` of a tensor of a packed sequence → see `packed_by`.
        """
        stored = self._stored(tensor)
        if stored is None or id(tensor) not in packed:
            return stored
        return PackedArray(stored.array, *packed[id(tensor)])

    def _stored(self, tensor: torch.Tensor) -> StoredArray | None:
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


# --- orders that PyTorch leaves open ---


@contextlib.contextmanager
def stable_sorting() -> Iterator[None]:
    """Let sorts be stable and ``sorted=False`` be sorted in a block, where PyTorch leaves the order open.

    A mixture of experts sorts tokens by expert. In which order those of one expert follow each
    other is open, and every module between the two sorts would differ. Its router takes the best
    experts of a token, unsorted as a rule; of equal ones, ``TopK`` takes those that come first.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    sorting = {torch.sort, torch.Tensor.sort, torch.argsort, torch.Tensor.argsort}
    best = {torch.topk, torch.Tensor.topk}

    def topk(input: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        values, places = torch.sort(input, dim=dim, descending=largest, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), places.narrow(dim, 0, k)))

    class Stable(TorchFunctionMode):
        def __torch_function__(
            self,
            function: Any,
            types: Any,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            given = dict(kwargs or {})
            if function in best and "out" not in given and (args or list(given.values()))[0].ndim:
                return topk(*args, **given)
            if given.get("sorted") is False:
                given["sorted"] = True
            if function in sorting and "stable" not in given and len(args) <= 3:
                # With `stable`, the others are keywords alone.
                given |= dict(zip(("dim", "descending"), args[1:], strict=False))
                return (
                    function(args[0], stable=True, **given)
                    if args
                    else function(stable=True, **given)
                )
            return function(*args, **given)

    with Stable():
        yield


# --- parameters ---


def named_tensors(model: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer under each of its names; with ``recurse=False``, only those of the module itself."""
    yield from model.named_parameters(recurse=recurse, remove_duplicate=False)
    yield from model.named_buffers(recurse=recurse, remove_duplicate=False)


@contextlib.contextmanager
def parameter_readers(model: nn.Module) -> Iterator[Mapping[str, frozenset[str]]]:
    """Record the modules to which each parameter and buffer belongs while a model runs inside the block.

    A parameter belongs to the module that holds it, to those that return it, and to the innermost
    running module that passes it to an operation: ``nn.MultiheadAttention`` reads the weight of its
    ``out_proj``, which never runs. A tensor with several names belongs to the modules of all of
    them. Branches of ``torch.cond`` and loop bodies that did not run in the block run once at its
    end: torch does not allow them to have side effects.

    Yielded is name → module paths, complete after the block. The model runs without compilation;
    its hooks are removed.

    Examples:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
        >>> with parameter_readers(net) as readers:
        ...     _ = net(torch.ones(1, 2))
        >>> readers["0.weight"]
        frozenset({'0'})
    """
    names = collections.defaultdict[int, list[str]](list)
    for name, tensor in named_tensors(model):
        names[id(tensor)].append(name)
    readers_of: dict[int, set[str]] = {key: set() for key in names}
    modules = module_paths(model)
    for path, _, module in modules:
        for _, tensor in named_tensors(module, recurse=False):
            readers_of[id(tensor)].add(path)
    running: list[str] = []
    handles = []
    for path, _, module in modules:

        def enter(_module: nn.Module, _args: Any, path: str = path) -> None:
            running.append(path)

        def leave(_module: nn.Module, _args: Any, output: Any, path: str = path) -> None:
            running.pop()
            for tensor in tensors_in(output):
                if id(tensor) in readers_of:
                    readers_of[id(tensor)].add(path)

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    readers: dict[str, frozenset[str]] = {}
    watch = _watch(readers_of, running)
    try:
        with watch:
            yield readers
        watch.run_others()
    finally:
        for handle in handles:
            handle.remove()
    readers.update(
        {name: frozenset(readers_of[key]) for key, listed in names.items() for name in listed}
    )


def _watch(readers_of: Mapping[int, set[str]], running: list[str]) -> Any:
    """A context manager in which each operation adds the innermost running module to the parameters that it reads."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._pytree import tree_leaves

    def is_body(value: Any) -> bool:
        return callable(value) and not isinstance(value, torch.Tensor)

    class Watch(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            # running modules, body, its arguments
            self._others: list[tuple[list[str], Any, list[Any]]] = []
            self._each_once = False

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if has_bodies(func):
                return self._run_bodies(func, args, kwargs or {})
            for tensor in tree_leaves((args, kwargs)):
                if running and id(tensor) in readers_of:
                    readers_of[id(tensor)].add(running[-1])
            return func(*args, **(kwargs or {}))

        def _run_bodies(self, func: Any, args: Any, kwargs: Any) -> Any:
            """Run an operator with bodies; torch takes a mode away while the mode handles a function."""
            ran: set[Any] = set()

            def watched(body: Any) -> Any:
                def run(*arguments: Any) -> Any:
                    ran.add(body)
                    with self:
                        return body(*arguments)

                return run

            bodies = [argument for argument in args if is_body(argument)]
            arguments = [
                argument
                for several in args
                if isinstance(several, list | tuple)
                for argument in several
            ]
            if self._each_once and returns_like_its_body(func):
                return [watched(body)(*arguments) for body in bodies][-1]
            result = func(
                *(watched(argument) if is_body(argument) else argument for argument in args),
                **kwargs,
            )
            self._others += [(list(running), body, arguments) for body in bodies if body not in ran]
            return result

        def run_others(self) -> None:
            """Run the bodies that have not run; every body once, as loops in them may not end."""
            self._each_once = True
            for modules, body, arguments in self._others:
                running[:] = modules
                # no other run has to succeed than the model's own
                with contextlib.suppress(Exception), self:
                    body(*arguments)

    return Watch()
