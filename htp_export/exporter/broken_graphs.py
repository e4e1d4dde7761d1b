"""Dynamo's graphs of a model that it cannot trace as a whole: it goes on after what it cannot trace."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from htp_export.exporter.capture import patches, running
from htp_export.exporter.capture.dynamo_internals import (
    Broken,
    break_of,
    dynamo_frames,
    leave_dynamo_as_it_was,
    settings_for_breaks,
)
from htp_export.exporter.capture.torch_internals import is_compiled
from htp_export.process.restoring import Changes, restored, set_variable
from htp_export.process.shared_settings import turn_attention_fast_path_off

__all__ = ["BrokenRun", "GraphBreak", "GraphRun", "dynamo_as_it_was", "module_of_frame", "run_with_breaks"]


@dataclass(frozen=True)
class GraphRun:
    """One run of one of Dynamo's graphs.

    Attributes:
        graph: The FX graph module; of equal modules, all may run the same one.
        inputs: What it was given, parameters too.
        outputs: What it returned.
        path: The module whose ``forward`` ran.
        traced_in: The module whose ``forward`` ran when the graph was made.
    """

    graph: Any
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    path: str
    traced_in: str


@dataclass(frozen=True)
class GraphBreak:
    """Where a graph ended before ``forward`` did.

    Attributes:
        reason: What Dynamo said.
        module: The module whose ``forward`` ran.
        frames: File and line of each call on the way there, outermost first.
    """

    reason: str
    module: str
    frames: tuple[tuple[str, int], ...]


@dataclass
class BrokenRun:
    """One run of a model in graphs.

    Attributes:
        runs: The runs of the graphs, in order.
        breaks: Where graphs ended, or would have ended in functions of which Dynamo made none.
    """

    runs: list[GraphRun] = field(default_factory=list)
    breaks: list[GraphBreak] = field(default_factory=list)


def run_with_breaks(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], path_by_id: Mapping[int, str]
) -> BrokenRun:
    """Run a model once by Dynamo, and keep the graphs that it makes.

    Args:
        model: The model. What a run of it changes is not restored.
        args: Its arguments.
        kwargs: Its arguments by keyword.
        path_by_id: ``id(module)`` → module path.

    Raises:
        RuntimeError: The model, or a module in it, is compiled already.
        Exception: Errors of the model.
    """
    if any(map(is_compiled, model.modules())):
        raise RuntimeError("the model, or a module in it, is compiled: its graphs are the compiler's")
    broken = BrokenRun()

    def compiled(graph: Any, _: Any) -> Callable[..., Any]:
        traced_in: list[str] = []
        found = break_of(graph)

        def run(*inputs: Any) -> Any:
            outputs = graph(*inputs)
            path = _running(path_by_id)
            if not traced_in and found is not None:
                broken.breaks.append(GraphBreak(found.reason, path, found.frames))
            traced_in.append(path)
            broken.runs.append(GraphRun(graph, inputs, tuple(outputs), path, traced_in[0]))
            return outputs

        return run

    def lost(frame: Any, found: Broken) -> None:
        path = module_of_frame(frame, path_by_id)
        broken.breaks.append(GraphBreak(found.reason, _running(path_by_id) if path is None else path, found.frames))

    with _prepared(), torch.no_grad():
        dynamo_frames(model, compiled, lost)(*args, **kwargs)
    return broken


def dynamo_as_it_was() -> contextlib.AbstractContextManager[None]:
    """Let Dynamo, which other code may use, have after a ``with`` block what it had before: caches and counters."""

    def make(changes: Changes) -> None:
        running.wait_alone(changes)
        patches.DYNAMO_RESET.hold(changes)
        set_variable(changes, running.keeps_dynamo, True)
        leave_dynamo_as_it_was(changes)

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

    with restored(make), settings_for_breaks():
        yield


def module_of_frame(frame: types.FrameType, path_by_id: Mapping[int, str]) -> str | None:
    """The path of the module whose method runs in a frame; None if it is no method of one.

    Args:
        frame: The frame. What goes on after a graph break has other arguments than the method, and ``self`` among them.
        path_by_id: ``id(module)`` → module path.
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
