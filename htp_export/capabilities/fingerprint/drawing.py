"""A fingerprint, drawn for a terminal or a pipe."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from htp_export.capabilities.fingerprint.families import Fingerprint
from htp_export.drawing.tag_note import tag_note

__all__ = ["render_fingerprint"]


def render_fingerprint(fingerprint: Fingerprint) -> RenderableType:
    """The family, the evidence, and a table of the repeated blocks."""
    facts = (Text(f"  {fact}") for fact in fingerprint.evidence)
    parts: list[RenderableType] = [Text(fingerprint.family, style="bold"), *facts]
    if fingerprint.blocks:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        for _ in range(2):
            table.add_column(justify="right", no_wrap=True)
        table.add_column(overflow="fold", style="cyan")
        table.add_column(overflow="fold", style="dim")
        for block in fingerprint.blocks:
            first = (block.modules or block.starts)[0]
            table.add_row(f"{block.count} ×", f"{block.nodes} nodes", Text(block.name), Text(first))  # noqa: RUF001 - "times"
        parts += [Text(), table]
    return Group(*parts, Text(), *tag_note(fingerprint.tags))
