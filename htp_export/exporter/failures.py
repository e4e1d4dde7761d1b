"""Errors of torch's exporters: the module and the line of the model at which an export failed."""

from __future__ import annotations

import linecache
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from htp_export.errors import described
from htp_export.exporter.broken_graphs import module_of_frame
from htp_export.exporter.capture import torchscript
from htp_export.exporter.capture.torchscript_internals import is_jit_node, source_range
from htp_export.exporter.model_lines import is_of_model, line_of_range

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

    def __str__(self) -> str:
        """The place as in ``in module 'fc' (net.py:7): return self.fc(x)``; ``""`` if it is unknown."""
        module = "" if self.module is None else f"in module {self.module or '(the root)'!r}"
        if not self.file:
            return module
        place = f"({self.file}:{self.line})" if module else f"at {self.file}:{self.line}"
        code = linecache.getline(self.file, self.line).strip()
        return f"{module} {place}".lstrip() + (f": {code}" if code else "")


def place_of_failure(error: BaseException, path_by_id: Mapping[int, str]) -> FailurePlace:
    """Find the module and the line of a model at which an export failed with an error.

    ``path_by_id``: ``id(module)`` → module path, for the modules of the model.
    """
    errors = list(_chain(error))
    node = _translated_node(errors)
    if isinstance(node, torch.fx.Node):
        module = _module_of_node(node, path_by_id)
        place = _place_of_node(node)
    elif node is not None:
        module = _module_of_scope(node.scopeName(), path_by_id)
        line = line_of_range(source_range(node), [torchscript.__file__])
        place = None if line is None else (line.file, line.line)
    else:
        module = _running_module(errors[-1], path_by_id)
        place = _place_in_model(errors[-1])
    return FailurePlace(module, *(place or ("", 0)))


NEXT = "next: "
"""The begin of the note with the next step; the command line has one of its own."""


def notes_of_failure(
    error: BaseException, path_by_id: Mapping[int, str], running: Sequence[str], *, dynamo: bool
) -> Iterator[str]:
    """The notes for an error of an export: the module and the line, a remedy, and the next step.

    ``running``: the paths of the modules that ran, outermost first; empty if unknown.
    """
    place = place_of_failure(error, path_by_id)
    if place.module is None and running:
        place = place._replace(module=running[-1])
    if str(place):
        yield str(place)
    yield _remedy(error, dynamo=dynamo)
    yield f"{NEXT}htp_export.inspect(model, args) has the graph of all that torch can trace, with the modules"


# names of torch's errors, which moved between its versions: an operator without a translation, and
# a graph that would depend on the values of a tensor
_NO_TRANSLATION = frozenset(("DispatchError", "UnsupportedOperatorError"))
_OF_VALUES = frozenset(
    ("GuardOnDataDependentSymNode", "DataDependentOutputException", "DynamicOutputShapeException")
)


def _remedy(error: BaseException, *, dynamo: bool) -> str:
    kinds = {type(each).__name__ for each in _chain(error)}
    other = "dynamo=False" if dynamo else "dynamo=True"
    if kinds & _NO_TRANSLATION:
        return (
            "torch has no translation of this operator into ONNX: compute the same with others there, try "
            f"{other}, or pass your own translation (custom_translation_table, in Python)"
        )
    if kinds & _OF_VALUES:
        return (
            "a graph cannot depend on the values of a tensor: compute both cases and choose with torch.where, "
            "use torch.cond, or state the size with torch._check"
        )
    return f"run the model on these inputs without an export first; if that works, try {other}"


def _module_of_scope(scope: str, path_by_id: Mapping[int, str]) -> str | None:
    """The module of a scope of the TorchScript tracer, ``net.Net::/net.Block::layer.0``."""
    names = [part.rpartition("::")[2] for part in scope.split("/")]
    path = ".".join(filter(None, names))
    return path if path in set(path_by_id.values()) else None


def _translated_node(errors: Sequence[BaseException]) -> Any:
    """The FX or JIT node that torch's exporter was translating when an error was raised, or None."""
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
    """The FX or JIT node that a function of torch's exporter translates in a frame, or None."""
    node = frame.f_locals.get("node")
    if isinstance(node, torch.fx.Node):
        return node if node.op == "call_function" else None
    return node if is_jit_node(node) else None


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
