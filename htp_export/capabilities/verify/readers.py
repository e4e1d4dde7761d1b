"""The modules that read each parameter when a PyTorch model runs."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from htp_export.exporter.capture.torch_internals import gives_what_a_body_gives, has_bodies
from htp_export.format.module_paths import module_paths

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["named_tensors", "parameter_readers"]


def named_tensors(model: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer under each of its names; with ``recurse=False``, only those of the module itself."""
    yield from model.named_parameters(recurse=recurse, remove_duplicate=False)
    yield from model.named_buffers(recurse=recurse, remove_duplicate=False)


@contextlib.contextmanager
def parameter_readers(model: nn.Module) -> Iterator[Mapping[str, frozenset[str]]]:
    """Record the modules to which each parameter and buffer belongs while a model runs inside the block.

    A parameter belongs to the module that holds it, and to the innermost running module that passes it to an operation:
    ``nn.MultiheadAttention`` reads the weight of its ``out_proj``, which never runs. A tensor with several names
    belongs to the modules of all of them. Branches of ``torch.cond`` and loop bodies that did not run in the block run
    once at its end: torch does not allow them to have side effects.

    Args:
        model: The model, which runs without compilation. Its hooks are removed after the block.

    Yields:
        Name of every parameter and buffer → module paths; complete after the block.

    Examples:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
        >>> with parameter_readers(net) as readers:
        ...     _ = net(torch.ones(1, 2))
        >>> readers["0.weight"]
        frozenset({'0'})
    """
    names: defaultdict[int, list[str]] = defaultdict(list)
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

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            running.pop()

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
    readers.update({name: frozenset(readers_of[key]) for key, listed in names.items() for name in listed})


def _watch(readers_of: Mapping[int, set[str]], running: list[str]) -> Any:
    """Return a context manager in which each operation adds its module to the parameters that it reads.

    Args:
        readers_of: ``id`` of a parameter → its modules, which are extended.
        running: Paths of the running modules, outermost first.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    def is_body(value: Any) -> bool:
        return callable(value) and not isinstance(value, torch.Tensor)

    class Watch(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self._others: list[tuple[list[str], Any, list[Any]]] = []  # running modules, body, its arguments
            self._each_once = False

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if has_bodies(func):
                return self._run_bodies(func, args, kwargs or {})
            for tensor in _leaves((*args, *(kwargs or {}).values())):
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
            arguments = [argument for several in args if isinstance(several, list | tuple) for argument in several]
            if self._each_once and gives_what_a_body_gives(func):
                return [watched(body)(*arguments) for body in bodies][-1]
            result = func(*(watched(argument) if is_body(argument) else argument for argument in args), **kwargs)
            self._others += [(list(running), body, arguments) for body in bodies if body not in ran]
            return result

        def run_others(self) -> None:
            """Run the bodies that have not run; every body once, as loops in them may not end."""
            self._each_once = True
            for modules, body, arguments in self._others:
                running[:] = modules
                with contextlib.suppress(Exception), self:  # no other run has to succeed than the model's own
                    body(*arguments)

    return Watch()


def _leaves(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _leaves(value)
        else:
            yield value
