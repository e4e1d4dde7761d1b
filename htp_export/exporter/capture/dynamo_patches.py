"""Wrappers that report torch's dynamo export to the running capture; see `patches`."""

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
def core_export(
    original: Callable[..., Any],
    model: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Pass an export to the exporter that adds tags in this thread, if there is one."""
    active = running.wanted()
    if active is None or running.dynamo_capture.get() is not None:
        return original(model, *args, **kwargs)
    return active.dynamo(lambda: original(model, *args, **kwargs), model)


@replacing
def export_program(
    original: Callable[..., Any],
    mod: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """If tags are wanted, capture the modules that run while ``torch.export`` exports a program."""
    active = running.wanted()
    if (
        active is None
        or running.dynamo_capture.get() is not None
        or not hasattr(mod, "named_modules")
    ):
        return original(mod, *args, **kwargs)
    return active.program(lambda: original(mod, *args, **kwargs), mod)


def call_module(original: Callable[..., Any]) -> Callable[..., Any]:
    """Observe each module's call, in a single frame.

    For every FX node, torch looks up the line of each frame above it.
    """

    @functools.wraps(original)
    def wrapper(self: Any, module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        capture = running.dynamo_capture.get()
        if capture is None:
            return original(self, module, forward, args, kwargs)
        called = torch_internals.called_by_export(module)
        try:
            name = self.path_of_module(called)
        except Exception:
            # a module that was registered after tracing began: torch has no scope for it
            name = None
        calls = [(called, name)]
        changes = Changes()
        inner = torch_internals.called_by_forward(called)
        if inner is not None:
            calls.append((inner, None))
        torch_internals.call_uncompiled(changes, called)
        step = "recording that a module is called"
        entered = 0
        for entering, scope in calls:
            if capture.step(step, capture.calls.enter, self, entering, scope, args, kwargs):
                entered += 1
        if entered == 1 and torch_internals.has_forward_pre_hooks(called):

            def replaced(_module: Any, *given: Any) -> None:
                watching = "recording the arguments that forward pre-hooks returned"
                capture.step(watching, capture.calls.replace_arguments, self, called, *given)

            torch_internals.add_last_pre_hook(changes, called, replaced)
        try:
            result = original(self, module, forward, args, kwargs)
        finally:
            changes.take_back()
        for _ in range(entered):
            capture.step("recording that a module returns", capture.calls.leave, self, result)
        return result

    return wrapper


@replacing
def call_region(
    original: Callable[..., Any],
    func: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a function marked by ``torch.compiler.nested_compile_region`` as if it were not marked.

    torch lets Dynamo trace such a region, and runs its graph, in which no call of a module can be
    observed. The exported graph is the same without it.
    """
    if torch.compiler.is_dynamo_compiling() or running.dynamo_capture.get() is None:
        return original(func, *args, **kwargs)
    return func(*args, **kwargs)


def call_operator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Observe operators with branches or loop bodies."""

    @functools.wraps(original)
    def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        capture = running.dynamo_capture.get()
        if capture is None or not capture.step(
            "recording the bodies of an operator", capture.calls.enter_operator, self, args
        ):
            return original(self, *args, **kwargs)
        try:
            return original(self, *args, **kwargs)
        finally:
            capture.step(
                "recording that an operator with bodies returns", capture.calls.bodies.leave
            )

    return wrapper


@replacing
def prepare(
    original: Callable[..., Any],
    exported_program: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Observe the decomposition of the exported program, node by node."""
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


def _decomposed(
    capture: Any,
    decompose: Callable[[], Any],
    program: Any,
    changes: Changes,
) -> Any:
    """Decompose a program; if torch fails at containers of other libraries, again without them."""
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
    """Record each executed node: torch decomposes an exported graph by executing its nodes."""

    @functools.wraps(original)
    def wrapper(self: Any, n: Any) -> Any:
        capture = running.dynamo_capture.get()
        if capture is None or not capture.decomposition.runs:
            return original(self, n)
        return _run_watched(capture, lambda: original(self, n), self, n)

    return wrapper


def _run_watched(
    capture: Any,
    run: Callable[[], Any],
    interpreter: Any,
    node: Any,
) -> Any:
    """Execute a node of an FX graph, and record the nodes of another graph traced meanwhile."""
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
    """Match tensors before the graph is optimised: it may have been read back from bytes."""
    capture = running.dynamo_capture.get()
    if capture is not None:
        capture.step(
            "finding tensors again after the opset was converted", capture.converted, self.model
        )
    return original(self)


@replacing
def replace_input_with(
    original: Callable[..., Any],
    self: Any,
    index: int,
    value: Any,
) -> Any:
    """Record the value that replaces another one at one of its consumers."""
    if 0 <= index < len(self.inputs):
        _replaced(self.inputs[index], value)
    original(self, index, value)


@replacing
def replace_all_uses_with(
    original: Callable[..., Any],
    self: Any,
    replacement: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Record the value that replaces another one."""
    _replaced(self, replacement)
    original(self, replacement, *args, **kwargs)


def _replaced(old: Any, new: Any) -> None:
    capture = running.dynamo_capture.get()
    active = running.wanted()
    if capture is not None:
        capture.step(_REPLACED, capture.replaced, old, new)
    elif active is not None:
        active.replaced(old, new)


@replacing
def save(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Update the tags of models that were rewritten before a model is written."""
    active = running.wanted()
    if active is not None and running.dynamo_capture.get() is None:
        active.settle()
    return original(*args, **kwargs)


@replacing
def skips_frame(
    original: Callable[..., Any],
    obj: Any,
    *rest: Any,
    **named: Any,
) -> Any:
    """Let Dynamo trace torch's own layers if they are called from code that it cannot trace.

    By default it skips them there, as functions of torch, and the graphs of such a model lack them.
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
    """Keep Dynamo's compiled code, although ``torch.export`` resets Dynamo in strict mode."""
    if not running.keeps_dynamo.get():
        original()


@replacing
def list_once(original: Callable[..., Any]) -> Any:
    """List the operators with decompositions once per set of operators: it takes 0.1 s."""
    composite = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    return _listed(original, tuple(composite))


@functools.lru_cache(maxsize=1)
def _listed(find: Callable[[], Any], names: tuple[str, ...]) -> Any:
    return find()


def read_once(original: Callable[..., Any]) -> Any:
    """Read torch's translations of operators once; torch needs a second for it in every export."""

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
