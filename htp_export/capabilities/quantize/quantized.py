"""The result of ``quantize``: precision and bytes by module, and errors and times with ``check``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

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
from htp_export.runtime.data import Samples
from htp_export.runtime.inputs import Inputs
from htp_export.runtime.runner import TIMED_RUNS, median_times
from htp_export.runtime.sessions import RunnableModel, Session, SessionSettings

# runs of the data: every module is compared in each, which takes seconds for a large model
_MOST_COMPARED = 4


@dataclass(frozen=True)
class Check(PlainData):
    """What a model became, measured on this machine.

    Attributes:
        worst: The module with the largest difference of elements, as `compare` finds it; None if
            none was compared.
        max_abs: That difference.
        cosine: The cosine of its output with the original one.
        compared: How many runs of the data were compared.
        random: Whether these are random inputs, with which errors say little.
        bytes_before: Size of all weights of the original.
        bytes_after: The same of the result.
        ms_before: Median time of a run of the original.
        ms_after: The same of the result; the runs of both alternate.
        runs: How many runs of each were timed.
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

    @property
    def speedup(self) -> float:
        """How many times as fast the result is."""
        return self.ms_before / self.ms_after if self.ms_after else math.inf

    @property
    def lines(self) -> tuple[str, ...]:
        """Error and time in words, a line each; the bytes are in the summary of the result."""
        data = f"{many(self.compared, 'run')} of {'random inputs' if self.random else 'the data'}"
        if self.worst is None or self.max_abs is None:
            error = f"no module could be compared on {data}"
        else:
            cosine = "" if self.cosine is None else f", cosine {self.cosine:.4f}"
            error = f"worst module on {data}: {self.worst or '(root)'}, max difference {self.max_abs:.2g}{cosine}"
        return (
            error,
            f"{self.ms_before:.3f} ms a run before, {self.ms_after:.3f} ms after ({self.speedup:.2f} times as fast): "
            f"medians of {self.runs} runs each, in turn, on this machine",
        )


def check_of(
    original: TaggedModel, changed: TaggedModel, samples: Samples, bytes_after: int
) -> Check:
    """Compare what was quantized with the original on the first runs of the data, and time both on the first one."""
    from htp_export.capabilities.verify.file_comparing import compare

    feeds = [dict(feed) for feed in itertools.islice(samples, _MOST_COMPARED)]
    results = [compare(original, changed, feed) for feed in feeds]
    found = [result.modules[result.worst] for result in results if result.worst is not None]
    known = [
        (math.inf if math.isnan(row.max_abs) else row.max_abs, row)
        for row in found
        if row.max_abs is not None
    ]
    worst = max(known, key=lambda each: each[0])[1] if known else None
    with temporary_folder() as folder:
        name = original.hierarchy.root.simple_class or "model"
        runnable = [RunnableModel.of(each.model, name, folder) for each in (original, changed)]
        sessions = [Session(each, SessionSettings()) for each in runnable]
        given = [feeds[0], dict(Inputs.of(changed.model).feed_again(feeds[0]).arrays)]
        before, after = median_times(sessions, given, TIMED_RUNS)
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
    )


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
class Kept(PlainData):
    """A node that the plan gives a precision, and that stays as it is.

    Attributes:
        node: Its name.
        operator: Its type.
        modules: The modules that own it.
        precision: The precision of the plan.
        whole: Whether the node stays; otherwise one of its inputs does.
        reason: Why, in words.
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
        modules: Module path → what became of it.
        operators: Name of a precision → operator type → number of nodes that got it.
        left: Name of a precision → operator type → number of nodes of its modules that stay as they
            are, because ONNX Runtime or ONNX has no such operator in it.
        notes: Sentences on what to know of the result.
        dry: Whether nothing was run: then the bytes are predicted, and there is no model.
        metric_before: The user's metric of the model as it was; None without rules with
            ``max_drop``.
        metric_after: The same of the result.
        check: What both models are on the data, with ``check``; None without.
        kept: Nodes that stay as they are for another reason, such as a range that is not known, or
            a failure.
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
        sizes = (
            f"weights {si(root.bytes_before, 'B')} before, {si(root.bytes_after, 'B')} after{share}"
        )
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
