"""The result of `inspect`: the graph of a PyTorch model, and why better ways failed."""

from __future__ import annotations

import re
import sysconfig
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import onnx_ir as ir

import htp_export.errors
from htp_export.errors import described
from htp_export.model.tagged import HoldsModel
from htp_export.reporting.result import PlainData

Way: TypeAlias = Literal["onnx", "torch.export", "torch.fx", "dynamo", "parts"]


@dataclass(frozen=True)
class Stop(PlainData):
    """The error that ended one way to the graph of a model.

    Attributes:
        way: ``onnx``, ``torch.export``, ``torch.fx`` or ``dynamo``.
        reason: The first line of torch's message.
        module: Path of the module that ran; None if unknown.
        file: The Python file of the model, or of a library that it uses; ``""`` if unknown.
        line: The line in it; 0 if unknown.
    """

    way: Way
    reason: str
    module: str | None = None
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        module = "" if self.module is None else f" in module {self.module or '(the root)'}"
        place = f" ({self.file}:{self.line})" if self.file else ""
        event = "graph break" if self.way == "dynamo" else f"{self.way} stopped"
        return f"{event}{module}{place}: {self.reason}"


@dataclass(frozen=True)
class Inspected(HoldsModel):
    """The result of `inspect`: a graph with its module tree, for `cost`, `view`, and ``tagged``.

    Attributes:
        model: The graph. It is a valid ONNX model only by the way ``onnx``.
        way: ``onnx``: the model was exported, as by `export`. ``torch.export``: a graph of torch's
            operators. ``torch.fx``: the same, by symbolic tracing. ``dynamo``: the graphs between
            graph breaks. ``parts``: modules that were exported one by one, side by side.
        stopped: The error of each better way, the best way first.
        breaks: Ends of Dynamo's graphs before the end of ``forward``, and errors in functions
            without a graph (``dynamo``).
        graphs: Name of each of Dynamo's graphs → the graph by itself, the largest first
            (``dynamo``). The names of its nodes in ``model`` begin with its name. A graph that runs
            several times in one module occurs once.
        failures: Module path → error, for modules that could not be exported (``parts``).
        notes: Further information, as sentences.
    """

    optional = ("failures",)

    model: ir.Model = field(repr=False)
    way: Way
    stopped: tuple[Stop, ...] = ()
    breaks: tuple[Stop, ...] = ()
    graphs: Mapping[str, ir.Model] = field(default_factory=dict, repr=False)
    failures: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=(), repr=False)

    def data(self) -> dict[str, Any]:
        """The entries of `to_dict`: the way and the stops, and breaks for Dynamo's graphs."""
        entries = super().data()
        if self.way != "dynamo":
            entries = {name: entry for name, entry in entries.items() if name != "breaks"}
        return entries

    @property
    def summary(self) -> str:
        """The way, in one line."""
        return f"graph by {_WORDS[self.way]}"

    @property
    def lines(self) -> tuple[str, ...]:
        """Errors of better ways, notes, and modules that could not be exported."""
        failed = (f"{path or '(root)'}: {why}" for path, why in self.failures.items())
        return (*map(str, self.stopped), *self.notes, *map(str, self.breaks), *failed)


_WORDS: Mapping[Way, str] = {
    "onnx": "ONNX export",
    "torch.export": "torch.export: torch's operators, no ONNX file",
    "torch.fx": "symbolic tracing (torch.fx): torch's operators, no ONNX file",
    "dynamo": "Dynamo, with graph breaks: torch's operators, no ONNX file",
    "parts": "exporting modules one by one",
}


_LONGEST = 300  # characters of a reason: it must fit a line of a table or a page
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)')
_OWN = Path(htp_export.errors.__file__).parent
_STANDARD = Path(sysconfig.get_paths()["stdlib"])
# packages that trace models, and contain no lines of them
_TRACERS = ("torch", "onnx", "onnxscript", "onnx_ir", "numpy")


def stop_of(way: Way, error: BaseException, path_by_id: Mapping[int, str]) -> Stop:
    """The module and the line of a model at which a way ended with an error.

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
    file, line = place or ("", 0)
    return Stop(way, reason_of(error), module, file, line)


def _traced_node(errors: list[BaseException]) -> Any:
    """The FX node that torch's exporter was translating when an error was raised, or None."""
    for error in reversed(errors):
        for frame, _ in reversed(list(_frames(error))):
            node = _node_in(frame)
            if node is not None:
                return node
    return None


def _running_module(error: BaseException, path_by_id: Mapping[int, str]) -> str | None:
    # imports torch, which results do not need
    from htp_export.exporter.broken_graphs import module_of_frame

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
    import torch

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


def is_of_model(file: str) -> bool:
    """Whether a file has code of a model, or of a library that it uses, and not of a tracer."""
    path = Path(file)
    if file.startswith("<") or path.is_relative_to(_OWN):
        return False
    for place, part in enumerate(path.parts):
        if part in ("site-packages", "dist-packages"):
            return path.parts[place + 1] not in _TRACERS
    return not path.is_relative_to(_STANDARD)
