"""Wrappers that report torch's TorchScript export to the running capture; see `patches`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from htp_export.exporter.capture import torchscript_internals
from htp_export.exporter.capture.calls import CallTensors
from htp_export.exporter.capture.patching import replacing
from htp_export.exporter.capture.running import alone, script_capture, wanted
from htp_export.exporter.capture.saving import KeptWeights, empty_weights, kept_weights, write


def script_export(original: Callable[..., Any]) -> Callable[..., Any]:
    """Pass an export to the exporter that adds tags in this thread, if there is one."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        active = wanted()
        if active is None or script_capture.get() is not None:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs).arguments
        run = functools.partial(original, *args, **kwargs)
        named = bool(bound.get("input_names"))
        return alone(active.torchscript(run, bound["model"], bound["args"], named))

    return wrapper


def slow_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Observe a module's ``forward`` during a trace, in the frame of the replaced method.

    The tracer walks the stack for every operation, so one more frame for every module would cost a
    tenth of the export. It also names values by the names that it finds in the frames.
    """

    @functools.wraps(original)
    def wrapper(self: Any, *input: Any, **kwargs: Any) -> Any:
        capture = script_capture.get()
        if capture is None:
            return original(self, *input, **kwargs)
        tracing_state = torchscript_internals.tracing_state()
        name = capture.step(
            "recording that a module is called", capture.trace.enter, self, tracing_state
        )
        if name is None and capture.fault is None:  # not a module of the model
            return original(self, *input, **kwargs)
        root = None if capture.root.runs else capture.root.call
        if root is not None:
            input, kwargs = root.arguments(input)
        waits_for_hooks = False
        capture.root.runs = True
        try:
            if name is None:
                result = original(self, *input, **kwargs)
            else:
                given = capture.step(
                    "recording the arguments of a module",
                    CallTensors.given,
                    self.forward,
                    input,
                    kwargs,
                )
                if root is not None:
                    capture.step("finding which arguments are numbers", capture.called, root, input)
                if name:
                    tracing_state.push_scope(name)
                try:
                    result = self.forward(*input, **kwargs)
                finally:
                    if name:
                        tracing_state.pop_scope()
                convert = None if root is None else root.result
                arguments = (self, tracing_state, given, result, convert)
                waits_for_hooks = bool(
                    capture.step("recording that a module returns", capture.returns, *arguments)
                )
        finally:
            capture.root.runs = root is None
        if root is None or waits_for_hooks:
            return result
        return root.result(result)

    return wrapper


def traced(original: Callable[..., Any]) -> Callable[..., Any]:
    """Trace the model with the call that `RootCalls` chooses, and record the graph.

    In few frames: see `slow_forward`.
    """

    @functools.wraps(original)
    def trace(model: Any, args: Any) -> Any:
        capture = script_capture.get()
        if capture is None:
            return original(model, args)
        inputs, changes = capture.begins_trace(model, args)
        try:
            result = original(model, inputs)
        finally:
            changes.take_back()
        capture.root.traced()
        capture.step("reading the traced graph", capture.traced, result[0])
        return result

    return trace


@replacing
def reading_numbers(original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Record that the model's code reads numbers of a tensor, which the trace takes as constants."""
    capture = script_capture.get()
    if capture is not None and torchscript_internals.tracing_state() is not None:
        capture.step("recording that Python reads a number", capture.reads_numbers, tensor)
    return original(tensor, *args, **kwargs)


@replacing
def named_parameters(original: Callable[..., Any], graph: Any, parameters: Any) -> Any:
    """Record the graph that torch created, right afterwards: a wrapper around that would be in each stack."""
    capture = script_capture.get()
    if capture is not None:
        capture.step(
            "reading the graph that is to be translated", capture.created, graph, parameters
        )
    return original(graph, parameters)


@replacing
def serialize(
    original: Callable[..., Any],
    graph: Any,
    weights: Any,
    opset: Any,
    axes: Any,
    defer: bool,
    *rest: Any,
) -> Any:
    """Omit the weights from the bytes that torch serializes; they are added to the file later."""
    capture = script_capture.get()

    def plain() -> Any:
        return original(graph, weights, opset, axes, defer, *rest)

    empty = None
    if capture is not None and not defer:
        empty = capture.step(
            "looking for weights to leave out of the bytes", empty_weights, weights
        )
    if capture is None or not empty:
        return plain()
    try:
        model_bytes, copied, *others = original(
            graph, {**weights, **empty}, opset, axes, True, *rest
        )
    except RuntimeError:
        # If this fails, torch's own way is taken, with its own errors: above 2 GB, weights are
        # written to separate files.
        return plain()
    kept = capture.step("keeping the weights for the file", kept_weights, weights, empty, copied)
    if kept is None:
        return plain()
    capture.kept = KeptWeights(kept, lambda: plain()[0])
    return model_bytes, {}, *others


@replacing
def add_functions(
    original: Callable[..., Any],
    model_bytes: bytes,
    custom_opsets: Any,
) -> Any:
    """Add torch's functions also to the bytes with all weights, in case they are needed."""
    capture = script_capture.get()
    if capture is not None and (kept := capture.kept) is not None:
        without_functions = kept.whole
        kept.whole = lambda: original(without_functions(), custom_opsets)
    return original(model_bytes, custom_opsets)


@replacing
def export_file(
    original: Callable[..., Any],
    model_bytes: bytes,
    f: Any,
    export_map: Any,
) -> Any:
    """Write the file with tags; without tags, if the capture failed and is not strict."""
    capture = script_capture.get()
    if capture is None:
        return original(model_bytes, f, export_map)
    chunks = capture.step("tagging the nodes of the file", capture.tagged, model_bytes)
    if chunks is None:
        capture.give_up()
        chunks = [model_bytes if capture.kept is None else capture.kept.whole()]
    return write(f, chunks)


# passes that create new initializers
_FOLDING = frozenset(
    f"_jit_pass_onnx_{name}"
    for name in ("eval_peephole", "constant_fold", "deduplicate_initializers")
)


class ScriptPasses:
    """``torch._C`` for the TorchScript exporter, with some of its passes observed."""

    def __init__(self, passes: Any) -> None:
        self._passes = passes

    def __getattr__(self, name: str) -> Any:
        wanted_pass = getattr(self._passes, name)
        if name in _FOLDING:
            return functools.partial(_folding, wanted_pass)
        return wanted_pass

    def _jit_pass_onnx(self, graph: Any, *args: Any) -> Any:
        capture = script_capture.get()
        if capture is None:
            return self._passes._jit_pass_onnx(graph, *args)
        capture.step(
            "reading the traced graph before its translation", capture.before_translation, graph
        )
        translated = self._passes._jit_pass_onnx(graph, *args)
        capture.step("reading the ONNX graph as it was translated", capture.translated, translated)
        return translated

    def _jit_pass_canonicalize(self, graph: Any) -> Any:
        copied = self._passes._jit_pass_canonicalize(graph)
        capture = script_capture.get()
        if capture is not None:
            capture.step(
                "matching values of a graph with those of its copy",
                capture.renumbered,
                graph,
                copied,
            )
        return copied

    def _jit_pass_onnx_assign_scoped_names_for_node_and_value(self, graph: Any) -> None:
        self._passes._jit_pass_onnx_assign_scoped_names_for_node_and_value(graph)
        capture = script_capture.get()
        if capture is not None:
            capture.step("reading the finished ONNX graph", capture.named, graph)


def _folding(run: Callable[..., Any], graph: Any, parameters: Any, *rest: Any) -> Any:
    """Run a pass that creates initializers; the graph is recorded before the first one."""
    capture = script_capture.get()
    if capture is not None:
        capture.step(
            "reading how the constants of a graph are made", capture.folds, graph, parameters
        )
    return run(graph, parameters, *rest)
