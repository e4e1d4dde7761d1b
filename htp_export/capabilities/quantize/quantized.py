"""The result of ``quantize``: precision and bytes by module; with ``check``, errors and times."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.files.filesystem import temporary_folder
from htp_export.model.module_facts import contents_of
from htp_export.model.tagged import HoldsModel, TaggedModel
from htp_export.reporting.columns import CLASS_NAME, Column, many, percent, si
from htp_export.reporting.result import PlainData
from htp_export.reporting.tables import (
    BYTES_COLUMNS,
    PRECISION,
    SPARSITY,
    CompressedModule,
    ModuleTable,
)
from htp_export.reporting.tag_facts import TagFacts
from htp_export.runtime.inputs import Inputs
from htp_export.runtime.runner import TIMED_RUNS, median_times
from htp_export.runtime.samples import Samples
from htp_export.runtime.sessions import RunnableModel, Session

if TYPE_CHECKING:
    from htp_export.capabilities.verify.results import ModuleResult, NotFinite

_MOST_COMPARED = 4
"""Runs of the data that are compared: each compares every module, which takes seconds for a large
model."""


@dataclass(frozen=True)
class Check(PlainData):
    """The error and the time of a quantized model, measured on this machine.

    Attributes:
        worst: The module with the largest difference of elements, as `compare` finds it; None if
            none was compared.
        max_abs: That difference.
        cosine: The cosine between its output and the original output.
        compared: How many runs of the data were compared.
        random: Whether the inputs are random: errors on real data may differ.
        bytes_before: Size of all weights of the original.
        bytes_after: The same of the result.
        ms_before: Median time of a run of the original.
        ms_after: The same of the result; the runs of both alternate.
        runs: How many runs of each were timed.
        not_finite: The first tensor with infinite elements, and the first one with NaN, as `compare`
            finds them in the first compared run that has any.
    """

    derived = ("speedup",)

    worst: str | None
    max_abs: float | None
    cosine: float | None
    compared: int
    random: bool
    bytes_before: int
    bytes_after: int
    ms_before: float
    ms_after: float
    runs: int
    not_finite: tuple[NotFinite, ...] = ()

    @property
    def speedup(self) -> float:
        """How many times as fast the result is."""
        return self.ms_before / self.ms_after if self.ms_after else math.inf

    @property
    def lines(self) -> tuple[str, ...]:
        """Error and time as text, a line each; the bytes are in the summary of the result."""
        data = f"{many(self.compared, 'run')} of {'random inputs' if self.random else 'the data'}"
        if self.worst is None or self.max_abs is None:
            error = f"no module could be compared on {data}"
        else:
            cosine = "" if self.cosine is None else f", cosine {self.cosine:.4f}"
            error = f"worst module on {data}: {self.worst or '(root)'}, max difference {self.max_abs:.2g}{cosine}"
        return (
            error,
            *(first.text for first in self.not_finite),
            f"{self.ms_before:.3f} ms a run before, {self.ms_after:.3f} ms after ({self.speedup:.2f} times as fast): "
            f"medians of {self.runs} runs each, in turn, on this machine",
        )


def check_of(
    original: TaggedModel, changed: TaggedModel, samples: Samples, bytes_after: int
) -> Check:
    """Compare a quantized model with the original on the first runs, and time both."""
    from htp_export.capabilities.verify.file_comparing import compare

    feeds = [dict(feed) for feed in itertools.islice(samples, _MOST_COMPARED)]
    worst: ModuleResult | None = None
    largest = -math.inf
    not_finite: tuple[NotFinite, ...] = ()
    for feed in feeds:
        result = compare(original, changed, feed)
        not_finite = not_finite or result.not_finite
        row = None if result.worst is None else result.modules[result.worst]
        if row is None or row.max_abs is None:
            continue
        difference = math.inf if math.isnan(row.max_abs) else row.max_abs
        if difference > largest:
            worst, largest = row, difference
    with temporary_folder() as folder:
        name = original.hierarchy.root.simple_class or "model"
        sessions = [
            Session(RunnableModel.of(tagged.model, name, folder)) for tagged in (original, changed)
        ]
        # Inputs of the result may have other types (narrow_io).
        inputs = [feeds[0], dict(Inputs.of(changed.model).feed_again(feeds[0]).arrays)]
        before, after = median_times(sessions, inputs, TIMED_RUNS)
    return Check(
        worst=None if worst is None else worst.path,
        max_abs=None if worst is None else worst.max_abs,
        cosine=None if worst is None else worst.cosine,
        compared=len(feeds),
        random=samples.random,
        bytes_before=contents_of(original).modules[""].facts.weight_bytes,
        bytes_after=bytes_after,
        ms_before=before,
        ms_after=after,
        runs=TIMED_RUNS,
        not_finite=not_finite,
    )


@dataclass(frozen=True, kw_only=True)
class QuantizedModule(CompressedModule):
    """Precision and bytes of a module with all modules below it; ``""`` is the whole model.

    Attributes:
        nodes: The number of its nodes.
        changed: The number of its nodes that got another precision.
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
"""The columns of the table of modules."""


@dataclass(frozen=True)
class Kept(PlainData):
    """A node that was left unchanged although the plan assigns a precision to it.

    Attributes:
        node: The name of the node.
        operator: Its operator type.
        modules: The modules that own it.
        precision: The name of the precision in the plan.
        whole: Whether the whole node stays; otherwise, one of its inputs stays.
        reason: The reason, a sentence.
    """

    node: str
    operator: str
    modules: tuple[str, ...]
    precision: str
    whole: bool
    reason: str


@dataclass(frozen=True)
class Quantized(ModuleTable, HoldsModel):
    """The result of `htp_export.quantize`.

    Attributes:
        modules: Module path → its precision and bytes.
        operators: Name of a precision → operator type → number of nodes that got it.
        left: Name of a precision → operator type → number of nodes of its modules that stay as they
            are, because ONNX Runtime or ONNX has no such operator in it.
        notes: Remarks on the result, a sentence each.
        dry: Whether nothing was run: then the bytes are predicted, and there is no model.
        metric_before: The user's metric of the original; None without rules with ``max_drop``.
        metric_after: The same of the result.
        check: The error and the time of the result, with ``check``; None without.
        kept: Nodes that stay as they are for another reason, such as an unknown range, or a
            failure.
        given: The model; None in a dry run.
    """

    columns = QUANTIZED_COLUMNS
    derived = ("tags",)
    optional = ("metric_before", "metric_after", "check", "kept", "tags")

    modules: Mapping[str, QuantizedModule]
    operators: Mapping[str, Mapping[str, int]]
    left: Mapping[str, Mapping[str, int]]
    notes: tuple[str, ...] = ()
    dry: bool = field(default=False, repr=False)
    metric_before: float | None = None
    metric_after: float | None = None
    check: Check | None = None
    kept: tuple[Kept, ...] = ()
    given: ir.Model | None = field(default=None, repr=False, kw_only=True)

    @property
    def model(self) -> ir.Model:  # type: ignore[override]
        """The quantized model, with tags; an `InputError` in a dry run."""
        if self.given is None:
            raise InputError("a dry run makes no model")
        return self.given

    @cached_property
    def tags(self) -> TagFacts | tuple[()]:
        """Facts about the module tags of the model; empty in a dry run."""
        return () if self.given is None else self.tagged.tag_facts

    @property
    def summary(self) -> str:
        """Bytes and changed nodes of the whole model, in one line."""
        root = self.modules[""]
        counts = {name: sum(kinds.values()) for name, kinds in self.operators.items()}
        changed = ", ".join(f"{many(count, 'node')} in {name}" for name, count in counts.items())
        predicted = "predicted: " if self.dry else ""
        share = "" if root.ratio is None else f" ({percent(root.ratio)})"
        sizes = (
            f"weights {si(root.bytes_before, 'B')} before, {si(root.bytes_after, 'B')} after{share}"
        )
        return f"{predicted}{sizes}; {changed or 'nothing changed'}"

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines below the summary: nodes that stay, the check, the notes, and the tags."""
        lines: list[str] = []
        for name, kinds in self.left.items():
            counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            lines.append(f"{name} leaves as they are: {counts}")
        if self.check is not None:
            lines += self.check.lines
        return (*lines, *super().lines)

    @property
    def drawn(self) -> Sequence[Column[Any]]:
        """The columns of the table as text."""
        return [column for column in self.columns if column.name != "sparsity"]

    def data(self) -> dict[str, Any]:
        """The contents of `to_dict`."""
        return {"dry_run": self.dry, **super().data()}
