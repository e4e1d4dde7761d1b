"""Dynamo's graphs of a model that it cannot trace as a whole: it goes on after what it cannot trace."""

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

_VALUES, _SIZES = "capture_scalar_outputs", "capture_dynamic_output_shape_ops"
_SYMBOLS_FOR_DATA: tuple[dict[str, Any], ...] = (
    {_VALUES: True, _SIZES: True},
    {_VALUES: False, _SIZES: True},
    {_VALUES: False, _SIZES: False},
)
"""Settings of Dynamo, in the order in which they are tried for a frame: symbols stand for values, and for sizes, that
depend on data, so that the graph goes on."""


@dataclass(frozen=True)
class GraphRun:
    """One run of one of Dynamo's graphs."""

    graph: Any  # the FX graph module; of equal modules, all may run the same one
    inputs: tuple[Any, ...]  # what it was given, parameters too
    outputs: tuple[Any, ...]  # what it returned
    path: str  # the module whose ``forward`` ran
    traced_in: str  # the module whose ``forward`` ran when the graph was made


@dataclass(frozen=True)
class GraphBreak:
    """Where a graph ended before ``forward`` did."""

    reason: str  # the first line of what Dynamo said
    # file and line of each call on the way there, outermost first
    frames: tuple[tuple[str, int], ...]
    module: str = ""  # the module whose ``forward`` ran


@dataclass
class BrokenRun:
    """One run of a model in graphs."""

    runs: list[GraphRun] = field(default_factory=list)  # the runs of the graphs, in order
    # Where graphs ended, or would have ended in functions of which Dynamo made none
    breaks: list[GraphBreak] = field(default_factory=list)


def run_with_breaks(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    path_by_id: Mapping[int, str],
) -> BrokenRun:
    """Run a model once by Dynamo, and keep the graphs that it makes; what the run changes of the model is not restored.

    ``path_by_id`` gives ``id(module)`` → module path. A `RuntimeError` if the model, or a module in
    it, is compiled.
    """
    if any(map(is_compiled, model.modules())):
        raise RuntimeError(
            "the model, or a module in it, is compiled: its graphs are the compiler's"
        )
    broken = BrokenRun()

    def compiled(graph: Any, _: Any) -> Callable[..., Any]:
        traced_in: list[str] = []
        found = _break_of(graph)

        def run(*inputs: Any) -> Any:
            outputs = graph(*inputs)
            path = _running(path_by_id)
            if not traced_in and found is not None:
                broken.breaks.append(replace(found, module=path))
            traced_in.append(path)
            broken.runs.append(GraphRun(graph, inputs, tuple(outputs), path, traced_in[0]))
            return outputs

        return run

    def lost(frame: Any, found: GraphBreak) -> None:
        path = module_of_frame(frame, path_by_id)
        broken.breaks.append(replace(found, module=_running(path_by_id) if path is None else path))

    with _prepared(), torch.no_grad():
        _dynamo_frames(model, compiled, lost)(*args, **kwargs)
    return broken


def dynamo_as_it_was() -> contextlib.AbstractContextManager[None]:
    """Let Dynamo, which other code may use, have after a ``with`` block what it had before: caches and counters."""

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
        logger = logging.getLogger("torch._dynamo")  # it warns of what is listed in the result
        changes.will_undo(functools.partial(logger.setLevel, logger.level))
        logger.setLevel(logging.ERROR)
        set_variable(changes, running.wants_frames_of_layers, True)

    from torch._dynamo import config

    limits: dict[str, Any] = dict.fromkeys(
        ("recompile_limit", "accumulated_recompile_limit"), 10_000
    )
    # graphs as large and as many as can be
    with restored(make), config.patch(suppress_errors=True, **limits):
        yield


def module_of_frame(frame: types.FrameType, path_by_id: Mapping[int, str]) -> str | None:
    """The path of the module whose method runs in a frame, also what goes on of it after a break; or None."""
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
    """Where a graph that Dynamo made ended; None if it ends as the function does."""
    found = getattr(module, "compile_subgraph_reason", None)
    if found is None or not found.graph_break:
        return None
    return _break(
        str(found.reason),
        [(str(frame.filename), int(frame.lineno or 0)) for frame in found.user_stack],
    )


def _break(said: str, frames: Sequence[tuple[str, int]]) -> GraphBreak:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return GraphBreak(lines[0] if lines else "graph break", tuple(frames))


def _dynamo_frames(
    model: Any,
    backend: Callable[[Any, Any], Callable[..., Any]],
    lost: Callable[[Any, GraphBreak], None],
) -> Callable[..., Any]:
    """Return a function that runs a model by Dynamo, frame by frame, with breaks.

    If Dynamo gives up a frame, it makes no graph of the frame at all. Symbols for values that
    depend on data can be the cause: ``x[index, :2]`` with a tensor as index
    (``PendingUnbackedSymbolNotFound``), ``range(n)`` in a loop. Such a frame is traced again with
    fewer symbols: the graph then breaks where a value is needed. ``lost`` is given a frame that
    runs and is in no graph, and why.
    """
    import torch._dynamo

    context: Any = torch._dynamo.optimize(backend)  # type: ignore[no-untyped-call,unused-ignore]
    converter = context.callback._torchdynamo_orig_backend
    converter._inner_convert = _TriedAgain(converter._inner_convert, lost)
    run: Callable[..., Any] = context(model)
    return run


class _TriedAgain:
    """Dynamo's tracer of a frame; where it gives up, it runs again with fewer symbols for data."""

    def __init__(
        self, convert: Callable[..., Any], lost: Callable[[Any, GraphBreak], None]
    ) -> None:
        self._convert, self._lost = convert, lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._convert, name)

    def __call__(self, frame: Any, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo import config

        errors: list[Exception] = []
        for symbols in _SYMBOLS_FOR_DATA:
            try:
                with config.patch(**symbols):
                    return self._convert(frame, *args, **kwargs)
            except Exception as error:  # Dynamo catches it, and runs the frame as it is
                errors.append(error)
        # The last one is of a trace without symbols: it names the line that needs the value of a
        # tensor.
        stack = [
            (str(each.filename), int(each.lineno or 0))
            for each in getattr(errors[-1], "real_stack", None) or ()
        ]
        code = frame.f_code
        self._lost(
            frame, _break(str(errors[-1]), stack or [(code.co_filename, code.co_firstlineno)])
        )
        raise errors[-1]


def _leave_dynamo_as_it_was(changes: Changes) -> None:
    """Put back what Dynamo keeps of the code that it has seen, and of that alone, when the changes are taken back."""
    from torch._C._dynamo import eval_frame
    from torch._dynamo import convert_frame, pgo, utils

    trackers = (convert_frame.input_codes, convert_frame.output_codes)
    seen = [set(tracker.seen_ids) for tracker in trackers]
    entries = {
        id(entry.code)
        for code in _codes(trackers[0])
        for entry in eval_frame._debug_get_cache_entry_list(code)
    }
    counted = {name: counter.copy() for name, counter in utils.counters.items()}
    profile = {
        name: getattr(pgo, name)
        for name in ("_CODE_STATE", "_INIT_CODE_STATE")
        if hasattr(pgo, name)
    }

    def put_back() -> None:
        for code in _codes(trackers[0]):
            if id(code) not in seen[0]:
                eval_frame.reset_code(code)
                continue
            for entry in eval_frame._debug_get_cache_entry_list(code):
                if id(entry.code) not in entries:
                    _forget(entry)
        for tracker, before in zip(trackers, seen, strict=True):
            tracker.seen[:] = [each for each in tracker.seen if id(each()) in before]
            tracker.seen_ids &= before
        utils.counters.clear()
        utils.counters.update(counted)
        for name, value in profile.items():
            setattr(pgo, name, value)

    changes.will_undo(put_back)
    for name in profile:
        setattr(pgo, name, None)


def _codes(tracker: Any) -> list[types.CodeType]:
    return [code for each in tracker.seen if (code := each()) is not None]


def _forget(entry: Any) -> None:
    """Remove what Dynamo compiled of code from its cache."""
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    state = entry.guard_manager.extra_state
    if state is not None:
        state.invalidate(entry, DeletedGuardManagerWrapper("made for inspection"))
