"""Private parts of torch that are used, each behind a function that says what for.

The places that are patched stand in ``patches.py``. ``tests/test_torch_internals.py`` fails where a part has moved.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any


def bodies_run_in_place(module: Any) -> Iterator[Any]:
    """The graph modules inside an exported one that torch runs where they stand, once: ``with torch.no_grad():``."""
    for node in module.graph.nodes:
        if node.op == "call_function" and "wrap_with" in str(node.target):
            for given in node.all_input_nodes:
                if given.op == "get_attr" and hasattr(body := getattr(module, given.target), "graph"):
                    yield body
                    yield from bodies_run_in_place(body)


@contextlib.contextmanager
def bodies_watched(module: Any, note: Callable[[Any, list[str]], None]) -> Iterator[None]:
    """Watch bodies run while torch decomposes an exported graph: it dissolves them, and their nodes lose their scopes.

    Args:
        module: The exported graph module; its bodies get their own code back afterwards.
        note: Called with a node of a body and the names of the nodes that it became.
    """
    import torch
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    class Watched(torch.fx.Interpreter):
        """Runs a body node by node, as its own code does, and tells what each node became."""

        def run_node(self, n: torch.fx.Node) -> Any:
            mode = get_proxy_mode()
            nodes: Any = mode.tracer.graph.nodes if mode is not None else ()
            before = len(nodes)
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            result = getattr(self, n.op)(n.target, args, kwargs)
            made: Iterator[Any] = itertools.islice(reversed(nodes), len(nodes) - before)
            note(n, [node.name for node in made])
            return result

    bodies = list(bodies_run_in_place(module))
    for body in bodies:
        body.forward = Watched(body).run
    try:
        yield
    finally:
        for body in bodies:
            del body.forward


@contextlib.contextmanager
def attention_fast_path_off() -> Iterator[None]:
    """Run ``nn.MultiheadAttention`` and ``nn.TransformerEncoder`` in their plain form, which ONNX can express."""
    import torch

    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def tracing_state() -> Any:
    """The state of the TorchScript trace that runs in this thread; None where none does."""
    import torch

    return torch._C._get_tracing_state()


def state_names(model: Any) -> frozenset[str]:
    """Names of the parameters and buffers that a traced graph of this model takes as inputs, shared ones once."""
    import torch

    if not isinstance(model, torch.nn.Module):
        return frozenset()
    return frozenset(torch.jit._unique_state_dict(model))  # type: ignore[attr-defined, no-untyped-call]


class _ScopeNames(dict[str, str]):
    """Module path → the name of its scope in the trace; filled when the exporter has made its map."""

    def __init__(self, paths: dict[int, str]) -> None:
        self._paths = paths

    def get(self, path: str, default: Any = None) -> Any:
        if not self:
            import torch

            modules = torch.jit._trace._trace_module_map or {}
            self.update((self._paths.get(id(module.__dict__), ""), name) for module, name in modules.items())
        return super().get(path, default)


def scope_names(paths: dict[int, str]) -> dict[str, str]:
    """Module path → the name that the tracer of the running export gives the module's scope."""
    return _ScopeNames(paths)


def is_script_method(forward: Any) -> bool:
    """Whether a module's ``forward`` is scripted: then the tracer opens no scope for it."""
    import torch

    return isinstance(forward, torch._C.ScriptMethod)
