"""Every patch of torch and onnx_ir, and the wrappers around torch's TorchScript exporter.

A wrapper calls what it wraps and tells the capture of the running export what happened. Some do more while an export
of ours runs in this thread: `_slow_forward`, `_traced`, `_export_file` and `call_region` do the work themselves,
`_listed`, `_blocks`, `_serialize` and `_add_functions` do the same work faster. In every other thread and task, all of
them only call what they wrap. ``tests/exporter/test_torch_internals.py`` fails where one of the places named here has
moved.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from htp_export.errors import CaptureError
from htp_export.exporter.capture import dynamo_patches, late_saving, torchscript_internals
from htp_export.exporter.capture.calls import Given
from htp_export.exporter.capture.jit_graph import may_have_blocks
from htp_export.exporter.capture.patching import Patch, Patches
from htp_export.exporter.capture.root_call import RootCall
from htp_export.exporter.capture.running import script_capture, translations_read, wanted
from htp_export.exporter.capture.weights import stand_ins, stored
from htp_export.files.protobuf_bytes import Weight
from htp_export.files.replacing import replace_file
from htp_export.process.restoring import Changes, restored, set_variable

_CORE = "torch.onnx._internal.exporter._core"
_SCRIPT = "torch.onnx._internal.torchscript_exporter.utils"
_SCRIPT_PROTO = "torch.onnx._internal.torchscript_exporter.onnx_proto_utils"


def _script_export(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        active = wanted()
        if active is None or script_capture.get() is not None:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs).arguments
        run, named = functools.partial(original, *args, **kwargs), bool(bound.get("input_names"))
        return active.torchscript(run, bound["model"], bound["args"], named)

    return wrapper


def _slow_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of the method that runs ``forward`` while a trace is made, doing what that does.

    It takes the method's place in the call stack too, and has its names: the tracer walks the stack for every
    operation, so that a frame more for every module costs a tenth of the export, and names values by what it finds.
    """

    @functools.wraps(original)
    def wrapper(self: Any, *input: Any, **kwargs: Any) -> Any:
        capture = script_capture.get()
        if capture is None:
            return original(self, *input, **kwargs)
        tracing_state = torchscript_internals.tracing_state()
        name = capture.step("noting that a module is called", capture.enter, self, tracing_state)
        if name is None and capture.fault is None:  # none of the model's modules
            return original(self, *input, **kwargs)
        root = None if capture.root_runs else capture.root_call
        if root is not None:
            input, kwargs = root.arguments(input)
        capture.root_runs, waits = True, False
        try:
            if name is None:
                result = original(self, *input, **kwargs)
            else:
                given = capture.step("noting what a module is given", Given.of, self.forward, input, kwargs)
                if name:
                    tracing_state.push_scope(name)
                try:
                    result = self.forward(*input, **kwargs)
                finally:
                    if name:
                        tracing_state.pop_scope()
                arguments = (capture, tracing_state, self, given, result, root)
                waits = bool(capture.step("noting that a module returns", _returns, *arguments))
        finally:
            capture.root_runs = root is None
        return result if root is None or waits else root.result(result)

    return wrapper


def _returns(capture: Any, tracing_state: Any, module: Any, given: Any, result: Any, root: RootCall | None) -> bool:
    changed = None if root is None else root.result
    return bool(capture.returns(module, tracing_state, given, result, changed))


def _traced(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(model: Any, args: Any) -> Any:
        capture = script_capture.get()
        if capture is None:
            return original(model, args)
        result = capture.trace(lambda args: original(model, args), model, args)
        capture.step("reading the traced graph", capture.traced, result[0])
        return result

    return wrapper


def _created(original: Callable[..., Any]) -> Callable[..., Any]:
    """Where the graph comes from: for a quantized model, from `torch.jit.trace`, which torch put before."""

    @functools.wraps(original)
    def wrapper(model: Any, args: Any) -> Any:
        graph, parameters, *rest = original(model, args)
        capture = script_capture.get()
        if capture is not None:
            capture.created(graph, len(parameters))
        return graph, parameters, *rest

    return wrapper


def _run_symbolic(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(graph: Any, block: Any, node: Any, inputs: Any, *rest: Any) -> Any:
        result = original(graph, block, node, inputs, *rest)
        capture = script_capture.get()
        if capture is not None:
            capture.step("following the translation of an operator", capture.translated_node, node, result)
        return result

    return wrapper


def _run_symbolic_method(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(graph: Any, name: str, *rest: Any) -> Any:
        result = original(graph, name, *rest)
        capture = script_capture.get()
        if capture is not None:
            following = "following the translation of an autograd.Function"
            capture.step(following, capture.translated_function, name, result)
        return result

    return wrapper


def _serialize(original: Callable[..., Any]) -> Callable[..., Any]:
    """Leave the weights out of the bytes that torch makes: they are put in when the file is written.

    torch would copy each of them three times on its way into the file, and once more to look for functions.
    """

    @functools.wraps(original)
    def wrapper(graph: Any, weights: Any, opset: Any, axes: Any, defer: bool, *rest: Any) -> Any:
        capture = script_capture.get()

        def plain() -> Any:
            return original(graph, weights, opset, axes, defer, *rest)

        empty = None
        if capture is not None and not defer:
            empty = capture.step("looking for weights to leave out of the bytes", stand_ins, weights)
        if capture is None or not empty:
            return plain()
        try:
            model_bytes, copied, *others = original(graph, {**weights, **empty}, opset, axes, True, *rest)
        except RuntimeError:
            # What cannot be done so is done as torch does it, and fails as it does there: above 2 GB, weights go
            # into files of their own.
            return plain()
        capture.step("keeping the weights for the file", _keep_weights, capture, weights, empty, copied)
        if capture.fault is not None:
            return plain()
        capture.whole = lambda: plain()[0]
        return model_bytes, {}, *others

    return wrapper


def _keep_weights(capture: Any, weights: Any, empty: Iterable[str], copied: dict[str, bytes]) -> None:
    capture.weights = {name: Weight.of(data) for name, data in copied.items()}
    capture.weights.update((name, stored(weights[name])) for name in empty)


def _add_functions(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(model_bytes: bytes, custom_opsets: Any) -> bytes:
        capture = script_capture.get()
        if capture is not None:
            looking = "looking for nodes of custom domains"
            if capture.step(looking, capture.has_only_standard_nodes, model_bytes):
                return model_bytes  # nothing to add: torch would parse the whole file to find out
            if (whole := capture.whole) is not None:
                capture.whole = lambda: original(whole(), custom_opsets)
        result: bytes = original(model_bytes, custom_opsets)
        return result

    return wrapper


def _export_file(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(model_bytes: bytes, f: Any, export_map: Any) -> Any:
        capture = script_capture.get()
        if capture is None:
            return original(model_bytes, f, export_map)
        chunks = capture.step("tagging the nodes of the file", capture.tagged, model_bytes)
        if chunks is None or not _written(capture, f, chunks):
            capture.give_up()
            _write(f, [model_bytes if capture.whole is None else capture.whole()])
        return None

    return wrapper


def _written(capture: Any, f: Any, chunks: Iterable[bytes | memoryview]) -> bool:
    """Write the tagged file, if its pieces can be made; else leave no trace of it."""
    began = f.tell() if hasattr(f, "seekable") and f.seekable() else None

    def pieces() -> Iterator[bytes | memoryview]:
        pieces_left = iter(chunks)
        while (piece := capture.step("writing the tagged file", next, pieces_left, None)) is not None:
            yield piece
        if capture.fault is not None:
            raise capture.fault

    try:
        _write(f, pieces())
    except CaptureError as fault:
        if fault is not capture.fault or (began is None and not isinstance(f, (str, os.PathLike))):
            raise  # what was written to a stream stays
        if began is not None:
            f.seek(began)
            f.truncate()
        return False
    return True


def _write(f: Any, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file whole: beside its place first, then into it, so that a failure leaves what was there."""
    if not isinstance(f, (str, os.PathLike)):
        for chunk in chunks:
            f.write(chunk)
        return
    with replace_file(Path(f)) as new, new.open("wb") as opened:
        for chunk in chunks:
            opened.write(chunk)


def _listed(original: Callable[..., Any]) -> Callable[..., Any]:
    """What a node reads or makes, value by value.

    The bindings make a new type of iterator for each list, at thirty times the cost of one access; the exporter asks
    for such lists for every node that it looks at or makes.
    """
    name = original.__name__
    node = importlib.import_module("torch._C").Node
    size, at = getattr(node, f"{name}Size"), getattr(node, f"{name}At")

    @functools.wraps(original)
    def wrapper(self: Any) -> Iterator[Any]:
        if script_capture.get() is None:
            untouched: Iterator[Any] = original(self)
            return untouched
        return iter([at(self, place) for place in range(size(self))])

    return wrapper


def _blocks(original: Callable[..., Any]) -> Callable[..., Any]:
    """As `_listed`, for blocks, which cannot be had one by one; but most nodes have none."""

    @functools.wraps(original)
    def wrapper(self: Any) -> Iterator[Any]:
        if script_capture.get() is None:
            untouched: Iterator[Any] = original(self)
            return untouched
        kind = self.kind()
        # Somebody's own translation may give any ONNX node blocks.
        blocks: Iterator[Any] = original(self) if may_have_blocks(kind) or kind.startswith("onnx::") else iter(())
        return blocks

    return wrapper


class ScriptPasses:
    """``torch._C`` as the TorchScript exporter sees it, with three of its passes watched."""

    def __init__(self, passes: Any) -> None:
        self._passes = passes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._passes, name)

    def _jit_pass_onnx(self, graph: Any, *args: Any) -> Any:
        capture = script_capture.get()
        if capture is None:
            return self._passes._jit_pass_onnx(graph, *args)
        capture.step("reading the traced graph before its translation", capture.before_translation, graph)
        translated = self._passes._jit_pass_onnx(graph, *args)
        capture.step("reading the ONNX graph as it was translated", capture.translated, translated)
        return translated

    def _jit_pass_canonicalize(self, graph: Any) -> Any:
        copied = self._passes._jit_pass_canonicalize(graph)
        capture = script_capture.get()
        if capture is not None:
            capture.step("matching values of a graph with those of its copy", capture.renumbered, graph, copied)
        return copied

    def _jit_pass_onnx_assign_scoped_names_for_node_and_value(self, graph: Any) -> None:
        self._passes._jit_pass_onnx_assign_scoped_names_for_node_and_value(graph)
        capture = script_capture.get()
        if capture is not None:
            capture.step("reading the finished ONNX graph", capture.named, graph)


# Where an export begins. Apart, because the dynamo exporter takes 30 MB of memory to import.
DYNAMO_ENTRY = Patches(
    Patch(*late_saving.PLACE, late_saving.saving_after(dynamo_patches.core_export, wanted))
    if late_saving.is_late()
    else Patch(_CORE, "export", dynamo_patches.core_export),
    Patch("torch.export._trace", "_export", dynamo_patches.export_program),
    Patch("torch._ops", "HigherOrderOperator.__call__", dynamo_patches.call_operator),
    Patch("torch._higher_order_ops.invoke_subgraph", "invoke_subgraph_placeholder", dynamo_patches.call_region),
)
TORCHSCRIPT_ENTRY = Patches(Patch(_SCRIPT, "_export", _script_export))

MODULE_CALLS = Patches(
    Patch("torch.fx.experimental.proxy_tensor", "_ModuleStackTracer.call_module", dynamo_patches.call_module),
)

DYNAMO = Patches(
    Patch(_CORE, "_prepare_exported_program_for_export", dynamo_patches.prepare),
    Patch(_CORE, "_translate_fx_graph", dynamo_patches.translate_graph),
    Patch(_CORE, "_exported_program_to_onnx_program", dynamo_patches.translate),
    Patch("torch.fx.interpreter", "Interpreter.run_node", dynamo_patches.run_node),
    Patch("torch.onnx", "ONNXProgram.optimize", dynamo_patches.optimize),
)

REPLACEMENTS = Patches(
    Patch("onnx_ir", "Node.replace_input_with", dynamo_patches.replace_input_with),
    Patch("onnx_ir", "Value.replace_all_uses_with", dynamo_patches.replace_all_uses_with),
    Patch("onnx_ir", "save", dynamo_patches.save),
    Patch("onnx_ir", "to_proto", dynamo_patches.save),
)

TRANSLATIONS = Patches(
    Patch("torch.onnx._internal.exporter._registration", "ONNXRegistry.from_torchlib", dynamo_patches.read_once),
)

DYNAMO_FRAMES = Patches(Patch("torch._dynamo.trace_rules", "check", dynamo_patches.skips_frame))
DYNAMO_RESET = Patches(Patch("torch._dynamo", "reset", dynamo_patches.reset_dynamo))

TORCHSCRIPT = Patches(
    Patch(_SCRIPT, "_trace_and_get_graph_from_model", _traced),
    Patch(_SCRIPT, "_create_jit_graph", _created),
    Patch(_SCRIPT, "_run_symbolic_function", _run_symbolic),
    Patch(_SCRIPT, "_run_symbolic_method", _run_symbolic_method),
    Patch(_SCRIPT, "_C", ScriptPasses),
    Patch(_SCRIPT_PROTO, "_add_onnxscript_fn", _add_functions),
    Patch(_SCRIPT_PROTO, "_export_file", _export_file),
    Patch("torch.nn", "Module._slow_forward", _slow_forward),
    Patch("torch._C", "Graph._export_onnx", _serialize),
    Patch("torch._C", "Node.inputs", _listed),
    Patch("torch._C", "Node.outputs", _listed),
    Patch("torch._C", "Node.blocks", _blocks),
)

EVERY = (
    DYNAMO_ENTRY,
    TORCHSCRIPT_ENTRY,
    MODULE_CALLS,
    REPLACEMENTS,
    DYNAMO,
    TRANSLATIONS,
    DYNAMO_FRAMES,
    DYNAMO_RESET,
    TORCHSCRIPT,
)


def translations_read_once() -> contextlib.AbstractContextManager[None]:
    """Read torch's translations of operators once for all exports inside: translations that come later are not seen."""

    def make(changes: Changes) -> None:
        TRANSLATIONS.hold(changes)
        set_variable(changes, translations_read, {})

    return restored(make)
