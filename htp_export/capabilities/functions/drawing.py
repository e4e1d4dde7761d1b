"""The functions of a nested model, drawn for a terminal or a pipe."""

from __future__ import annotations

from collections import Counter

from rich.console import Group, RenderableType
from rich.text import Text

from htp_export.capabilities.functions.nesting import FUNCTION_COLUMNS, Nested
from htp_export.drawing.module_table import flat_table

__all__ = ["render"]


def render(nested: Nested) -> RenderableType:
    """A table with a line for each function, and how many modules were left flat, by reason."""
    reasons = Counter(nested.skipped.values())
    notes = [Text(f"{count} left flat: {reason}", style="yellow") for reason, count in reasons.most_common()]
    return Group(flat_table(FUNCTION_COLUMNS, nested.functions.items()), *notes)
