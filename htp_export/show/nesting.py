"""The functions of a nested model, drawn for a terminal or a pipe."""

from __future__ import annotations

from collections import Counter

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from htp_export.surgery.nesting import Nested

__all__ = ["render"]


def render(nested: Nested) -> RenderableType:
    """A table with a line for each function, and how many modules were left flat, by reason.

    Args:
        nested: What to draw.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("function", overflow="fold", style="cyan")
    for column in ("calls", "nodes", "inputs", "outputs"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("first module", overflow="fold")
    for name, row in nested.functions.items():
        counts = map(str, (row.calls, row.nodes, row.inputs, row.outputs))
        table.add_row(Text(name), *counts, Text(row.modules[0]))
    reasons = Counter(nested.skipped.values())
    notes = [Text(f"{count} left flat: {reason}", style="yellow") for reason, count in reasons.most_common()]
    return Group(table, *notes)
