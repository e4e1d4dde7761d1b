"""The graph of a PyTorch model, which way it was got, and why no better one was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import onnx_ir as ir

from htp_export.model.tagged import HoldsModel
from htp_export.results.result import PlainData

Way: TypeAlias = Literal["onnx", "torch.export", "torch.fx", "dynamo", "parts"]


@dataclass(frozen=True)
class Stop(PlainData):
    """Where one way to the graph of a model ended.

    Attributes:
        way: Which way: ``onnx``, ``torch.export``, ``torch.fx``, ``dynamo``.
        reason: The first line of what torch said.
        module: Path of the module that ran; None where that is not known.
        file: The Python file of the model, or of a library that it uses; ``""`` where that is not known.
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
        way: ``onnx``: the model was exported, as `export` does. ``torch.export``: a graph of torch's operators.
            ``torch.fx``: the same, by symbolic tracing. ``dynamo``: the graphs between graph breaks. ``parts``: modules
            that were exported one by one, side by side.
        stopped: Where each better way ended, the best one first.
        breaks: Where Dynamo's graphs end before ``forward`` does, and where Dynamo gave up a function that is in none
            (``dynamo``).
        graphs: Name of each of Dynamo's graphs → the graph by itself, the largest first (``dynamo``). The names of its
            nodes in ``model`` begin with its name. A graph that runs several times in one module is there once.
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
        return entries if self.way == "dynamo" else {k: value for k, value in entries.items() if k != "breaks"}

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
