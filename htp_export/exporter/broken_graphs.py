"""Dynamo's graphs of a model that it cannot trace as a whole, with breaks between them."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from htp_export.exporter.capture import patches, running
from htp_export.exporter.capture.torch_internals import is_compiled
from htp_export.process.restoring import (
    Changes,
    restored,
    set_variable,
    turn_attention_fast_path_off,
)

_VALUES = "capture_scalar_outputs"
_SIZES = "capture_dynamic_output_shape_ops"
_SYMBOLS_FOR_DATA: tuple[dict[str, Any], ...] = (
    {_VALUES: True, _SIZES: True},
    {_VALUES: False, _SIZES: True},
    {_VALUES: False, _SIZES: False},
)
"""Settings of Dynamo, in the order in which they are tried for a frame.

Symbols represent values, and sizes, that depend on data, so that the graph does not break there."""


@dataclass(frozen=True)
class GraphRun:
    """One run of one of Dynamo's graphs."""

    graph: Any  # the FX graph module; equal modules may share one
    inputs: tuple[Any, ...]  # its inputs, with parameters
    outputs: tuple[Any, ...]
    path: str  # the module whose ``forward`` ran
    traced_in: str  # the module whose ``forward`` ran when the graph was traced


@dataclass(frozen=True)
class GraphBreak:
    """The end of a graph before the end of ``forward``."""

    reason: str  # the first line of Dynamo's message
    # file and line of each frame on the stack, outermost first
    frames: tuple[tuple[str, int], ...]
    module: str = ""  # the module whose ``forward`` ran


@dataclass
class BrokenRun:
    """One run of a model in graphs."""

    runs: list[GraphRun] = field(default_factory=list)  # the runs of the graphs, in order
    # ends of graphs, also in functions without a graph
    breaks: list[GraphBreak] = field(default_factory=list)


def run_with_breaks(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    path_by_id: Mapping[int, str],
) -> BrokenRun:
    """Run a model once by Dynamo, and return its graphs; changes of the model are not undone.

    ``path_by_id``: ``id(module)`` → module path. Raises a `RuntimeError` if a module is compiled.
    """
    if any(map(is_compiled, model.modules())):
        raise RuntimeError(
            "the model, or a module in it, is compiled: its graphs are the compiler's"
        )
    broken = BrokenRun()

    def compiled(graph: Any, _: Any) -> Callable[..., Any]:
        traced_in: list[str] = []  # the modules of its runs; it was traced in the first one
        graph_break = _break_of(graph)

        def run(*inputs: Any) -> Any:
            outputs = graph(*inputs)
            path = _running(path_by_id)
            if not traced_in and graph_break is not None:
                broken.breaks.append(replace(graph_break, module=path))
            traced_in.append(path)
            broken.runs.append(GraphRun(graph, inputs, tuple(outputs), path, traced_in[0]))
            return outputs

        return run

    def lost(frame: Any, graph_break: GraphBreak) -> None:
        path = module_of_frame(frame, path_by_id)
        if path is None:
            path = _running(path_by_id)
        broken.breaks.append(replace(graph_break, module=path))

    with _prepared(), torch.no_grad():
        _dynamo_frames(model, compiled, lost)(*args, **kwargs)
    return broken


def dynamo_as_it_was() -> contextlib.AbstractContextManager[None]:
    """Restore Dynamo's caches and counters, which other code may use, after a ``with`` block."""

    def make(changes: Changes) -> None:
        running.wait_alone(changes)
        patches.DYNAMO_RESET.hold(changes)
        set_variable(changes, running.keeps_dynamo, True)
        _leave_dynamo_as_it_was(changes)

    return restored(make)


@contextlib.contextmanager
def _prepared() -> Iterator[None]:
    def make(changes: Changes) -> None:
        running.wait_alone(changes)
        patches.DYNAMO_FRAMES.hold(changes)
        turn_attention_fast_path_off(changes)
        logger = logging.getLogger("torch._dynamo")  # its warnings are breaks in the result
        changes.will_undo(functools.partial(logger.setLevel, logger.level))
        logger.setLevel(logging.ERROR)
        set_variable(changes, running.wants_frames_of_layers, True)

    from torch._dynamo import config

    # as good as no limit: Dynamo runs a frame without a graph beyond it
    limits: dict[str, Any] = dict.fromkeys(
        ("recompile_limit", "accumulated_recompile_limit"), 10_000
    )
    with restored(make), config.patch(suppress_errors=True, **limits):
        yield


def module_of_frame(frame: types.FrameType, path_by_id: Mapping[int, str]) -> str | None:
    """The path of the module whose method, or its continuation after a break, runs in a frame.

    None for other frames.
    """
    for name in (*frame.f_code.co_varnames[:1], "self"):
        path = path_by_id.get(id(frame.f_locals.get(name)))
        if path is not None:
            return path
    return None


def _running(path_by_id: Mapping[int, str]) -> str:
    """The innermost module of the model whose method runs."""
    frame = sys._getframe(1)
    while frame is not None:
        path = module_of_frame(frame, path_by_id)
        if path is not None:
            return path
        frame = frame.f_back  # type: ignore[assignment] # None above the outermost
    return ""


def _break_of(module: Any) -> GraphBreak | None:
    """The break at the end of a graph; None if it ends as the function does."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    frames = [(str(frame.filename), int(frame.lineno or 0)) for frame in reason.user_stack]
    return _break(str(reason.reason), frames)


def _break(message: str, frames: Sequence[tuple[str, int]]) -> GraphBreak:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return GraphBreak(lines[0] if lines else "graph break", tuple(frames))


def _dynamo_frames(
    model: Any,
    backend: Callable[[Any, Any], Callable[..., Any]],
    lost: Callable[[Any, GraphBreak], None],
) -> Callable[..., Any]:
    """Return a function that runs a model by Dynamo, frame by frame, with breaks.

    If Dynamo fails in a frame, it makes no graph of the frame at all. Symbols for values that
    depend on data can be the cause: ``x[index, :2]`` with a tensor as index
    (``PendingUnbackedSymbolNotFound``), ``range(n)`` in a loop. Such a frame is traced again with
    fewer symbols: the graph then breaks where a value is needed. ``lost`` is called with each frame
    that runs without a graph, and the reason.
    """
    import torch._dynamo

    context: Any = torch._dynamo.optimize(backend)  # type: ignore[no-untyped-call,unused-ignore]
    converter = context.callback._torchdynamo_orig_backend
    converter._inner_convert = _RetryingTracer(converter._inner_convert, lost)
    run: Callable[..., Any] = context(model)
    return run


class _RetryingTracer:
    """Dynamo's tracer of a frame; if it fails, it runs again with fewer symbols for data."""

    def __init__(
        self, convert: Callable[..., Any], lost: Callable[[Any, GraphBreak], None]
    ) -> None:
        self._convert = convert
        self._lost = lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._convert, name)

    def __call__(self, frame: Any, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo import config

        errors: list[Exception] = []
        for symbols in _SYMBOLS_FOR_DATA:
            try:
                with config.patch(**symbols):
                    return self._convert(frame, *args, **kwargs)
            except Exception as error:  # if raised again, Dynamo runs the frame without a graph
                errors.append(error)
        # The last error, of a trace without symbols, names the line that needs a tensor's value.
        last = errors[-1]
        stack = [
            (str(entry.filename), int(entry.lineno or 0))
            for entry in getattr(last, "real_stack", None) or ()
        ]
        code = frame.f_code
        self._lost(frame, _break(str(last), stack or [(code.co_filename, code.co_firstlineno)]))
        raise last


def _leave_dynamo_as_it_was(changes: Changes) -> None:
    """Restore Dynamo's caches of code, and nothing else, when the changes are undone."""
    from torch._dynamo import convert_frame, pgo, utils

    code_cache = _CodeCache((convert_frame.input_codes, convert_frame.output_codes))
    counters = {name: counter.copy() for name, counter in utils.counters.items()}
    profile = {
        name: getattr(pgo, name)
        for name in ("_CODE_STATE", "_INIT_CODE_STATE")
        if hasattr(pgo, name)
    }

    def put_back() -> None:
        code_cache.put_back()
        utils.counters.clear()
        utils.counters.update(counters)
        for name, value in profile.items():
            setattr(pgo, name, value)

    changes.will_undo(put_back)
    for name in profile:
        setattr(pgo, name, None)


class _CodeCache:
    """The code that Dynamo has compiled, and its cache entries, at one moment."""

    def __init__(self, trackers: tuple[Any, Any]) -> None:
        from torch._C._dynamo import eval_frame

        self._trackers = trackers  # of the code that it read, and of the code that it generated
        self._seen = [set(tracker.seen_ids) for tracker in trackers]
        self._entries: set[int] = set()  # ids of the code of the cache entries
        for code in _codes(trackers[0]):
            entries = eval_frame._debug_get_cache_entry_list(code)
            self._entries.update(id(entry.code) for entry in entries)

    def put_back(self) -> None:
        """Remove code and entries that were added since."""
        from torch._C._dynamo import eval_frame

        for code in _codes(self._trackers[0]):
            if id(code) not in self._seen[0]:
                eval_frame.reset_code(code)
                continue
            for entry in eval_frame._debug_get_cache_entry_list(code):
                if id(entry.code) not in self._entries:
                    _forget(entry)
        for tracker, seen in zip(self._trackers, self._seen, strict=True):
            tracker.seen[:] = [code for code in tracker.seen if id(code()) in seen]
            tracker.seen_ids &= seen


def _codes(tracker: Any) -> list[types.CodeType]:
    codes = (reference() for reference in tracker.seen)
    return [code for code in codes if code is not None]


def _forget(entry: Any) -> None:
    """Remove compiled code from Dynamo's cache."""
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    state = entry.guard_manager.extra_state
    if state is not None:
        state.invalidate(entry, DeletedGuardManagerWrapper("made for inspection"))
