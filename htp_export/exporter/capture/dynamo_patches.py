"""Wrappers that tell a running capture what torch's dynamo exporter does; `patches` says where each one goes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from htp_export.exporter.capture import running, torch_internals
from htp_export.exporter.capture.bodies import watch_bodies
from htp_export.exporter.capture.patching import replacing
from htp_export.process.restoring import Changes

_REPLACED = "following a value that the optimiser replaced"


@replacing
def core_export(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Hand an export over to the exporter that was asked for tags in this thread."""
    active = running.wanted()
    if active is None or running.dynamo_capture.get() is not None:
        return original(model, *args, **kwargs)
    return active.dynamo(lambda: original(model, *args, **kwargs), model)


@replacing
def export_program(original: Callable[..., Any], mod: Any, *args: Any, **kwargs: Any) -> Any:
    """While tags are wanted, capture the modules that run while ``torch.export`` makes a program."""
    active = running.wanted()
    if (
        active is None
        or running.dynamo_capture.get() is not None
        or not hasattr(mod, "named_modules")
    ):
        return original(mod, *args, **kwargs)
    return active.program(lambda: original(mod, *args, **kwargs), mod)


def call_module(original: Callable[..., Any]) -> Callable[..., Any]:
    """Watch each module's call from one frame: for every FX node, torch looks up the line of each frame above it."""

    @functools.wraps(original)
    def wrapper(self: Any, module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        capture = running.dynamo_capture.get()
        if capture is None:
            return original(self, module, forward, args, kwargs)
        called = torch_internals.called_by_export(module)
        try:
            name = self.path_of_module(called)
        except Exception:
            # a module that was not in the model when the tracing began: torch has no scope for it
            name = None
        calls, changes = [(called, name)], Changes()
        if (inner := torch_internals.called_by_forward(called)) is not None:
            calls.append((inner, None))
        torch_internals.call_uncompiled(changes, called)
        step = "noting that a module is called"
        entered = [
            each
            for each, scope in calls
            if capture.step(step, capture.calls.enter, self, each, scope, args, kwargs)
        ]
        try:
            result = original(self, module, forward, args, kwargs)
        finally:
            changes.take_back()
        for _ in entered:
            capture.step("noting that a module returns", capture.calls.leave, self, result)
        return result

    return wrapper


@replacing
def call_region(original: Callable[..., Any], func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a function that ``torch.compiler.nested_compile_region`` marks as if it were not marked.

    torch lets Dynamo trace such a region, and runs the graph of it in which no call of a module is
    seen. The exported graph is the same without that.
    """
    if torch.compiler.is_dynamo_compiling() or running.dynamo_capture.get() is None:
        return original(func, *args, **kwargs)
    return func(*args, **kwargs)


def call_operator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Watch operators with branches or loop bodies."""

    @functools.wraps(original)
    def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        capture = running.dynamo_capture.get()
        if capture is None or not capture.step(
            "noting the bodies of an operator", capture.calls.enter_operator, self, args
        ):
            return original(self, *args, **kwargs)
        try:
            return original(self, *args, **kwargs)
        finally:
            capture.step("noting that an operator with bodies returns", capture.calls.bodies.leave)

    return wrapper


@replacing
def prepare(original: Callable[..., Any], exported_program: Any, *args: Any, **kwargs: Any) -> Any:
    """While torch decomposes the exported program, watch what becomes of each node."""
    capture = running.dynamo_capture.get()
    if capture is None:
        return original(exported_program, *args, **kwargs)
    changes = capture.changes.inner()
    try:
        capture.step("reading the exported program", capture.exported, exported_program)
        watched = functools.partial(_run_watched, capture)
        preparing = "preparing to watch the bodies of the exported program"
        capture.step(preparing, watch_bodies, changes, exported_program.graph_module, watched)
        prepared = _decomposed(
            capture, lambda: original(exported_program, *args, **kwargs), exported_program, changes
        )
    finally:
        changes.take_back()
    capture.step("reading the decomposed program", capture.decomposition.finish, prepared)
    return prepared


def _decomposed(capture: Any, decompose: Callable[[], Any], program: Any, changes: Changes) -> Any:
    """Decompose a program; once more where torch fails at containers that the program takes or returns."""
    try:
        return decompose()
    except Exception as error:
        if not torch_internals.use_plain_containers(changes, program):
            raise
        failure = error
    capture.step("reading the exported program once more", capture.exported, program)
    try:
        return decompose()
    except Exception:
        raise failure from None


def run_node(original: Callable[..., Any]) -> Callable[..., Any]:
    """Note what each node became: torch runs an exported graph node by node while it decomposes it."""

    @functools.wraps(original)
    def wrapper(self: Any, n: Any) -> Any:
        capture = running.dynamo_capture.get()
        if capture is None or not capture.decomposition.runs:
            return original(self, n)
        return _run_watched(capture, lambda: original(self, n), self, n)

    return wrapper


def _run_watched(capture: Any, run: Callable[[], Any], interpreter: Any, node: Any) -> Any:
    """Run a node of an FX graph and return what it gives; if another graph is traced meanwhile, note what it became."""
    before = capture.step(
        "looking for the FX trace that runs", torch_internals.fx_tracing, interpreter, node
    )
    result = run()
    if before is not None:
        following = "following a node of the exported program through its decomposition"
        executed = capture.step(following, torch_internals.executed_since, before, node, result)
        capture.step(following, capture.decomposition.record, executed)
    return result


@replacing
def optimize(original: Callable[..., Any], self: Any) -> Any:
    """Find tensors again before the graph is optimised: it may have been read back from bytes."""
    capture = running.dynamo_capture.get()
    if capture is not None:
        capture.step(
            "finding tensors again after the opset was converted", capture.converted, self.model
        )
    return original(self)


@replacing
def replace_input_with(original: Callable[..., Any], self: Any, index: int, value: Any) -> Any:
    """Note which value replaces another at one of its consumers."""
    if 0 <= index < len(self.inputs):
        _replaced(self.inputs[index], value)
    original(self, index, value)


@replacing
def replace_all_uses_with(
    original: Callable[..., Any], self: Any, replacement: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Note which value replaces another."""
    _replaced(self, replacement)
    original(self, replacement, *args, **kwargs)


def _replaced(old: Any, new: Any) -> None:
    capture, active = running.dynamo_capture.get(), running.wanted()
    if capture is not None:
        capture.step(_REPLACED, capture.replaced, old, new)
    elif active is not None:
        active.replaced(old, new)


@replacing
def save(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Bring the tags of models that were rewritten up to date before a model is written."""
    active = running.wanted()
    if active is not None and running.dynamo_capture.get() is None:
        active.settle()
    return original(*args, **kwargs)


@replacing
def skips_frame(original: Callable[..., Any], obj: Any, *rest: Any, **named: Any) -> Any:
    """Let Dynamo trace torch's own layers where they are called from code that it cannot trace.

    As a rule it leaves them alone there, as functions of torch, and the graphs of such a model lack
    them.
    """
    inlined = rest[0] if rest else named.get("is_inlined_call", False)
    if (
        running.wants_frames_of_layers.get()
        and not inlined
        and torch_internals.is_forward_of_layer(obj)
    ):
        return False
    return original(obj, *rest, **named)


@replacing
def reset_dynamo(original: Callable[..., Any]) -> Any:
    """Let nothing forget what Dynamo has compiled: ``torch.export`` resets it before it traces in strict mode."""
    if not running.keeps_dynamo.get():
        original()


@replacing
def list_once(original: Callable[..., Any]) -> Any:
    """List the operators that can be decomposed once, and again if there are others: torch takes 0.1 s an export."""
    composite = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    return _listed(original, tuple(composite))


@functools.lru_cache(maxsize=1)
def _listed(find: Callable[[], Any], names: tuple[str, ...]) -> Any:
    return find()


def read_once(original: Callable[..., Any]) -> Any:
    """Read torch's translations of all operators once; torch reads them anew for every export, which takes a second."""

    @functools.wraps(original)
    def from_torchlib(**options: Any) -> Any:
        read = running.translations_read.get()
        if read is None:
            return original(**options)
        key = tuple(sorted(options.items()))
        if key not in read:
            read[key] = original(**options)
        registry = copy.copy(read[key])
        registry.functions = {target: list(metas) for target, metas in registry.functions.items()}
        return registry

    return staticmethod(from_torchlib)
