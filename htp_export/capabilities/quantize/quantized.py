"""The result of ``quantize``: precision and bytes by module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import onnx_ir as ir

from htp_export.capabilities.quantize.checking import Check
from htp_export.errors import InputError
from htp_export.model.tagged import HoldsModel
from htp_export.results.columns import CLASS_NAME, Column, many, percent, si
from htp_export.results.tables import BYTES_COLUMNS, PRECISION, SPARSITY, CompressedModule, ModuleTable
from htp_export.results.tag_facts import TagFacts


@dataclass(frozen=True, kw_only=True)
class QuantizedModule(CompressedModule):
    """What became of one module, with all modules below it; ``""`` is the whole model.

    Attributes:
        nodes: How many nodes it has.
        changed: Of those, the nodes that got another precision.
    """

    nodes: int = 0
    changed: int = 0


QUANTIZED_COLUMNS: tuple[Column[Any], ...] = (
    CLASS_NAME,
    PRECISION,
    Column("nodes", "nodes", keep=1),
    Column("changed", "changed", keep=2),
    SPARSITY,
    *BYTES_COLUMNS,
)
"""What is known of each module."""


@dataclass(frozen=True)
class Quantized(ModuleTable, HoldsModel):
    """The result of `htp_export.quantize`.

    Attributes:
        modules: Module path → what became of it.
        operators: Name of a precision → operator type → number of nodes that got it.
        left: Name of a precision → operator type → number of nodes of its modules that stay as they are, because
            ONNX Runtime or ONNX has no such operator in it.
        notes: Sentences on what to know of the result.
        dry: Whether nothing was run: then the bytes are predicted, and there is no model.
        metric_before: The user's metric of the model as it was; None without rules with ``max_drop``.
        metric_after: The same of the result.
        check: What both models are on the data, with ``check``; None without.
        given: The model; None in a dry run.
    """

    columns = QUANTIZED_COLUMNS
    derived = ("tags",)
    optional = ("metric_before", "metric_after", "check", "tags")

    modules: Mapping[str, QuantizedModule]
    operators: Mapping[str, Mapping[str, int]]
    left: Mapping[str, Mapping[str, int]]
    notes: tuple[str, ...] = ()
    dry: bool = field(default=False, repr=False)
    metric_before: float | None = None
    metric_after: float | None = None
    check: Check | None = None
    given: ir.Model | None = field(default=None, repr=False, kw_only=True)

    @property
    def model(self) -> ir.Model:  # type: ignore[override]
        """The quantized model, with tags; an InputError if nothing was run."""
        if self.given is None:
            raise InputError("a dry run makes no model")
        return self.given

    @cached_property
    def tags(self) -> TagFacts | tuple[()]:
        """What the model knows about its module tags."""
        return () if self.given is None else self.tagged.tag_facts

    @property
    def summary(self) -> str:
        """The whole in one line."""
        root = self.modules[""]
        counts = {name: sum(kinds.values()) for name, kinds in self.operators.items()}
        changed = ", ".join(f"{many(count, 'node')} in {name}" for name, count in counts.items())
        predicted = "predicted: " if self.dry else ""
        share = "" if root.ratio is None else f" ({percent(root.ratio)})"
        sizes = f"weights {si(root.bytes_before, 'B')} before, {si(root.bytes_after, 'B')} after{share}"
        return f"{predicted}{sizes}; {changed or 'nothing changed'}"

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines below the summary: nodes that stay as they are, what was checked, what is to be known, and the tags."""
        left = (
            f"{name} leaves as they are: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}"
            for name, kinds in self.left.items()
        )
        return (*left, *(self.check.lines if self.check else ()), *super().lines)

    @property
    def drawn(self) -> Sequence[Column[Any]]:
        """The columns of the table as text."""
        return [column for column in self.columns if column.name != "sparsity"]

    def data(self) -> dict[str, Any]:
        """What `to_dict` has."""
        return {"dry_run": self.dry, **super().data()}
