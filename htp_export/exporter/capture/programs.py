"""What was captured while ``torch.export`` made a program, kept with that program.

It is noted on the nodes of the program's graph, so that it lives as long as they do, and comes along when torch or
another library copies the graph, changes it, or makes another program around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from htp_export.exporter.capture.dynamo import DynamoCapture
from htp_export.exporter.capture.torch_internals import graph_modules_in
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.parameters import ModuleParameters

_CAPTURED = "htp.captured"  # key in the ``meta`` of FX nodes


@dataclass(frozen=True)
class Captured:
    """What was captured of one model; it does not hold the model.

    Attributes:
        capture: The capture, as it was when the program was complete.
        hierarchy: The model's module tree.
        parameters: Module path → the parameters that it holds.
    """

    capture: DynamoCapture
    hierarchy: Hierarchy | None
    parameters: Mapping[str, ModuleParameters] | None

    def keep_with(self, program: Any) -> None:
        """Note it on the nodes of an ``ExportedProgram``."""
        for node in _nodes(program):
            node.meta[_CAPTURED] = self

    def __deepcopy__(self, _: Any) -> Captured:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a program that is pickled, and read elsewhere, is one that was made elsewhere


def captured_with(program: Any) -> Captured | None:
    """What was captured while a program was made; None if nothing was, or if its nodes come from several models."""
    noted = (node.meta.get(_CAPTURED) for node in _nodes(program))
    found: dict[int, Captured] = {id(captured): captured for captured in noted if captured is not None}
    return next(iter(found.values())) if len(found) == 1 else None


def _nodes(program: Any) -> Iterator[Any]:
    for module in graph_modules_in(program.graph_module):
        yield from module.graph.nodes
