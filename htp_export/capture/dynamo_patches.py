"""Wrappers that tell a running capture what torch's dynamo exporter does; `patches` says where each one goes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from htp_export.capture.running import dynamo_capture, exporter, translations_read
from htp_export.capture.torch_internals import bodies_watched, run_watched


def core_export(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hand an export over to the exporter that was asked for tags in this thread."""

    @functools.wraps(original)
    def wrapper(model: Any, *args: Any, **kwargs: Any) -> Any:
        active = exporter.get()
        if active is None or dynamo_capture.get() is not None:
            return original(model, *args, **kwargs)
        return active.dynamo(lambda: original(model, *args, **kwargs), model)

    return wrapper


def call_module(original: Callable[..., Any]) -> Callable[..., Any]:
    """Watch each module's call from one frame: for every FX node, torch looks up the line of each frame above it."""

    @functools.wraps(original)
    def wrapper(self: Any, module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        capture = dynamo_capture.get()
        if capture is None:
            return original(self, module, forward, args, kwargs)
        try:
            name = self.path_of_module(module)
        except Exception:  # a module that was not in the model when the tracing began: torch has no scope for it
            name = None
        if not capture.enter(self, module, name, args, kwargs):
            return original(self, module, forward, args, kwargs)
        result = original(self, module, forward, args, kwargs)
        capture.leave(self, result)
        return result

    return wrapper


def prepare(original: Callable[..., Any]) -> Callable[..., Any]:
    """While torch decomposes the exported program, watch what becomes of each node."""

    @functools.wraps(original)
    def wrapper(exported_program: Any, *args: Any, **kwargs: Any) -> Any:
        capture = dynamo_capture.get()
        if capture is None:
            return original(exported_program, *args, **kwargs)
        capture.exported(exported_program)
        with bodies_watched(exported_program.graph_module, capture.ran_in_body):
            prepared = original(exported_program, *args, **kwargs)
        capture.decomposition.finish(prepared)
        return prepared

    return wrapper


def run_node(original: Callable[..., Any]) -> Callable[..., Any]:
    """Note what each node became: torch runs an exported graph node by node while it decomposes it."""

    @functools.wraps(original)
    def wrapper(self: Any, n: Any) -> Any:
        capture = dynamo_capture.get()
        if capture is None or not capture.decomposition.runs:
            return original(self, n)
        return run_watched(lambda: original(self, n), self, n, capture.ran)

    return wrapper


def translate_graph(original: Callable[..., Any]) -> Callable[..., Any]:
    """Note the values that the nodes of an FX graph became."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        values = original(*args, **kwargs)
        capture = dynamo_capture.get()
        if capture is not None:
            capture.translated_nodes(values)
        return values

    return wrapper


def translate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Note the ONNX graph before anything changes it."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        program = original(*args, **kwargs)
        capture = dynamo_capture.get()
        if capture is not None:
            capture.translated(program.model)
        return program

    return wrapper


def optimize(original: Callable[..., Any]) -> Callable[..., Any]:
    """Find tensors again before the graph is optimised: it may have been read back from bytes."""

    @functools.wraps(original)
    def wrapper(self: Any) -> Any:
        capture = dynamo_capture.get()
        if capture is not None:
            capture.converted(self.model)
        return original(self)

    return wrapper


def replace_input_with(original: Callable[..., Any]) -> Callable[..., Any]:
    """Note which value replaces another at one of its consumers."""

    @functools.wraps(original)
    def wrapper(self: Any, index: int, value: Any) -> None:
        capture = dynamo_capture.get()
        if capture is not None and 0 <= index < len(self.inputs):
            capture.replaced(self.inputs[index], value)
        original(self, index, value)

    return wrapper


def replace_all_uses_with(original: Callable[..., Any]) -> Callable[..., Any]:
    """Note which value replaces another."""

    @functools.wraps(original)
    def wrapper(self: Any, replacement: Any, /, *args: Any, **kwargs: Any) -> None:
        capture = dynamo_capture.get()
        if capture is not None:
            capture.replaced(self, replacement)
        original(self, replacement, *args, **kwargs)

    return wrapper


def read_once(original: Callable[..., Any]) -> Any:
    """Read torch's translations of all operators once; torch reads them anew for every export, which takes a second."""

    @functools.wraps(original)
    def from_torchlib(**options: Any) -> Any:
        read = translations_read.get()
        if read is None:
            return original(**options)
        key = tuple(sorted(options.items()))
        if key not in read:
            read[key] = original(**options)
        registry = copy.copy(read[key])
        registry.functions = {target: list(metas) for target, metas in registry.functions.items()}
        return registry

    return staticmethod(from_torchlib)
