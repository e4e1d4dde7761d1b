"""The graph of a PyTorch model, which way it was got, and why no better one was."""

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
    """Where one way to the graph of a model ended.

    Attributes:
        way: Which way: ``onnx``, ``torch.export``, ``torch.fx``, ``dynamo``.
        reason: The first line of what torch said.
        module: Path of the module that ran; None where that is not known.
        file: The Python file of the model, or of a library that it uses; ``""`` where that is not
            known.
        line: The line in it; 0 where that is not known.
    """

    way: Way
    reason: str
    module: str | None = None
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        module = "" if self.module is None else f" in module {self.module or '(the root)'}"
        place = f" ({self.file}:{self.line})" if self.file else ""
        what = "graph break" if self.way == "dynamo" else f"{self.way} stopped"
        return f"{what}{module}{place}: {self.reason}"


@dataclass(frozen=True)
class Inspected(HoldsModel):
    """The result of `inspect`: a graph with its module tree, for `cost`, `view`, and ``tagged``.

    Attributes:
        model: The graph. Only that of the way ``onnx`` is an ONNX model that can be written.
        way: ``onnx``: the model was exported, as `export` does. ``torch.export``: a graph of
            torch's operators. ``torch.fx``: the same, by symbolic tracing. ``dynamo``: the graphs
            between graph breaks. ``parts``: modules that were exported one by one, side by side.
        stopped: Where each better way ended, the best one first.
        breaks: Where Dynamo's graphs end before ``forward`` does, and where Dynamo gave up a
            function that is in none (``dynamo``).
        graphs: Name of each of Dynamo's graphs → the graph by itself, the largest first
            (``dynamo``). The names of its nodes in ``model`` begin with its name. A graph that runs
            several times in one module is there once.
        failures: Module path → error, for modules that could not be exported (``parts``).
        notes: What else there is to know, as sentences.
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
        """What `to_dict` has: the way and the stops; breaks where there can be some."""
        entries = super().data()
        return (
            entries
            if self.way == "dynamo"
            else {k: value for k, value in entries.items() if k != "breaks"}
        )

    @property
    def summary(self) -> str:
        """Which way, in one line."""
        return f"graph by {_WORDS[self.way]}"

    @property
    def lines(self) -> tuple[str, ...]:
        """Where better ways ended, notes, and what could not be exported."""
        failed = (f"{path or '(root)'}: {why}" for path, why in self.failures.items())
        return (*map(str, self.stopped), *self.notes, *map(str, self.breaks), *failed)


_WORDS: Mapping[Way, str] = {
    "onnx": "ONNX export",
    "torch.export": "torch.export: torch's operators, no ONNX file",
    "torch.fx": "symbolic tracing (torch.fx): torch's operators, no ONNX file",
    "dynamo": "Dynamo, with graph breaks: torch's operators, no ONNX file",
    "parts": "exporting modules one by one",
}


_LONGEST = 300  # characters of a reason that are kept
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)')
_OWN = Path(htp_export.errors.__file__).parent
_STANDARD = Path(sysconfig.get_paths()["stdlib"])
# packages in which no line of a model is
_TRACERS = ("torch", "onnx", "onnxscript", "onnx_ir", "numpy")


def stop_of(way: Way, error: BaseException, path_by_id: Mapping[int, str]) -> Stop:
    """Where a way ended with an error; ``path_by_id``: ``id(module)`` → module path, for the modules of the model."""
    # imports torch, which results do not need
    from htp_export.exporter.broken_graphs import module_of_frame

    errors = list(_chain(error))
    frames = list(_frames(errors[-1]))
    every = (frame for each in reversed(errors) for frame, _ in reversed(list(_frames(each))))
    node = next((node for frame in every if (node := _node_in(frame)) is not None), None)
    if node is not None:
        module, place = _module_of_node(node, path_by_id), _place_of_node(node)
    else:
        running = (module_of_frame(frame, path_by_id) for frame, _ in reversed(frames))
        module = next((path for path in running if path is not None), None)
        lines = ((frame.f_code.co_filename, line) for frame, line in reversed(frames))
        place = next((each for each in lines if is_of_model(each[0])), None)
    file, line = place or ("", 0)
    return Stop(way, reason_of(error), module, file, line)


def reason_of(error: BaseException) -> str:
    r"""The kind of an error and the first line of what it says, without errors that were made of it.

    Examples:
        >>> reason_of(ValueError("no such size\nin this tensor"))
        'ValueError: no such size'
    """
    *_, cause = _chain(error)
    return described(cause)[:_LONGEST]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and what it was made of, the first one last."""
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
    """The node of an FX graph that a function of torch's exporter works on."""
    import torch

    node = frame.f_locals.get("node")
    return node if isinstance(node, torch.fx.Node) and node.op == "call_function" else None


def _module_of_node(node: Any, path_by_id: Mapping[int, str]) -> str | None:
    paths = set(path_by_id.values())
    stack = [str(name) for name, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return next((name for name in reversed(stack) if name in paths), None)


def _place_of_node(node: Any) -> tuple[str, int] | None:
    found = [(file, int(line)) for file, line in _FRAME.findall(node.meta.get("stack_trace") or "")]
    return next(
        (each for each in reversed(found) if is_of_model(each[0])), found[-1] if found else None
    )


def is_of_model(file: str) -> bool:
    """Whether a file has code of a model, or of a library that it uses, and is no part of what traces it."""
    path = Path(file)
    if file.startswith("<") or path.is_relative_to(_OWN):
        return False
    packages = ("site-packages", "dist-packages")
    below = next(
        (path.parts[place + 1] for place, part in enumerate(path.parts) if part in packages), None
    )
    if below is None:
        return not path.is_relative_to(_STANDARD)
    return below not in _TRACERS
