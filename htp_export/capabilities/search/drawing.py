"""Results of ``sensitivity`` and ``search`` as tables of a terminal, and as CSV."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from htp_export.capabilities.search.search_results import Front
from htp_export.capabilities.search.sensitivity_results import (
    SENSITIVITY_COLUMNS,
    BlockSensitivity,
    ModuleSensitivity,
    Sensitivity,
    drawn_columns,
)
from htp_export.reporting.columns import MODULE, Column, csv_text
from htp_export.reporting.command_words import in_commands
from htp_export.reporting.module_table import flat_table

_BLOCK_COLUMNS: tuple[Column[BlockSensitivity], ...] = (
    Column("block", "block", right=False),
    Column("part", "module", text=lambda part: part or "(whole)", right=False),
    Column("precision", "precision", right=False),
    Column("mean", "mean error", text="{:.2e}".format),
    Column("worst", "worst", text="{:.2e}".format),
    Column("worst_module", "in", right=False),
)


def render_sensitivity(result: Sensitivity) -> RenderableType:
    """The ranking, the table of repeated blocks, and the summary."""
    columns: list[Column[ModuleSensitivity]] = [MODULE, *drawn_columns(result)]
    parts: list[RenderableType] = [flat_table(columns, result.ranking)]
    if result.blocks:
        rows = sorted(result.blocks, key=lambda block: -block.worst)
        parts += [Text(""), flat_table(_BLOCK_COLUMNS, rows), Text("")]
    return Group(*parts, Text(result.summary), *_lines(result.lines))


def sensitivity_csv(result: Sensitivity) -> str:
    """Every module in every precision, as CSV."""
    columns: list[Column[ModuleSensitivity]] = [MODULE, *SENSITIVITY_COLUMNS]
    return csv_text(columns, (row for rows in result.modules.values() for row in rows.values()))


def render_search(result: Front[Any]) -> RenderableType:
    """The plans on the front, and the summary."""
    columns, rows = result.table()
    table = flat_table(columns, rows)
    return Group(table, Text(result.summary), *_lines(result.lines))


def _lines(lines: tuple[str, ...]) -> list[Text]:
    return [Text(in_commands(line), style="dim") for line in lines]
