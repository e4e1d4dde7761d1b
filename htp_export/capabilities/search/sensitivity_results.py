"""The result of ``sensitivity``: the error of the outputs for each module and precision."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from htp_export.capabilities.search.measuring import Measurement
from htp_export.reporting.columns import CLASS_NAME, MODULE, Column, record
from htp_export.reporting.result import PlainData, Result, Table
from htp_export.reporting.tag_facts import TagFacts


@dataclass(frozen=True)
class ModuleSensitivity(PlainData):
    """One module in one precision.

    Attributes:
        path: The path of the module.
        class_name: Its fully qualified class.
        precision: The name of the precision.
        alone: The measurement with only this module quantized; None if there is none.
        all_but: The measurement with all other modules quantized; None if there is none.
        estimate: Squared change of its weights times the mean square of its inputs; see
            ``estimated_errors``.
        saved_bytes: Bytes by which the model with this module quantized is smaller; None if it was
            not measured.
        saved_ms: Milliseconds by which it is faster; None if times were not measured.
        by_module: Module path → cosine between its outputs and those in the original, with this
            module quantized alone; empty if it was not requested.
        problem: The reason why the module, or all others, cannot have the precision; ``""`` without
            one.
    """

    path: str
    class_name: str
    precision: str
    alone: Measurement | None = None
    all_but: Measurement | None = None
    estimate: float | None = None
    saved_bytes: int | None = None
    saved_ms: float | None = None
    by_module: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""

    @property
    def error(self) -> float | None:
        """The error with only this module quantized: measured, or else estimated."""
        return self.alone.error if self.alone is not None else self.estimate

    def data(self) -> dict[str, Any]:
        """The contents of `to_dict`."""
        details = ("alone", "all_but", "by_module", "problem")
        columns = record(SENSITIVITY_COLUMNS, self)
        return {**columns, **{name: getattr(self, name) for name in details}}


def _short(value: float) -> str:
    return "0" if value == 0 else f"{value:.2e}"


def _decibels(value: float) -> str:
    return "exact" if value == math.inf else f"{value:.1f} dB"


SENSITIVITY_COLUMNS: tuple[Column[ModuleSensitivity], ...] = (
    CLASS_NAME,
    Column("precision", "precision", right=False),
    Column("error", "error", text=_short),
    Column("sqnr_db", "SQNR", lambda row: row.alone and row.alone.sqnr_db, text=_decibels),
    Column("cosine", "cosine", lambda row: row.alone and row.alone.cosine, text="{:.6f}".format),
    Column("kl", "KL", lambda row: row.alone and row.alone.kl, text=_short),
    Column("metric", "metric", lambda row: row.alone and row.alone.metric, text="{:.4f}".format),
    Column(
        "all_but_sqnr_db",
        "all but",
        lambda row: row.all_but and row.all_but.sqnr_db,
        text=_decibels,
    ),
    Column("saved_bytes", "saved", unit="B"),
    Column("saved_ms", "faster", unit="ms"),
    Column("estimate", "estimate", text=_short),
)
"""The columns of a sensitivity."""


@dataclass(frozen=True)
class BlockSensitivity(PlainData):
    """Modules at the same place of repeated blocks, in one precision.

    Attributes:
        block: The class of the blocks.
        part: The path of the module inside a block; ``""`` for the block itself.
        precision: The precision.
        mean: The mean error.
        worst: The largest error.
        worst_module: The module with the largest error.
        modules: The modules, in the order of the model.
    """

    block: str
    part: str
    precision: str
    mean: float
    worst: float
    worst_module: str
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Sensitivity(Result):
    """The result of `sensitivity`.

    Attributes:
        modules: Module path → name of a precision → its row.
        original: The measurement of the original model; None for estimates.
        blocks: The rows combined by repeated block.
        measured: Whether the model was quantized; otherwise errors are estimates.
        notes: Remarks on the data and on modules that were left out, a line each.
        tags: The tags of the model.
    """

    derived = ("summary",)

    modules: Mapping[str, Mapping[str, ModuleSensitivity]]
    original: Measurement | None
    blocks: tuple[BlockSensitivity, ...] = ()
    measured: bool = True
    notes: tuple[str, ...] = ()
    tags: TagFacts | None = None

    @property
    def ranking(self) -> tuple[ModuleSensitivity, ...]:
        """The rows with an error, of all modules and precisions, the largest error first."""
        rows = itertools.chain.from_iterable(rows.values() for rows in self.modules.values())
        with_error = [row for row in rows if row.error is not None]
        return tuple(sorted(with_error, key=lambda row: -(row.error or 0.0)))

    @property
    def summary(self) -> str:
        """The result in one line."""
        if not self.ranking:
            return "no module can have any of these precisions"
        first = self.ranking[0]
        kind = "error" if self.measured else "estimated error"
        return f"largest {kind}: {first.path or '(root)'} in {first.precision}, {_short(first.error or 0.0)}"

    def data(self) -> dict[str, Any]:
        """The contents of `to_dict`."""
        ranking = [
            {"module": row.path, "precision": row.precision, "error": row.error}
            for row in self.ranking
        ]
        return {**super().data(), "ranking": ranking}

    def table(self) -> Table:
        """The ranking."""
        return [MODULE, *drawn_columns(self)], self.ranking


def drawn_columns(result: Sensitivity) -> list[Column[ModuleSensitivity]]:
    """The columns with a value in some row; without the estimates if errors were measured."""
    rows = result.ranking
    columns: list[Column[ModuleSensitivity]] = []
    for column in SENSITIVITY_COLUMNS:
        is_replaced = column.name == "estimate" and result.measured
        if not is_replaced and any(column.data(row) is not None for row in rows):
            columns.append(column)
    return columns
