"""Which modules read which parameters when a PyTorch model runs."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from htp_export.exporter.capture.torch_internals import has_bodies
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
def parameter_readers(
    model: nn.Module, called: Collection[str] = frozenset()
) -> Iterator[Mapping[str, frozenset[str]]]:
    """Watch what runs inside the block; afterwards tell which modules each parameter and buffer belongs to.

    A parameter belongs to the module that holds it, and to the one whose ``forward`` was the innermost that gave it to
    an operation: ``nn.MultiheadAttention`` reads the weight of its ``out_proj``, which never runs. A tensor held under
    several names belongs to the modules of all of them.

    ``torch.cond`` and loops are compiled, so that nobody sees what runs in them. A parameter that is given to one is
    read by the module that has the branch or loop, unless the module that holds it is known to have run, and ran
    nowhere else.

    Args:
        model: The model. Its hooks are gone again after the block.
        called: The modules that are known to have run, in branches and loops too.

    Yields:
        Name of every parameter and buffer → module paths; complete once the block is left.

    Examples:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
        >>> with parameter_readers(net) as readers:
        ...     _ = net(torch.ones(1, 2))
        >>> readers["0.weight"]
        frozenset({'0'})
    """
    import torch
    from torch.overrides import TorchFunctionMode

    names: defaultdict[int, list[str]] = defaultdict(list)
    for name, tensor in named_tensors(model):
        names[id(tensor)].append(name)
    found: dict[int, set[str]] = {key: set() for key in names}
    modules = module_paths(model)
    for path, _, module in modules:
        for _, tensor in named_tensors(module, recurse=False):
            found[id(tensor)].add(path)
    held = {key: frozenset(paths) for key, paths in found.items()}
    in_bodies: defaultdict[int, set[str]] = defaultdict(set)
    running: list[str] = []
    ran: set[str] = set()

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if running and not torch.compiler.is_compiling():  # what is traced has no values
                readers = in_bodies if has_bodies(func) else found
                for tensor in _leaves((*args, *(kwargs or {}).values())):
                    if id(tensor) in found:
                        readers[id(tensor)].add(running[-1])
            return func(*args, **(kwargs or {}))

    handles = []
    for path, _, module in modules:

        def enter(_module: nn.Module, _args: Any, path: str = path) -> None:
            if not torch.compiler.is_compiling():
                running.append(path)
                ran.add(path)

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            if not torch.compiler.is_compiling():
                running.pop()

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    readers: dict[str, frozenset[str]] = {}
    try:
        with Watch():
            yield readers
    finally:
        for handle in handles:
            handle.remove()
    for key, paths in in_bodies.items():
        if (held[key] & set(called)) <= ran:
            found[key].update(paths)
    readers.update({name: frozenset(found[key]) for key, listed in names.items() for name in listed})


def _leaves(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _leaves(value)
        else:
            yield value
