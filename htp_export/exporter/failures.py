"""Errors of torch's exporters: the module and the line of the model at which an export failed."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from htp_export.errors import described
from htp_export.exporter.broken_graphs import module_of_frame
from htp_export.exporter.model_lines import is_of_model

_LONGEST = 300  # characters of a reason: it must fit a line of a table or a page
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)')


class FailurePlace(NamedTuple):
    """The place in a model at which an export failed.

    ``module`` is the path of the module that ran, None if unknown; ``file`` and ``line`` are the
    innermost line outside of torch, ``""`` and 0 if unknown.
    """

    module: str | None
    file: str = ""
    line: int = 0


def place_of_failure(error: BaseException, path_by_id: Mapping[int, str]) -> FailurePlace:
    """Find the module and the line of a model at which an export failed with an error.

    ``path_by_id``: ``id(module)`` → module path, for the modules of the model.
    """
    errors = list(_chain(error))
    node = _traced_node(errors)
    if node is not None:
        module = _module_of_node(node, path_by_id)
        place = _place_of_node(node)
    else:
        module = _running_module(errors[-1], path_by_id)
        place = _place_in_model(errors[-1])
    return FailurePlace(module, *(place or ("", 0)))


def _traced_node(errors: Sequence[BaseException]) -> Any:
    """The FX node that torch's exporter was translating when an error was raised, or None."""
    for error in reversed(errors):
        for frame, _ in reversed(list(_frames(error))):
            node = _node_in(frame)
            if node is not None:
                return node
    return None


def _running_module(error: BaseException, path_by_id: Mapping[int, str]) -> str | None:
    for frame, _ in reversed(list(_frames(error))):
        path = module_of_frame(frame, path_by_id)
        if path is not None:
            return path
    return None


def _place_in_model(error: BaseException) -> tuple[str, int] | None:
    for frame, line in reversed(list(_frames(error))):
        if is_of_model(frame.f_code.co_filename):
            return frame.f_code.co_filename, line
    return None


def reason_of(error: BaseException) -> str:
    r"""The type and the first line of the original error in a chain of causes.

    Examples:
        >>> reason_of(ValueError("no such size\nin this tensor"))
        'ValueError: no such size'
    """
    *_, cause = _chain(error)
    return described(cause)[:_LONGEST]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes, the original one last."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _frames(error: BaseException) -> Iterator[tuple[types.FrameType, int]]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _node_in(frame: types.FrameType) -> Any:
    """The FX node that a function of torch's exporter translates in a frame, or None."""
    node = frame.f_locals.get("node")
    if isinstance(node, torch.fx.Node) and node.op == "call_function":
        return node
    return None


def _module_of_node(node: Any, path_by_id: Mapping[int, str]) -> str | None:
    paths = set(path_by_id.values())
    stack = [str(name) for name, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return next((name for name in reversed(stack) if name in paths), None)


def _place_of_node(node: Any) -> tuple[str, int] | None:
    trace = node.meta.get("stack_trace") or ""
    places = [(str(file), int(line)) for file, line in _FRAME.findall(trace)]
    for place in reversed(places):
        if is_of_model(place[0]):
            return place
    return places[-1] if places else None
