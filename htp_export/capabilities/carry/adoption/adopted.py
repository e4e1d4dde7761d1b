"""The result of `adopt`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from htp_export.model.tagged import HoldsModel

__all__ = ["Adopted", "AdoptedModule"]


@dataclass(frozen=True)
class AdoptedModule:
    """A module in a file that others exported.

    Attributes:
        path: Its path.
        class_name: Its class.
        nodes: Number of nodes in its region.
        unknown: Number of these of which it is not known which module in this one computes them.
        fate: Its fate in the file; see ``docs/format.md``.
    """

    path: str = field(repr=False)
    class_name: str
    nodes: int
    unknown: int
    fate: str


@dataclass(frozen=True)
class Adopted(HoldsModel):
    """The result of `adopt`.

    Attributes:
        model: The file with tags on every node.
        nodes: Number of nodes, including those in subgraphs and functions.
        recovered: ``htp.reason`` → number of nodes whose owners were found by this evidence; see ``docs/format.md``.
        unknown: Names of the nodes whose owners are not known; of those without a name, their first output.
        modules: Module path → its nodes, for modules that have some.
        contamination: ``(module, tensor, leaves)`` for tensors at boundaries that are no inputs or outputs of the
            module in PyTorch.
        not_compared: Why values were not compared; empty if they were.
    """

    model: ir.Model = field(repr=False)
    nodes: int
    recovered: Mapping[str, int]
    unknown: Sequence[str]
    modules: Mapping[str, AdoptedModule]
    contamination: Sequence[tuple[str, str, bool]]
    not_compared: str = ""

    @property
    def share_known(self) -> float:
        """The share of nodes whose owners are known; 1 for a file without nodes."""
        return 1 - len(self.unknown) / self.nodes if self.nodes else 1.0

    @property
    def summary(self) -> str:
        """The result in one line."""
        return f"{self.nodes} nodes, {self.nodes - len(self.unknown)} with known owners, {len(self.unknown)} unknown"

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader has to know besides the numbers, a line each."""
        return (f"values were not compared: {self.not_compared}",) if self.not_compared else ()

    def __str__(self) -> str:
        lines = [f"{self.nodes:7} nodes"]
        lines += [f"{count:7} by {reason}" for reason, count in self.recovered.items()]
        lines += [f"{len(self.unknown):7} unknown"] if self.unknown else []
        lines += [*self.notes]
        return "\n".join(lines)
