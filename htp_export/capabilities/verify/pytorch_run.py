"""One run of a PyTorch model: inputs and outputs of every module call, and the modules that use each parameter."""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from htp_export.capabilities.verify.packed_sequences import PackedArray, packed_by
from htp_export.errors import InputError, described
from htp_export.exporter.capture import running
from htp_export.exporter.capture.calls import arguments_by_name
from htp_export.exporter.capture.modules import keep_training_modes, set_eval_mode
from htp_export.exporter.capture.torch_internals import (
    has_bodies,
    is_fake,
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
    """One call of a module.

    Attributes:
        path: The module.
        number: Number of the call, from 0.
        inputs: Argument of ``forward`` → values at entry, for wanted arguments.
        outputs: The returned tensors, in order; None for unknown values.
        began: Its position among all calls in the order in which they began. A call that began
            later and ended earlier ran inside this one.
        tensors: For each tensor and number that ``forward`` returned, whether it is a tensor:
            TorchScript lists sizes among the results.
        computed_in: For each output, the half-precision type in which a file computes it, or
            ``""``.
        draws: Whether random numbers were drawn in it.
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
    """Inside the block, use eval mode, without gradients, fused attention kernels and compilation.

    Without compilation, ``torch.cond`` and loops call their functions, so that hooks see the
    modules inside. Compilation is a setting of the whole process, and exports compile branches:
    therefore the block and exports or evaluations in other threads exclude each other.
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

    Args:
        model: The model.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        store: Receives the values, each once, also if several modules see it.
        wanted: Whether to record an argument, by module path, number of the call, and name.

    Raises:
        InputError: The model fails on these arguments.
    """
    from torch.utils._pytree import tree_map

    recorder = _Recorder(store, wanted)
    handles: list[Any] = []
    try:
        for path, _, module in module_paths(model):
            # Scripted modules refuse hooks; TorchScript calls them itself.
            with contextlib.suppress(RuntimeError):
                handles += recorder.watch(path, module)
        try:
            # New containers of the same tensors: a model appends to a cache among its arguments.
            args, kwargs = tree_map(lambda leaf: leaf, (tuple(args), dict(kwargs)))
            with stable_sorting():
                result = model(*args, **kwargs)
        except Exception as error:  # from the user's own code
            where = f" in module {recorder.running!r}" if recorder.running else ""
            raise InputError(
                f"{type(model).__name__} cannot run on these inputs{where}: {described(error)}"
            ) from error
    finally:
        for handle in handles:
            handle.remove()
    if any(map(is_fake, tensors_in(result))):
        raise InputError(_fake_values(model))
    return recorder.calls


def _fake_values(model: nn.Module) -> str:
    """Why a model returns tensors without values, and what to do."""
    where = "in a variable"
    for path, _, module in module_paths(model):
        for name, tensor in named_tensors_in(vars(module)):
            if is_fake(tensor):
                where = f"in attribute {name!r} of module {path!r}" if path else f"in {name!r}"
    return (
        f"{type(model).__name__} returns tensors without values: torch.export traced it, and left one {where}, "
        "which the model computes once and keeps; create the model anew and run it once before the export"
    )


@dataclass(frozen=True)
class _OpenCall:
    """A call that has begun and not ended; ``random_state`` is that of torch's generator at its beginning."""

    path: str
    number: int
    began: int
    inputs: Mapping[str, StoredArray]
    random_state: torch.Tensor


@dataclass(frozen=True)
class _StoredTensor:
    """The values of a tensor at one version, which torch counts up at each change in place."""

    tensor: weakref.ref[Any]
    version: int
    array: StoredArray


class _Recorder:
    """Records module calls by hooks."""

    def __init__(self, store: ArrayStore, wanted: Callable[[str, int, str], bool]) -> None:
        self._store, self._wanted = store, wanted
        self._counts: collections.Counter[str] = collections.Counter()
        self._open: list[_OpenCall] = []
        self._begun = 0
        self._stored_tensors: dict[int, _StoredTensor] = {}
        self.calls: list[ModuleCall] = []

    @property
    def running(self) -> str:
        """The innermost module that is running; the root if there is none."""
        return self._open[-1].path if self._open else ""

    def watch(self, path: str, module: nn.Module) -> Iterator[Any]:
        """Register hooks on a module, after its existing ones."""
        import torch

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.compiler.is_compiling():  # tensors of a trace have no values
                return
            number = self._counts[path]
            self._counts[path] += 1
            arguments = arguments_by_name(module.forward, args, kwargs)
            packed = packed_by(arguments)
            inputs: dict[str, StoredArray] = {}
            for name, tensor in named_tensors_in(arguments):
                stored = self._hold(tensor, packed) if self._wanted(path, number, name) else None
                if stored is not None:
                    inputs[name] = stored
            self._open.append(_OpenCall(path, number, self._begun, inputs, torch.get_rng_state()))
            self._begun += 1

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            # Calls that raised an error, which the model caught, never end.
            while self._open[-1].path != path:
                self._open.pop()
            call = self._open.pop()
            draws = not torch.equal(call.random_state, torch.get_rng_state())
            packed = packed_by(output)
            outputs: list[StoredArray | None] = []
            are_tensors: list[bool] = []
            for _, leaf in named_leaves(output):
                if isinstance(leaf, torch.Tensor):
                    outputs.append(self._hold(leaf, packed))
                    are_tensors.append(True)
                elif isinstance(leaf, int | float):
                    are_tensors.append(False)
            self.calls.append(
                ModuleCall(
                    path,
                    call.number,
                    call.inputs,
                    tuple(outputs),
                    call.began,
                    tuple(are_tensors),
                    draws=draws,
                )
            )

        yield module.register_forward_pre_hook(enter, with_kwargs=True)
        yield module.register_forward_hook(leave, with_kwargs=True)

    def _hold(
        self, tensor: torch.Tensor, packed: Mapping[int, tuple[Array, bool]]
    ) -> StoredArray | None:
        """Store the current values of a tensor once; None if it is sparse, or inside of ``torch.vmap``.

        ``packed``: The tensors of packed sequences, as `packed_by` returns them.
        """
        stored = self._stored(tensor)
        if stored is None or id(tensor) not in packed:
            return stored
        return PackedArray(stored.array, *packed[id(tensor)])

    def _stored(self, tensor: torch.Tensor) -> StoredArray | None:
        """Store the current values of a tensor, unless this version is stored."""
        try:
            version = tensor._version
        except RuntimeError:  # Tensors of inference mode have no version: always store them again.
            version = -1
        earlier = self._stored_tensors.get(id(tensor))
        # The id of a tensor that was deleted may be used again: compare the tensor itself.
        if earlier is not None and earlier.tensor() is tensor and earlier.version == version >= 0:
            return earlier.array
        try:
            array = from_torch(tensor)
        except (RuntimeError, TypeError):
            return None
        stored = self._store.keep(array)
        self._stored_tensors[id(tensor)] = _StoredTensor(weakref.ref(tensor), version, stored)
        return stored


# --- orders that PyTorch leaves open ---


@contextlib.contextmanager
def stable_sorting() -> Iterator[None]:
    """Inside the block, make sorts stable, and sort results of ``sorted=False``.

    PyTorch leaves both orders open. A mixture of experts sorts tokens by expert; if the order of
    the tokens of one expert differed from the file, every module between the two sorts would
    differ. Its router selects the best experts of a token, usually unsorted; among equal ones, ONNX's
    ``TopK`` selects the first.
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
            keywords = dict(kwargs or {})
            if function in best and "out" not in keywords:
                tensor = args[0] if args else next(iter(keywords.values()))
                # `narrow` has no dimension of a scalar to cut.
                if tensor.ndim:
                    return topk(*args, **keywords)
            if keywords.get("sorted") is False:
                keywords["sorted"] = True
            if function in sorting and "stable" not in keywords and len(args) <= 3:
                # The overloads with `stable` accept `dim` and `descending` by keyword only.
                keywords |= dict(zip(("dim", "descending"), args[1:], strict=False))
                return function(*args[:1], stable=True, **keywords)
            return function(*args, **keywords)

    with Stable():
        yield


# --- parameters ---


def named_tensors(model: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer under each of its names; with ``recurse=False``, without descendants."""
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
    running: list[str] = []  # paths of the running modules, the innermost last
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
    for key, names_of_tensor in names.items():
        for name in names_of_tensor:
            readers[name] = frozenset(readers_of[key])


@dataclass(frozen=True)
class _Body:
    """A branch or loop body that has not run: its function, its arguments, and the modules around it."""

    function: Any
    arguments: Sequence[Any]
    running: Sequence[str]


def _listed_arguments(args: Iterable[Any]) -> list[Any]:
    """The arguments of the bodies of an operator, which are in lists among its own arguments."""
    arguments: list[Any] = []
    for argument in args:
        if isinstance(argument, list | tuple):
            arguments += argument
    return arguments


def _watch(readers_of: Mapping[int, set[str]], running: list[str]) -> Any:
    """Return a context manager that adds the innermost running module to the readers of each operation's parameters."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._pytree import tree_leaves

    def is_body(argument: Any) -> bool:
        # A class is no body: the operator of an autograd function takes its class.
        return callable(argument) and not isinstance(argument, torch.Tensor | type)

    # The class is inside this function because its base needs torch, which is imported late.
    class Watch(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self._others: list[_Body] = []
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
            """Run an operator with bodies, and watch them: torch disables a mode while it handles a function."""
            ran: set[Any] = set()

            def watched(body: Any) -> Any:
                def run(*arguments: Any) -> Any:
                    ran.add(body)
                    with self:
                        return body(*arguments)

                return run

            bodies = [argument for argument in args if is_body(argument)]
            arguments = _listed_arguments(args)
            if self._each_once and returns_like_its_body(func):
                results = [watched(body)(*arguments) for body in bodies]
                return results[-1]
            watched_args = list(args)
            for position, argument in enumerate(args):
                if is_body(argument):
                    watched_args[position] = watched(argument)
            result = func(*watched_args, **kwargs)
            for body in bodies:
                if body not in ran:
                    self._others.append(_Body(body, arguments, list(running)))
            return result

        def run_others(self) -> None:
            """Run the bodies that have not run, every body once: on these arguments, a loop may not end."""
            self._each_once = True
            for body in self._others:
                running[:] = body.running
                # The model did not run this body on these arguments: an error is no fault.
                with contextlib.suppress(Exception), self:
                    body.function(*body.arguments)

    return Watch()
