"""The result of `pipeline`: what each step did."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from htp_export.format.model_metadata import ProvenanceNote
from htp_export.model.tagged import HoldsModel
from htp_export.results.columns import Column
from htp_export.results.result import PlainData, Table


@dataclass(frozen=True)
class StepReport(PlainData):
    """What became of one step.

    Attributes:
        number: Its place, from 1.
        name: The step.
        status: ``ran``; ``kept``: an earlier run had done it; ``failed``: the check did not hold; ``skipped``.
        seconds: How long it took.
        nodes: Number of nodes of the model afterwards, including those in subgraphs; None if it is unknown.
        bytes: Bytes of its weights, shared ones once; the same.
        summary: What a check found, in one line.
        file: The file that a change made; None for a check.
    """

    number: int
    name: str
    status: Literal["ran", "kept", "failed", "skipped"]
    seconds: float = 0.0
    nodes: int | None = None
    bytes: int | None = None
    summary: str = ""
    file: Path | None = None


_COLUMNS: tuple[Column[StepReport], ...] = (
    Column("number", "step"),
    Column("name", "name", right=False),
    Column("status", "status", right=False),
    Column("nodes", "nodes"),
    Column("bytes", "weights", unit="B"),
    Column("seconds", "seconds", lambda report: round(report.seconds, 1)),
    Column("summary", "", right=False),
)


@dataclass(frozen=True)
class PipelineRun(HoldsModel):
    """The result of `htp_export.pipeline`.

    Attributes:
        steps: What became of each step, in order.
        provenance: The steps that made the model, as its metadata has them; earlier pipelines first.
        output: The file that was written; None if a check failed.
        same: When the pipeline of a file was repeated: whether its model came out again. None otherwise.
        model: The model; if a check failed, the one that it was given.
    """

    derived = ("ok", "summary")

    steps: tuple[StepReport, ...]
    provenance: tuple[ProvenanceNote, ...]
    output: Path | None
    same: bool | None = None
    model: ir.Model = field(repr=False, kw_only=True)

    @property
    def failed(self) -> StepReport | None:
        """The check that did not hold."""
        return next((report for report in self.steps if report.status == "failed"), None)

    @property
    def ok(self) -> bool:
        """Whether all checks held, and a repeated pipeline made the same model."""
        return self.failed is None and self.same is not False

    @property
    def summary(self) -> str:
        """The outcome in one line."""
        if self.failed is not None:
            left = sum(1 for report in self.steps if report.status == "skipped")
            skipped = f"; {left} skipped" if left else ""
            return f"step {self.failed.number} ({self.failed.name}) does not hold{skipped}; the output is not written"
        kept = sum(1 for report in self.steps if report.status == "kept")
        done = f"{len(self.steps)} steps{f', {kept} kept from an earlier run' if kept else ''}"
        again = {True: "; the same model came out again", False: "; another model came out than before", None: ""}
        return done + again[self.same]

    def table(self) -> Table:
        """The steps."""
        return _COLUMNS, self.steps
