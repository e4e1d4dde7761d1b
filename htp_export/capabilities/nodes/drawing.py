"""Maps, drawn for a terminal or a pipe, or written as CSV."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from htp_export.capabilities.nodes.map_result import DRAWN_COLUMNS, MAP_COLUMNS, MapTable, ModelMap, plain_text

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["map_csv", "render_map"]


def render_map(mapped: ModelMap, table: MapTable = "nodes") -> RenderableType:
    """A table with a line for each row, then the summary.

    Args:
        mapped: The result.
        table: Which of its tables.
    """
    from rich.console import Group
    from rich.text import Text

    from htp_export.drawing.module_table import flat_table

    lines = (mapped.summary, *mapped.lines)
    return Group(flat_table(DRAWN_COLUMNS[table], mapped.rows(table)), *map(Text, lines))


def map_csv(mapped: ModelMap, table: MapTable = "nodes") -> str:
    """A table as CSV, with lists by comma.

    Args:
        mapped: The result.
        table: Which of its tables.
    """
    stream, columns = io.StringIO(), MAP_COLUMNS[table]
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([column.name for column in columns])
    writer.writerows([plain_text(column.data(row)) for column in columns] for row in mapped.rows(table))
    return stream.getvalue()
