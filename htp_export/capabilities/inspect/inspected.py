"""The result of `inspect`: the graph of a PyTorch model, and why better ways failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import onnx_ir as ir

from htp_export.model.tagged import HoldsModel
from htp_export.reporting.columns import many, percent
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
class GraphPart(PlainData):
    """One of Dynamo's graphs.

    Attributes:
        name: Its key in `Inspected.graphs`.
        module: Path of the module whose ``forward`` the graph is a part of.
        nodes: Number of its nodes.
        runs: How often it runs.
        share: The share of its runs in all nodes of the model.
    """

    name: str
    module: str
    nodes: int
    runs: int
    share: float

    def __str__(self) -> str:
        runs = f", {self.runs} runs" if self.runs > 1 else ""
        return f"{self.name} of {self.module or '(the root)'}: {many(self.nodes, 'node')}{runs}"


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
        parts: The number of nodes and runs of each of these graphs, the dominant one first: the one
            whose runs have the most nodes (``dynamo``).
        failures: Module path → error, for modules that could not be exported (``parts``).
        notes: Further information, as sentences.
    """

    optional = ("failures", "parts")

    model: ir.Model = field(repr=False)
    way: Way
    stopped: tuple[Stop, ...] = ()
    breaks: tuple[Stop, ...] = ()
    graphs: Mapping[str, ir.Model] = field(default_factory=dict, repr=False)
    parts: tuple[GraphPart, ...] = ()
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
        way = f"graph by {_WORDS[self.way]}"
        if len(self.parts) < 2:
            return way
        first = self.parts[0]
        return f"{way}; {len(self.parts)} graphs, {first.name} with {percent(first.share)} of the nodes"

    @property
    def lines(self) -> tuple[str, ...]:
        """Errors of better ways, notes, and modules that could not be exported."""
        failed = (f"{path or '(root)'}: {why}" for path, why in self.failures.items())
        parts = map(str, self.parts[:_LISTED] if len(self.parts) > 1 else ())
        return (*map(str, self.stopped), *self.notes, *parts, *map(str, self.breaks), *failed)


_LISTED = 20
"""Graphs that are listed as text; `Inspected.parts` has all."""

_WORDS: Mapping[Way, str] = {
    "onnx": "ONNX export",
    "torch.export": "torch.export: torch's operators, no ONNX file",
    "torch.fx": "symbolic tracing (torch.fx): torch's operators, no ONNX file",
    "dynamo": "Dynamo, with graph breaks: torch's operators, no ONNX file",
    "parts": "exporting modules one by one",
}
